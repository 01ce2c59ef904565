"""The stranger's test, of endpoints: the basis that `klt` learns, written again in two classes.

No other file knows of them: a value with a spec, and an endpoint for it. Under them links send the
same messages as under `klt`, and are stored, compared, counted and resumed as those are.
"""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from laws import laws_over
from methods import same_bits
from models import assert_same_training, links_state, sgd
from torch import Tensor, nn

import mpcomp
from mpcomp import ECSQ, KLT, Compressor, Identity, Link, TensorMeta
from mpcomp.compressors.klt import Basis, InBasis
from mpcomp.compressors.tokens import Tokens
from mpcomp.core.context import Step, padded_positions, zero_padding
from mpcomp.core.randomness import generator_for
from mpcomp.core.spec import SpecValue
from mpcomp.feedback import Side
from mpcomp.links.endpoints import Endpoint, PlainPlan, StateSize, endpoint_of
from mpcomp.links.endpoints.basis import WithNews
from mpcomp.links.equal_copies import bits_of


@dataclass(frozen=True)
class Learned(SpecValue):
    """``inner`` in a basis that the link learns. Spec ``learned+step:0.2``."""

    inner: Compressor
    spec: ClassVar[str] = "learned"
    spec_inner: ClassVar[str | None] = "inner"
    at_cuts = True
    variable_length = True  # of a message that brings a basis


class LearnedEndpoint(Endpoint, of=Learned):
    """A basis of what crosses, at both ends, and the covariance of that at the sender."""

    def __init__(self, method):
        super().__init__(method)
        self.known = {side: {} for side in Side}  # by width, what was kept
        self.open = {side: {} for side in Side}  # by width, what the open step has noted

    def at(self, side: Side, width: int) -> SimpleNamespace:
        fresh = SimpleNamespace(
            basis=None, news=None, batches=0, mean=0.0, second=0.0, vectors=0, steps=0, due=1
        )
        return self.known[side].setdefault(width, fresh)

    def noted(self, side: Side, width: int) -> SimpleNamespace:
        nothing = SimpleNamespace(num=0, announced=False, x=None, news=None)
        return self.open[side].setdefault(width, nothing)

    def plan(self, side, meta, context, device):
        if not context.on:
            return PlainPlan(Identity(), meta, context, device)
        end = self.at(side, Tokens.of(meta).width)
        news = end.news if context.learns and side is Side.SENDER else None
        plan = PlainPlan(self.coder(end.basis), meta, context, device)
        return WithNews(plan, news) if context.learns else plan

    def coder(self, basis: Basis | None) -> InBasis:
        return InBasis(self.method.inner, basis, str(self.method))

    def observe(self, x, num_bytes, plan):
        context, tokens = plan.context, Tokens.of(plan.meta)
        if context.train and context.on:
            noted, end = (f(Side.SENDER, tokens.width) for f in (self.noted, self.at))
            noted.num += tokens.num
            if context.learns:
                noted.announced = end.news is not None
                padded = padded_positions(context.valid, plan.meta, x.device)
                noted.x = zero_padding(x.detach(), padded).clone()

    def hear(self, payload, plan):
        if plan.context.learns:
            width = Tokens.of(plan.meta).width
            self.noted(Side.RECEIVER, width).news = plan.heard(payload)

    def commit(self):
        for width, noted in self.open[Side.RECEIVER].items():
            end = self.at(Side.RECEIVER, width)
            end.basis = noted.news or end.basis
        for width, noted in self.open[Side.SENDER].items():
            end = self.at(Side.SENDER, width)
            if noted.announced:
                end.basis, end.news, end.vectors, end.steps, end.due = end.news, None, 0, 0, 1
                looks = False
            else:
                looks = end.batches and end.news is None and end.steps + 1 >= end.due
            end.vectors, end.steps = end.vectors + noted.num, end.steps + bool(noted.num)
            if noted.x is not None:
                self.learn(end, noted.x, looks=looks)
        self.discard()

    def discard(self, *, unused=False):
        self.open = {side: {} for side in Side}

    def learn(self, end: SimpleNamespace, x: Tensor, *, looks: bool) -> None:
        tokens = Tokens.of(TensorMeta.of(x))
        vectors = tokens.split(x)
        size = vectors.square().mean(1, keepdim=True, dtype=torch.float64).sqrt()
        there = (size > 0).squeeze(1)
        if not there.any():
            return
        vectors = (vectors[there] / size[there]).float()
        if looks:
            new = Basis.of(end.second - torch.outer(end.mean, end.mean))
            sizes = [
                sum(part.nbytes for part in self.coder(basis).compress(x, generator_for("a look")))
                for basis in (end.basis, new)
            ]
            rent, price = (sizes[0] - sizes[1]) * end.vectors / tokens.num, new.coded.numel()
            end.news = new if rent >= price else None
            growth = min(4, math.sqrt(price / max(rent, 1)))
            end.due = max(end.steps + 1, math.ceil(growth * end.steps))
        end.batches += 1
        weight = max(1 / end.batches, min(1 / 16, len(vectors) / (64 * tokens.width)))
        second = (vectors.T @ vectors).double() / len(vectors)
        end.mean = end.mean + weight * (vectors.mean(0, dtype=torch.float64) - end.mean)
        end.second = end.second + weight * (second - end.second)

    def copies(self, side):
        for width, end in self.known[side].items():
            if end.basis is not None:
                yield [f"basis of {width}"], end.basis.numbers[None]

    def state_size(self, side, meta, num_samples):
        entry = (2 + 4 + 4 + 8) if side is Side.SENDER else (2 + 4)
        return [StateSize(1, entry * Tokens.of(meta).width ** 2)]

    def state_dict(self):
        state: dict[str, Any] = {}
        for side, ends in self.known.items():
            for width, end in ends.items():
                for name, value in vars(end).items():
                    if isinstance(value, Basis):
                        state[f"{side.value}.{width}.{name}"] = value.numbers
                    elif value is not None and (end.basis is not None or end.batches):
                        state[f"{side.value}.{width}.{name}"] = torch.as_tensor(value)
        return {**state, "sample": {}} if state else {}

    def load_state_dict(self, state, device):
        for key, value in state.items():
            if key != "sample":
                role, width, name = key.split(".")
                numbers = name in ("basis", "news")
                kept = Basis(value) if numbers else value if value.dim() else value.item()
                setattr(self.at(Side(role), int(width)), name, kept)


# -- one link -------------------------------------------------------------------------------------

WIDTH, ROWS = 32, 400
INNER = ECSQ(0.2, centre=True)
globals().update(
    laws_over(
        "links/test_link.py",
        without=[  # laws of compressors alone, and of feedback
            "test_what_arrives_is_the_compressors_result",
            "test_warm_up_goes_dense_and_evaluation_does_not",
            "test_evaluation_reads_and_writes_no_state",
            "test_another_shape_per_sample_starts_anew",
        ],
        method=[Learned(INNER)],
    )
)


def correlated(seed: int) -> Tensor:
    """[ROWS, WIDTH] of which four directions have nearly all the variance, always the same."""
    directions = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 4, generator=generator) @ directions
    return x + 0.05 * torch.randn(ROWS, WIDTH, generator=generator)


def turned(seed: int) -> Tensor:
    """As `correlated`, along other directions from the tenth on."""
    generator = torch.Generator().manual_seed(3)
    other = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator)).Q
    return correlated(seed) @ other if seed >= 10 else correlated(seed)


def white(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def some_zero(seed: int) -> Tensor:
    x = correlated(seed)
    return torch.zeros_like(x) if seed % 3 == 0 else x * (white(seed + 50)[:, :1] > 0)


@pytest.mark.parametrize("tensors", [correlated, turned, white, some_zero])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_messages_are_those_of_klt(tensors, num_microbatches):
    """Bit for bit, through discarded steps, and what arrives as well."""
    links = [Link(of(INNER), boundary=0, direction="act") for of in (KLT, Learned)]
    for i in range(18):
        step = Step(i, True, num_microbatches=num_microbatches)
        for m in range(num_microbatches):
            x = tensors(i + 100 * m)
            theirs, ours = (link.encode(x, step, m) for link in links)
            assert same_bits(theirs, ours)
            arrived = [link.decode(theirs, TensorMeta.of(x), step, m) for link in links]
            assert same_bits(*arrived)
        for link in links:
            assert int(bits_of(link, Side.SENDER)) == int(bits_of(link, Side.RECEIVER))
            link.discard() if i % 5 == 4 else link.commit()
    found = [link.endpoint.state_dict().get(f"receiver.{WIDTH}.basis") for link in links]
    assert (found[0] is None) == (tensors is white)
    assert found[0] is found[1] is None or same_bits(*found)


# -- pipelines ------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 3)
    )


def pipe_of(name: str, split: int = 3) -> mpcomp.Pipeline:
    act, grad = f"{name}+step:0.2:centre=true", f"{name}+step:0.5"
    return mpcomp.pipeline(
        model(), 2, split=split, act_comp=act, grad_comp=grad, loss_fn=F.cross_entropy
    )


def train(pipe: mpcomp.Pipeline, first: int, last: int) -> tuple[Tensor, list[Tensor]]:
    """Losses, and every message that was sent."""
    optimizer, losses, sent = sgd(pipe), [], []
    for link in pipe.links:

        def keeps(x, step, microbatch, encode=link.encode):
            sent.append(encode(x, step, microbatch))
            return sent[-1]

        link.encode = keeps
    for i in range(first, last):
        x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(i))
        losses.append(pipe.forward_backward(x, x[:, :3].argmax(1)))
        optimizer.step()
        optimizer.zero_grad()
    for link in pipe.links:
        del link.encode
    return torch.stack(losses), sent


def test_a_pipeline_trains_as_with_klt():
    """The same losses, messages, weights and bytes, and bases that were sent."""
    theirs, ours = pipe_of("klt"), pipe_of("learned")
    (losses, sent), (own_losses, own_sent) = train(theirs, 0, 10), train(ours, 0, 10)
    assert same_bits(losses, own_losses) and len(sent) == len(own_sent) == 80
    assert all(map(same_bits, sent, own_sent))
    assert_same_training(ours, theirs)
    assert ours.wire_bytes == theirs.wire_bytes
    assert any(name.endswith(".basis") for link in links_state(ours).values() for name in link)
    x = torch.randn(ROWS, 6)
    of_klt, own = (pipe.state_bytes(x)["per_link"] for pipe in (theirs, ours))
    assert [replace_method(each) for each in own] == [replace_method(each) for each in of_klt]


def replace_method(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "method": entry["method"].replace("klt", "learned")}


def on_ranks(folder: str) -> tuple[Tensor, Tensor, int]:
    """Trains, saves and trains on; then a fresh pipeline goes on from what was saved."""
    pipe = pipe_of("learned", split=2)
    losses, _ = train(pipe, 0, 6)
    pipe.save(folder)
    on, _ = train(pipe, 6, 10)
    again = pipe_of("learned", split=2)
    again.load(folder)
    assert same_bits(train(again, 6, 10)[0], on)
    assert_same_training(again, pipe)
    return losses, on, pipe.wire_bytes


def test_ranks_are_one_process_and_go_on_as_if_never_stopped(ranks, tmp_path):
    (losses, on, sent), _ = ranks(on_ranks, 2, str(tmp_path / "two"))
    assert all(map(same_bits, (losses, on), on_ranks(str(tmp_path / "one"))[:2]))
    theirs = pipe_of("klt", split=2)
    assert same_bits(train(theirs, 0, 6)[0], losses)
    assert same_bits(train(theirs, 6, 10)[0], on) and theirs.wire_bytes == sent


def test_a_method_without_an_endpoint_is_refused_by_name():
    @dataclass(frozen=True)
    class Lonely(SpecValue):
        at_cuts = True

    with pytest.raises(TypeError, match=r"no endpoint is for Lonely.*of=Lonely"):
        endpoint_of(Lonely())
    assert type(endpoint_of(replace(Learned(INNER), inner=ECSQ(1.0)))) is LearnedEndpoint
