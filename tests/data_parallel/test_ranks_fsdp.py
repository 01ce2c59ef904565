"""FSDP2 with compressed gradients: against torch's own, no mass lost, resumed bit for bit."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunks import Chunks, asked_for
from everyday import slow_after, slow_but
from ranks import preload
from replica_runs import digest
from sharded_runs import HALF, NETWORK, Net, Run, Training, kept_of
from torch.distributed.fsdp import MixedPrecisionPolicy

from mpcomp import Cast, ReplicaNetwork

preload("replica_runs", "sharded_runs", "torch.distributed.fsdp")


# -- no compression is torch's own FSDP2 ----------------------------------------------------------

DENSE = {
    "plain": {},
    "kept after forward": {"resharded": False},
    "accumulated": {"accumulate": 3},
    "frozen": {"frozen": ("up", "extra")},
    "frozen block": {"frozen": ("blocks.0",)},
    "never used, asked for": {"extra": "asked"},
    "bf16": {"policy": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)},
    "bf16 gradients": {"policy": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF)},
    "fp16 gradients": {"policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "tied": {"tied": True},
    "sums": {"sums": True},
    "cut by columns": {"columns": True},
    "cut by columns, gathered": {"columns": True, "options": (("param_comp", "none"),)},
    "bf16, accumulated": {
        "policy": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32),
        "accumulate": 2,
    },
    "gathered": {"options": (("param_comp", "none"),)},
}


def dense(cases: list[dict[str, Any]]) -> list[Any]:
    """Of each case how far the first gradients, and the weights after three steps, are apart."""
    found = []
    for case in cases:
        plain = Training(Run(None, steps=3, **{k: v for k, v in case.items() if k != "options"}))
        none = Training(Run("none", steps=3, **case))
        for training in (plain, none):
            training.backward(0)
        apart = [
            float((a.double() - b.double()).abs().max() / b.double().abs().max())
            for a, b in zip(none.gradients(), plain.gradients(), strict=True)
            if b.numel() and b.any()
        ]
        losses = []
        for training in (plain, none):
            training.optimizer.step()
            training.optimizer.zero_grad()
            losses.append(training.go(1, training.run.steps))
        weights = [digest(training.weights()) for training in (plain, none)]
        assert none.handle is not None
        found.append((max(apart), weights, losses, none.handle.report()))
    return found


@pytest.fixture(scope="module")
def two(ranks, request):
    wanted = asked_for(request, "case")
    return Chunks(ranks, dense, 2, DENSE, size=len(DENSE), wanted=wanted)


@pytest.fixture(scope="module")
def four(ranks, request):
    wanted = asked_for(request, "case")
    return Chunks(ranks, dense, 4, DENSE, size=len(DENSE), wanted=wanted)


#: What is an axis of its own: when gradients come, of what, in which dtype, and cut how.
MAIN = ["plain", "accumulated", "frozen", "never used, asked for", "bf16", "tied", "cut by columns"]


@pytest.mark.parametrize(
    "case", slow_but([*MAIN, "gathered"], [case for case in DENSE if case != "fp16 gradients"])
)
def test_uncompressed_on_two_ranks_is_fsdp2_bit_for_bit(two, case):
    """But in fp16, which FSDP2 halves before: small numbers round where they are halved again."""
    for _apart, (plain, none), losses, report in two[case]:
        assert plain == none and losses[0] == losses[1]
        assert report["ratio"] == 1 and report["steps"] == 3


#: Where the order of sums, or who has which piece, is another than on two.
ON_FOUR_RANKS = [
    *("plain", "tied", "accumulated", "bf16 gradients", "fp16 gradients", "sums"),
    *("cut by columns", "gathered"),
]


@pytest.mark.parametrize("case", slow_after(1, ON_FOUR_RANKS))
def test_uncompressed_on_four_ranks_is_fsdp2_but_for_the_order_of_sums(two, four, case):
    """Here it is that of ranks, in fp32; gloo halves and doubles, in the gradients' own dtype."""
    bound = {"bf16 gradients": 0.02, "fp16 gradients": 0.003}.get(case, 2e-6)
    for apart, _weights, losses, _report in four[case]:
        assert apart < bound
        assert losses[0] == pytest.approx(losses[1], rel=0.02)


# -- methods --------------------------------------------------------------------------------------

METHODS = [
    "bf16",
    "topk:0.2",
    "quant:4:scale=64",
    "randomblock:0.3:unbiased=true",
    "qsgd:4",
    "ef+topk:0.1",
    "ef+randomk:0.2",
    "ef+quant:2",
    "ef+lowrank:1",
    "ef:storage=8:lr_scaled=true+topk:0.1",
    "ef21+topk:0.2",
    "conef+topk:0.1",
    "conef:0.4:storage=bf16+randomblock:0.2",
    "conef:error=qsgd/8:lr_scaled=true+topk:0.2",
    "conef:0.3:improved=v2:beta=0.8+topk:0.2",
    "gravac:cf=2-32:eps=0.5:window=3:bandwidth_mbps=10:compute_ms=1+topk:0.1",
    "gravac:cf=1.5-8:eps=0.2:window=2:bandwidth_mbps=10:compute_ms=1+randomk:0.5",
    "accordion:low=topk/0.5:high=topk/0.1:interval=4:span=2",
    "dgc:0.1",
    "dgc:0.05:warmup_steps=10:nesterov=true+fp16",
    "redsync:0.1",
    "onebitsgd",
]
#: Each on four ranks or on two, where gradients are in bf16 besides: what ranks are is no part of
#: a method, and SPECS of `replica_methods` are all under the laws of plain replicas.
ON_FOUR, ON_TWO = METHODS[1::2], [spec for spec in METHODS[::2] if spec != "bf16"]
#: What a run of each is checked for.
SAID = ("cf_min", "cf_candidate", "branch", "critical")


def trained(specs: list[str], policy: MixedPrecisionPolicy, accumulate: int) -> list[Any]:
    """Ten steps; then over again from the fifth in a new model."""
    found: list[Any] = []
    for spec in specs:
        run = Run(spec, policy=policy, accumulate=accumulate)
        try:
            whole = Training(run)
            # Without momentum, which the optimizer would have to be given too.
            whole.optimizer = torch.optim.SGD(whole.model.parameters(), lr=0.2)
            losses = whole.go(0, 5)
            half = whole.state()
            losses += whole.go(5, 10)
            later = Training(run)
            later.optimizer = torch.optim.SGD(later.model.parameters(), lr=0.2)
            later.load(half)
            later.go(5, 10)
        except Exception as error:  # raised on all ranks, or the run does not end
            found.append(f"{type(error).__name__}: {error}")
            continue
        assert whole.handle is not None and later.handle is not None
        ends = [(digest(t.weights()), t.memories(), t.handle.exchange.step) for t in (whole, later)]
        found.append((losses, ends, whole.handle.report(), whole.handle.history))
    return found


PLAIN = MixedPrecisionPolicy()
MIXED = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF)


@pytest.fixture(scope="module")
def on_four(ranks, request):
    cases = {spec: spec for spec in ON_FOUR}
    wanted = asked_for(request, "spec")
    return Chunks(ranks, trained, 4, cases, PLAIN, 1, size=8, wanted=wanted)


@pytest.fixture(scope="module")
def on_two(ranks, request):
    cases = {spec: spec for spec in ON_TWO}
    wanted = asked_for(request, "spec")
    return Chunks(ranks, trained, 2, cases, MIXED, 2, size=8, wanted=wanted)


def check(own: list[Any], spec: str) -> None:
    """The same weights for all ranks, compressed, learning, and resumed bit for bit."""
    assert not any(isinstance(outcome, str) for outcome in own), own
    _, first, report, history = own[0]
    for losses, (whole, later), reported, _ in own:
        assert whole == later, "resumed is uninterrupted"
        assert whole[0] == first[0][0]
        assert all(map(math.isfinite, losses))
        assert all(reported.get(key) == report.get(key) for key in SAID)
    assert report["steps"] == len(history) == whole[2] == 10
    assert 0 < report["ratio"] < 0.9 and report["paths"]["scatter"] > 0
    losses = torch.tensor([outcome[0] for outcome in own]).mean(0)
    assert losses[-3:].mean() < losses[:3].mean() - 0.005


@pytest.mark.parametrize("spec", slow_but(["topk:0.2", "ef+topk:0.1"], ON_FOUR))
def test_methods_on_four_ranks(on_four, spec):
    check(on_four[spec], spec)


@pytest.mark.parametrize("spec", slow_but(["ef+lowrank:1", "ef21+topk:0.2"], ON_TWO))
def test_methods_on_two_ranks_in_bf16_with_gradients_added_up(on_two, spec):
    check(on_two[spec], spec)


def alone() -> list[Any]:
    """One rank has nobody to send to, and FSDP2 asks for no exchange."""
    plain, ours = Training(Run(None)), Training(Run("conef+topk:0.1"))
    losses = [training.go(0, 3) for training in (plain, ours)]
    assert ours.handle is not None
    return [*losses, digest(plain.weights()), digest(ours.weights()), ours.handle.report()["steps"]]


def test_one_rank_alone(ranks):
    ((plain, ours, weights, our_weights, steps),) = ranks(alone, 1)
    assert plain == ours and weights == our_weights and steps == 0


def memory_bytes() -> list[int]:
    found = []
    for spec in ("none", "topk:0.1", "ef+topk:0.1", "conef:0.2+topk:0.1"):
        training = Training(Run(spec))
        training.step(0)
        assert training.handle is not None
        found.append(training.handle.report()["memory_bytes"])
    return found


def test_memory_of_a_sketch_is_a_part_of_that_of_all_gradients(ranks):
    """Of every rank's gradient a residual is as large as the whole model's matrices."""
    matrices = sum(p.numel() for p in Net().parameters() if p.dim() > 1)
    for none, plain, residual, sketch in ranks(memory_bytes, 4):
        assert none == plain == 0
        assert residual == 4 * matrices
        assert 0.2 * residual <= sketch < 0.25 * residual  # cells are rounded up, by row


# -- no mass is lost ------------------------------------------------------------------------------


def masses(specs: list[str]) -> list[Any]:
    """Of each the largest error of sums over five steps, by piece, and what was kept."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for spec in specs:
        training = Training(Run(spec, columns=spec.startswith("ef+quant")))
        assert training.handle is not None
        exchange = training.handle.exchange
        reduce, given, arrived = exchange.reduce, {}, {}

        def noted(blocks, parts, out, *, mean, reduce=reduce, given=given, arrived=arrived):
            before = blocks.clone()
            reduce(blocks, parts, out, mean=mean)
            start = 0
            for part in parts:
                for peer, meta in enumerate(part.pieces):
                    piece = before[peer, start : start + meta.numel].double()
                    given[part.key(peer)] = given.get(part.key(peer), 0) + piece
                piece = out[start : start + part.pieces[rank].numel].double()
                arrived[part.key(rank)] = arrived.get(part.key(rank), 0) + piece * size
                start += part.padded.numel

        exchange.reduce = noted  # type: ignore[method-assign]
        training.go(0, 5)
        kept = {
            key: kept_of(memory).double()
            for key, memory in exchange._state.ends.items()
            if memory.keeps
        }
        of_all: list[Any] = [None] * size
        dist.all_gather_object(of_all, (given, kept))
        errors, norms = [], []
        for key, total in arrived.items():
            if not total.numel():
                continue
            wanted = sum(of_rank[0][key] for of_rank in of_all)
            owed = sum(of_rank[1].get(key, torch.zeros(())) for of_rank in of_all)
            errors.append(float((total + owed - wanted).abs().max() / (1 + wanted.abs().max())))
            norms.append(float(owed.norm()))
        found.append((max(errors), max(norms), training.handle.report()["ratio"]))
    return found


MASS = [
    "ef+topk:0.1",
    "ef+quant:3",
    "ef+randomblock:0.2",
    "ef+lowrank:1",
    "ef+topk:0.1+fp16",
    "conef:1.0:beta=0.5+topk:0.1",
    "conef:1.0:beta=0.9:improved=v2+randomblock:0.1",
    "gravac:cf=2-32:eps=0.5:window=3:bandwidth_mbps=10:compute_ms=1+topk:0.1",
]


@pytest.mark.parametrize("num_ranks", slow_after(1, [2, 4]))
def test_nothing_is_lost(ranks, num_ranks):
    """Sum of all that was sent and of what all ranks keep = sum of all gradients."""
    for of_rank in ranks(masses, num_ranks, MASS):
        for spec, (error, kept, ratio) in zip(MASS, of_rank, strict=True):
            assert error < 1e-5, spec
            assert kept > 1e-3 and ratio < 0.9, spec


def with_small_ones(small: Cast | None) -> Any:
    """The mean of one gradient, as each rank has its piece, and the bytes of its messages."""
    network = ReplicaNetwork(smallest=NETWORK.smallest, small=small)
    training = Training(Run("topk:0.2", options=(("network", network),)))
    training.backward(0)
    whole = {name: p.grad.full_tensor() for name, p in training.model.named_parameters()}
    return whole, training.handle.report()["wire_bytes"]


def test_small_ones_in_16_bits(ranks):
    rounded, plain = (ranks(with_small_ones, 2, to) for to in (Cast("bf16"), None))
    (whole, wire_bytes), (expected, all_bytes) = rounded[0], plain[0]
    small = {name for name, gradient in whole.items() if gradient.dim() < 2}
    assert len(small) > 3
    for name, gradient in whole.items():
        assert torch.equal(gradient, rounded[1][0][name])
        if name in small:
            assert not torch.equal(gradient, expected[name])
            torch.testing.assert_close(gradient, expected[name], rtol=0.01, atol=1e-3)
        else:
            assert torch.equal(gradient, expected[name])
    elements = sum(whole[name].numel() for name in small)
    assert all_bytes + plain[1][1] - wire_bytes - rounded[1][1] == 2 * 2 * elements
