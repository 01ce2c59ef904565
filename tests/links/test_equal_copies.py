"""Copies that must stay equal: found to be so while they are, and named when they are not."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from everyday import slow_but_one_a_class
from lms import gpt2, text
from methods import FEEDBACK, beside
from models import MLP_SPLIT, assert_same_state, links_state, mlp, rows

import mpcomp
from mpcomp.core.context import Step, TensorMeta
from mpcomp.links import equal_copies

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


def pipe_of(method, **kwargs):
    torch.manual_seed(0)
    methods = {"act_comp": method, "grad_comp": beside(method, method)}
    options = {**methods, "loss_fn": F.cross_entropy, **kwargs}
    return mpcomp.pipeline(mlp(), 3, split=MLP_SPLIT, **options)


def step(pipe, number):
    x, y = rows(7, number)
    return pipe.forward_backward(x, y, sample_ids=range(number, number + 7))


def spoil(link, role, key):
    """Turns one bit of what an end keeps of a slot."""
    end = link.endpoint.ends[role]
    store = end.fields[end.estimate].store
    row = store.read([key])
    row.view(torch.int32)[0, -1] ^= 1
    store.write([key], row)


@pytest.mark.parametrize("method", slow_but_one_a_class(FEEDBACK), ids=str)
def test_ends_that_are_equal_are_found_to_be(method, monkeypatch):
    """At every step, in warm-up, and with slots that come for the first time."""
    monkeypatch.setattr(equal_copies, "PERIOD", 1)
    pipe = pipe_of(method, warmup_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(3):
            step(pipe, number)
    assert pipe.num_steps == 3
    known = [link for link in pipe.links if any(e.estimate for e in link.endpoint.ends.values())]
    mirrors = bool(method.mirrors(TensorMeta((1, 8))))
    assert len(known) == (4 if mirrors else 0)


@pytest.mark.parametrize("role", ["sender", "receiver"])
@pytest.mark.parametrize(
    "method, key, slot",
    [("ef21+topk:0.3", (1, 0), "(1, 0)"), ("aqsgd+quant:4", (103,), "103")],
)
def test_a_turned_bit_is_found_in_the_step_that_compares(method, key, slot, role):
    pipe = pipe_of(method)
    step(pipe, 100)
    link = pipe.links[3]
    keys = list(link.endpoint.ends[role].fields[link.endpoint.ends[role].estimate].store._slots)
    if key not in keys:
        key = keys[1]
        slot = str(key[0] if len(key) == 1 else key)
    spoil(link, role, key)
    pipe.num_steps = 3
    step(pipe, 100)  # no step that compares
    pipe.num_steps = equal_copies.PERIOD
    before = links_state(pipe)
    with pytest.raises(RuntimeError) as error:
        step(pipe, 100)
    named = "boundary 1 grad, step 100: the two ends no longer keep the same of slot"
    assert str(error.value).startswith(f"{named} {slot} (")
    assert_same_state(links_state(pipe), before)
    assert pipe.num_steps == 100
    quiet = pipe_of(method, checks="none")
    step(quiet, 100)
    spoil(quiet.links[3], role, key)
    quiet.num_steps = equal_copies.PERIOD
    step(quiet, 100)


@pytest.mark.parametrize("copy", [0, 1])
def test_tied_weights_that_have_come_apart_are_named(copy):
    pipe = mpcomp.pipeline(gpt2(), 2, split=3, ties="apart")
    pipe.forward_backward(text(4))
    with torch.no_grad():
        pipe.ties[0].here[copy].view(torch.int32)[3, 5] ^= 1
    pipe.num_steps = 3
    pipe.forward_backward(text(4))  # which compares nothing
    pipe.num_steps = 2 * equal_copies.PERIOD
    with pytest.raises(
        RuntimeError,
        match="tied weights have come apart at step 200: the two copies of transformer.wte.weight",
    ):
        pipe.forward_backward(text(4))


class Ranks:
    """A mesh of two replicas as one of them sees it, with what the other one says."""

    def __init__(self, replica, told=None):
        self.num_replicas, self.pp_size, self.place = 2, 1, 0
        self.replica, self.told, self.device = replica, told, torch.device("cpu")

    def all_gather_object(self, value, what):
        self.value = value
        return [self.told, value] if self.replica else [value, self.told]


def of_replica(replica, weight, told=None):
    stage = torch.nn.Linear(40, 50)
    with torch.no_grad():
        stage.weight.copy_(weight)
        stage.bias.fill_(0.5)
    return equal_copies.EqualCopies(Ranks(replica, told), [], [], [stage], enabled=True)


def compared(first, second, kind=None):
    """What two replicas with these weights find; the second one's processor may be of a kind."""
    one, two = of_replica(0, first), of_replica(1, second)
    step = Step(0, True)
    sums = [sum(both) for both in zip(one.figures(step), two.figures(step), strict=True)]
    if not any(sums):
        return sums
    with pytest.raises((RuntimeError, TypeError)):
        two.check(step, sums)  # which tells what it has
    told = two._mesh.value
    if kind is not None:
        told[0] = kind
    one._mesh.told = told
    one.check(step, sums)
    return sums


@pytest.mark.parametrize("lr", [0.5, 1e-4])
def test_an_optimizer_over_the_uncut_model_ends_with_the_cure(lr):
    """It has one of both copies; the first step whose number is a power of two shows it."""
    model = gpt2()
    pipe = mpcomp.pipeline(model, 2, split=2, ties="apart")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    pipe.forward_backward(text(4))
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"at step 1: the two copies of .*pipe.parameters\(\)"):
        pipe.forward_backward(text(4))


def test_replicas_are_compared_parameter_by_parameter():
    weight = torch.randn(50, 40)
    assert compared(weight, weight.clone()) == [0.0]
    other = weight.clone()
    other.view(torch.int32)[7, 3] ^= 1
    with pytest.raises(
        RuntimeError,
        match=r"replicas have come apart at step 0: weight \(rank 1 and rank 0\) are not the same",
    ):
        compared(weight, other)


def test_unlike_processors_may_round_otherwise_and_no_more():
    weight = torch.randn(50, 40)
    rounded = weight * (1 + 1e-7 * torch.randn(50, 40))
    with pytest.warns(UserWarning, match="by no more than rounding, as their processors are of"):
        compared(weight, rounded, "another")
    with pytest.raises(RuntimeError, match="replicas have come apart"):
        compared(weight, rounded)
    with pytest.raises(RuntimeError, match="replicas have come apart"):
        compared(weight, torch.randn(50, 40), "another")


@pytest.mark.parametrize("checks", ["all", "", None, True])
def test_checks_are_one_of_three(checks):
    with pytest.raises(ValueError, match=f"checks={checks!r}: expected one of none, state"):
        pipe_of(None, checks=checks)


@pytest.mark.parametrize("method", ["ef21+topk:0.3", "step:0.5", None])
def test_checked_messages_change_no_number_and_are_metered_whole(method):
    """A header of 32 bytes in place of 16, or of 24 where the length varies."""
    plain, checked = pipe_of(method), pipe_of(method, checks="message")
    for number in range(3):
        assert torch.equal(step(plain, number), step(checked, number))
    more = 8 if method == "step:0.5" else 16
    messages = sum(link.meter.train.messages for link in checked.links)
    assert messages == 3 * 3 * 4
    assert checked.wire_bytes == plain.wire_bytes + more * messages
