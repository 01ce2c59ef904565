"""Bases that links learn: when they are sent, that both ends have the same, and what is kept."""

import copy

import pytest
import torch
import torch.nn.functional as F
from laws import laws_over
from methods import same_bits
from models import assert_same_state, assert_same_training, links_state, sgd
from torch import Tensor, nn

import mpcomp
from mpcomp import AQSGD, ECSQ, KLT, Identity, Link, TensorMeta
from mpcomp.core.context import Step
from mpcomp.links.state import restored

WIDTH, ROWS = 32, 400
METHOD = KLT(ECSQ(0.2, centre=True))
WEIGHTED = KLT(ECSQ(0.2, centre=True), weighted=True)
#: A memory whose compressors work in the basis.
MEMORY = KLT(AQSGD(ECSQ(0.4), first=ECSQ(0.2, centre=True)), weighted=True)

METHODS = [METHOD, KLT(ECSQ(1.0, scale="tensor", rounding="dither"))]
OF_OTHERS = [  # laws of compressors alone, and of feedback
    "test_what_arrives_is_the_compressors_result",
    "test_warm_up_goes_dense_and_evaluation_does_not",
    "test_evaluation_reads_and_writes_no_state",
    "test_another_shape_per_sample_starts_anew",
]
LINKS = [*METHODS, WEIGHTED, MEMORY]  # in pipelines that is for one way only
globals().update(laws_over("links/test_link.py", without=OF_OTHERS, method=LINKS))
globals().update(laws_over("engines/test_local.py", method=METHODS))


def correlated(seed: int, width: int = WIDTH) -> Tensor:
    """[ROWS, width] of which four directions have nearly all the variance, always the same."""
    directions = torch.randn(4, width, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 4, generator=generator) @ directions
    return x + 0.05 * torch.randn(ROWS, width, generator=generator)


def white(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def carry(
    link: Link, x: Tensor, step: Step, *, keep: bool = True, gradient: Tensor | None = None
) -> int:
    """Sends a tensor, for which a gradient comes back; the bytes that took."""
    message = link.encode(x, step, 0)
    link.decode(message, TensorMeta.of(x), step, 0)
    if gradient is not None:
        back = Link(Identity(), boundary=0, direction="grad")
        back.pair_with(link)
        back.decode(back.encode(gradient, step, 0), TensorMeta.of(gradient), step, 0)
    if step.train:
        link.commit() if keep else link.discard()
    return message.numel()


def link_of(method: KLT | ECSQ = METHOD) -> Link:
    return Link(method, boundary=0, direction="act")


def agree(state: dict[str, object]) -> None:
    """Both ends have the same basis, if they have one."""
    found = [state.get(f"{role}.{WIDTH}.basis") for role in ("sender", "receiver")]
    assert found[0] is found[1] is None or same_bits(*found)


def bases(link: Link) -> dict[str, Tensor]:
    state = link.endpoint.state_dict()
    return {role: state[f"{role}.{WIDTH}.basis"] for role in ("sender", "receiver")}


def assert_same_kept(link: Link, state: dict[str, object]) -> None:
    assert_same_state({"": link.endpoint.state_dict()}, {"": state})


def test_a_basis_is_sent_where_it_pays():
    link, plain = link_of(), link_of(METHOD.inner)
    sent = [carry(link, correlated(i), Step(i, True)) for i in range(12)]
    without = [carry(plain, correlated(i), Step(i, True)) for i in range(12)]
    assert same_bits(bases(link)["sender"], bases(link)["receiver"])
    assert sent[0] == pytest.approx(without[0], abs=16)  # the lengths of two parts
    assert max(sent[4:]) < 0.5 * min(without[4:])
    assert sum(sent) < sum(without)


@pytest.mark.parametrize("num_microbatches", [2, 3])
def test_the_microbatches_of_a_step_share_a_basis(num_microbatches):
    """It comes with one of them, by turns, and what comes with the others does not undo it."""
    link = link_of()
    for i in range(12):
        step = Step(i, True, num_microbatches=num_microbatches)
        for m in range(num_microbatches):
            x = correlated(10 * i + m)
            arrived = link.decode(link.encode(x, step, m), TensorMeta.of(x), step, m)
            assert (arrived - x).norm() < 0.1 * x.norm()
        link.commit()
        agree(link.endpoint.state_dict())
    assert bases(link)


def test_ends_with_different_bases_are_an_error():
    link, other = link_of(), link_of()
    for i in range(6):
        carry(link, correlated(i), Step(i, True))
    state = {
        name: value
        for name, value in link.endpoint.state_dict().items()
        if name.startswith("sender")
    }
    restored(other, state, {"sender": torch.device("cpu")})()
    with pytest.raises(RuntimeError, match="the two ends disagree"):
        carry(other, correlated(6), Step(6, True))


def test_none_is_sent_where_all_directions_are_alike():
    link, plain = link_of(), link_of(METHOD.inner)
    for i in range(12):
        bytes_without = carry(plain, white(i), Step(i, True))
        assert carry(link, white(i), Step(i, True)) <= bytes_without + 8
    assert not any(".basis" in name for name in link.endpoint.state_dict())


def test_errors_go_where_gradients_are_small():
    """At the cost of the errors without weights, of which half is by size alone, in fewer bytes."""
    strong = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q[:8]
    weighted, plain = link_of(WEIGHTED), link_of()
    for i in range(12):
        x = white(i) @ torch.diag(0.8 ** torch.arange(WIDTH))
        g = white(100 + i)
        g = 1e-3 * (g + 9 * g @ strong.T @ strong)
        for link in (weighted, plain):
            carry(link, x, Step(i, True), gradient=g)
    errors, sizes = [], []
    for link in (weighted, plain):
        message = link.encode(x, Step(12, False), 0)
        error = link.decode(message, TensorMeta.of(x), Step(12, False), 0) - x
        along = (error @ strong.T).square().sum(1).mean() / 8
        errors.append((float(along), float(error.square().sum(1).mean() - 8 * along) / 24))
        sizes.append(message.numel())
    (along, across), (plain_along, plain_across) = errors
    assert along < 0.7 * plain_along and across > 1.4 * plain_across
    mean = (8 * 100 + 24) / WIDTH  # of squared gradients, a hundred times as large along the strong
    costs = [
        8 * (1 + 100 / mean) * each_along + 24 * (1 + 1 / mean) * each_across
        for each_along, each_across in errors
    ]
    assert costs[0] == pytest.approx(costs[1], rel=0.1)
    assert sizes[0] < 0.98 * sizes[1]


def test_gradients_of_no_size_or_of_discarded_steps_weigh_nothing():
    link, plain = link_of(WEIGHTED), link_of()
    for i in range(8):
        x = correlated(i)
        carry(link, x, Step(i, True), gradient=white(i), keep=False)
        carry(link, x, Step(i, True), gradient=torch.zeros_like(x))
        carry(plain, x, Step(i, True))
    assert_same_kept(link, plain.endpoint.state_dict())
    assert bases(link)


def test_other_directions_have_another_basis():
    """And what bases cost is no more than what was lost by waiting, twice what must be."""
    link, plain = link_of(), link_of(METHOD.inner)
    turned = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
    for i in range(10):
        carry(link, correlated(i), Step(i, True))
    former = bases(link)["sender"]
    sent = [carry(link, correlated(i) @ turned, Step(i, True)) for i in range(10, 60)]
    assert not same_bits(bases(link)["sender"], former)
    assert same_bits(bases(link)["sender"], bases(link)["receiver"])
    assert max(sent[-5:]) < 0.6 * carry(plain, correlated(59) @ turned, Step(59, True))


def test_discarded_steps_leave_no_trace():
    """Also of those that brought a new basis: it is sent once more."""
    link, straight = link_of(), link_of()
    for i in range(8):
        carry(link, 3 * correlated(100 + i), Step(i, True), keep=False)
        assert carry(link, correlated(i), Step(i, True)) == carry(
            straight, correlated(i), Step(i, True)
        )
        assert_same_kept(link, straight.endpoint.state_dict())
    assert ".basis" in "".join(link.endpoint.state_dict())


def test_evaluation_uses_it_and_learns_nothing():
    link = link_of()
    before = carry(link, correlated(50), Step(0, False))
    assert not link.endpoint.state_dict()
    for i in range(6):
        carry(link, correlated(i), Step(i, True))
    state = copy.deepcopy(link.endpoint.state_dict())
    assert carry(link, correlated(50), Step(6, False)) < 0.5 * before
    assert_same_kept(link, state)


def test_a_dense_step_is_not_learned_from():
    link = link_of()
    for i in range(3):
        carry(link, correlated(i), Step(i, True, compress_act=False))
    assert not link.endpoint.state_dict()


def test_what_is_padded_is_not_learned_from():
    """And never reaches the other end."""
    links = [link_of(), link_of()]
    valid = torch.ones(4, 100, dtype=torch.bool)
    valid[1, 60:] = False
    valid[3, 10:] = False
    for i in range(8):
        x = correlated(i).view(4, 100, WIDTH)
        other = torch.where(valid[:, :, None], x, 100 * white(i).view(4, 100, WIDTH))
        sent = [
            carry(link, each, Step(i, True, valid=(valid,)))
            for link, each in zip(links, (x, other), strict=True)
        ]
        assert sent[0] == sent[1]
    assert_same_kept(links[0], links[1].endpoint.state_dict())
    assert bases(links[0])


# -- a memory in a basis --------------------------------------------------------------------------


def visits(index: int, **kwargs: object) -> Step:
    """A step in which the same samples come."""
    return Step(index, True, sample_ids=(tuple((row,) for row in range(ROWS)),), **kwargs)


def test_changes_of_samples_are_coded_in_the_basis():
    """They take fewer bytes than without one, at the same error; both ends keep the same."""
    memory = AQSGD(ECSQ(0.4), first=ECSQ(0.2, centre=True))
    link, plain = (
        Link(KLT(memory), boundary=0, direction="act"),
        Link(memory, boundary=0, direction="act"),
    )
    base, sent = correlated(0), []
    for i in range(12):
        x = base + 0.5 * correlated(i)
        sent.append([carry(each, x, visits(i)) for each in (link, plain)])
        ends = [link.endpoint.state_dict()[f"{role}.rows0"] for role in ("sender", "receiver")]
        assert same_bits(*ends)
        estimates = [
            each.endpoint.state_dict()["sender.rows0"].view(ROWS, WIDTH) for each in (link, plain)
        ]
        errors = [(estimate - x).norm() for estimate in estimates]
        assert errors[0] < 1.1 * errors[1]
    agree(link.endpoint.state_dict())
    assert all(here < 0.75 * there for here, there in sent[6:])


def test_a_discarded_visit_leaves_no_trace_in_memory_or_basis():
    links = [Link(MEMORY, boundary=0, direction="act") for _ in range(2)]
    for i in range(6):
        carry(links[0], 3 * correlated(100 + i), visits(i), keep=False)
        sizes = {carry(each, correlated(i), visits(i)) for each in links}
        assert len(sizes) == 1
        assert_same_kept(links[0], links[1].endpoint.state_dict())
    assert bases(links[0])


def test_a_dense_visit_is_remembered_and_not_learned_from():
    link = Link(MEMORY, boundary=0, direction="act")
    carry(link, correlated(0), visits(0, compress_act=False))
    assert same_bits(link.endpoint.state_dict()["sender.rows0"].view(ROWS, WIDTH), correlated(0))
    assert not any(f".{WIDTH}." in name for name in link.endpoint.state_dict())


# -- pipelines ------------------------------------------------------------------------------------


def model() -> nn.Module:
    """Activations of the first cut have rank 6; behind the second most directions are weak."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 3)
    )


GRADIENTS = KLT(ECSQ(0.5))
OF_MEMORY = KLT(AQSGD(ECSQ(1.0), first=ECSQ(1.2, rounding="dither")))


def pipe_of(split: int = 3, act: KLT = WEIGHTED, grad: KLT = GRADIENTS) -> mpcomp.Pipeline:
    return mpcomp.pipeline(
        model(), 2, split=split, act_comp=act, grad_comp=grad, loss_fn=F.cross_entropy
    )


def train(pipe: mpcomp.Pipeline, optimizer: torch.optim.Optimizer, first: int, last: int) -> Tensor:
    losses = []
    for i in range(first, last):
        x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(i % 3))
        ids = (i % 3) * ROWS + torch.arange(ROWS)  # read by memories alone
        losses.append(pipe.forward_backward(x, x[:, :3].argmax(1), sample_ids=ids))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def on_ranks(folder: str, *methods: KLT) -> tuple[Tensor, dict, int]:
    """Trains, saves, trains on; then a fresh pipeline goes on from what was saved."""
    pipe = pipe_of(2, *methods)
    optimizer = sgd(pipe)
    train(pipe, optimizer, 0, 6)
    pipe.save(folder, optimizer=optimizer)
    losses = train(pipe, optimizer, 6, 10)
    again = pipe_of(2, *methods)
    other = sgd(again)
    again.load(folder, optimizer=other)
    assert same_bits(train(again, other, 6, 10), losses)
    assert_same_training(again, pipe)
    assert_same_state(links_state(again), links_state(pipe))
    return losses, links_state(pipe), pipe.wire_bytes


@pytest.mark.parametrize(
    "methods", [(WEIGHTED, GRADIENTS), (MEMORY, OF_MEMORY)], ids=["plain", "memory"]
)
def test_two_ranks_are_one_and_go_on_as_if_never_stopped(ranks, tmp_path, methods):
    (losses, first, sent), (_, second, _) = ranks(on_ranks, 2, str(tmp_path / "two"), *methods)
    alone, state, alone_sent = on_ranks(str(tmp_path / "one"), *methods)
    assert same_bits(losses, alone) and sent == alone_sent
    names = sorted({name for link in state.values() for name in link if ".basis" in name})
    assert names == [f"{role}.{WIDTH}.basis" for role in ("receiver", "sender")]
    for key, link in state.items():
        assert_same_state({"": {**first[key], **second[key]}}, {"": link})
        agree(link)


@pytest.mark.parametrize(("act", "num_averages"), [(METHOD, 1), (WEIGHTED, 2)])
def test_state_bytes_say_what_is_kept(act, num_averages):
    pipe = pipe_of(act=act)
    said = pipe.state_bytes(torch.randn(ROWS, 6))
    of_act = [(10 + 8 * num_averages) * WIDTH**2, 6 * WIDTH**2]
    of_grad = [18 * WIDTH**2, 6 * WIDTH**2]
    assert [entry["bytes"] for entry in said["per_link"]] == [*of_act, *of_grad] * 2
    assert said["total"] == 2 * sum(of_act + of_grad)
    optimizer = sgd(pipe)
    train(pipe, optimizer, 0, 8)
    held = sum(
        value.nbytes for link in links_state(pipe).values() for value in link.values()
        if isinstance(value, Tensor)
    )  # fmt: skip
    assert 0 < held <= said["total"]
