"""Every method with DDP: all replicas hold the same bits after 50 steps, and learn.

The 50 are run by what decides from step to step, in the whole suite; else they are 20.

Also after DDP has rebuilt its buckets, with parameters that some or all replicas do not use, in
bf16, on all paths and over two levels.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import pytest
import torch
from chunks import Chunks, asked_for
from everyday import slow, slow_but
from methods import BETWEEN_REPLICAS
from ranks import preload
from replica_methods import BY_CLASS, MAIN, SPECS, replica_classes
from replica_runs import SMALLEST, Outcome, Run, train_all

from mpcomp import Cast, ReplicaNetwork

preload("replica_methods", "replica_runs")

Outcomes = Mapping[Any, list[Outcome]]

#: What is under two levels with parameters in bf16, which bf16 itself does not make smaller.
IN_HALF = [
    s for s in SPECS if (s not in MAIN or s in MAIN[:6]) and s != "bf16" and "exact=true" not in s
]
#: So that each method is once where parameters are not used, or there.
HALVES, UNUSED = IN_HALF[1::2], [s for s in SPECS if s not in IN_HALF[1::2]]


def test_every_method_between_replicas_is_under_these_laws():
    assert {cls.__name__ for cls in replica_classes()} == BY_CLASS.keys()
    assert replica_classes() == BETWEEN_REPLICAS.keys()


def outcomes_of(
    ranks: Callable[..., list[Any]],
    num_ranks: int,
    runs: Mapping[Any, Run],
    wanted: Collection[Any] | None = None,
) -> Outcomes:
    """By method, those of all ranks."""
    return Chunks(ranks, train_all, num_ranks, runs, size=5, wanted=wanted)


def check(outcomes: Outcomes, spec: Hashable, *, rebuilt: bool = True) -> Outcome:
    """The same weights everywhere, compressed, and learning; gives the first rank's outcome."""
    own = outcomes[spec]
    assert all(isinstance(outcome, Outcome) for outcome in own), own
    first = own[0]
    assert {outcome.weights for outcome in own} == {first.weights}
    for key in ("cf_min", "cf_candidate", "branch", "critical"):
        assert all(outcome.report.get(key) == first.report.get(key) for outcome in own)
    steps = len(first.losses)
    assert first.finite and first.report["steps"] == steps == len(first.history)
    assert 0 < first.report["ratio"] < 0.9
    # The mean over the replicas' own data.
    losses = torch.tensor([outcome.losses for outcome in own]).mean(0)
    few = min(10, steps // 3)
    assert losses[-few:].mean() < losses[:few].mean() - 0.005
    for outcome in own:
        assert outcome.buckets == first.buckets
        if rebuilt:
            assert first.buckets[0] != first.buckets[1] == first.buckets[-1]
            assert len(first.buckets[1]) > 1
    return first


#: Methods and numbers of steps.
EVERYDAY = [(spec, 20) for spec in MAIN[:4]]
LONG = [*((spec, 50) for spec in MAIN[:4]), *((spec, 20) for spec in MAIN[4:])]


@pytest.fixture(scope="module")
def plain(ranks, request) -> Outcomes:
    """Four replicas, the cheapest path."""
    runs = {(spec, steps): Run(spec, steps=steps) for spec, steps in [*EVERYDAY, *LONG]}
    return outcomes_of(ranks, 4, runs, asked_for(request, "case"))


@pytest.mark.parametrize("case", [*EVERYDAY, *(slow(case) for case in LONG)], ids=str)
def test_weights_are_equal(plain, case):
    check(plain, case)


@pytest.fixture(scope="module")
def odd(ranks, request) -> Outcomes:
    """Three replicas, two phases, unused parameters, kernels in channels-last."""
    network = ReplicaNetwork("two-phase", smallest=SMALLEST)
    ddp = (("find_unused_parameters", True), ("gradient_as_bucket_view", True))
    options = {"steps": 18, "extra": "changing", "channels_last": True, "lr": 0.2}
    runs = {spec: Run(spec, network, ddp, **options) for spec in UNUSED}
    return outcomes_of(ranks, 3, runs, asked_for(request, "spec"))


@pytest.mark.parametrize(
    "spec", slow_but([s for s in SPECS if s not in MAIN[:6] + IN_HALF][::3], UNUSED)
)
def test_weights_are_equal_with_unused_parameters(odd, spec):
    # DDP does not rebuild buckets where it looks for unused parameters.
    check(odd, spec, rebuilt=False)


@pytest.fixture(scope="module")
def machines(ranks, request) -> Outcomes:
    """Two machines of two replicas, parameters in bf16, two backward passes to a step."""
    runs = {}
    for i, spec in enumerate(HALVES):
        inside = Cast("bf16") if i % 2 else None
        network = ReplicaNetwork(smallest=SMALLEST, per_machine=2, inside=inside)
        runs[spec] = Run(spec, network, steps=18, dtype=torch.bfloat16, accumulate=2, lr=0.2)
    return outcomes_of(ranks, 4, runs, asked_for(request, "spec"))


@pytest.mark.parametrize("spec", slow_but([s for s in HALVES if s not in MAIN][::3], HALVES))
def test_weights_are_equal_over_two_levels_in_bf16(machines, spec):
    check(machines, spec)


def test_weights_are_equal_with_a_static_graph(ranks):
    """One that leaves a layer out for ever: DDP knows which, and ignores what comes of it."""
    ddp = (("static_graph", True),)
    specs = [MAIN[0], "dgc:0.1", "powersgd:1", "ef+sign", "ef21+topk:0.2"]
    outcomes = outcomes_of(ranks, 2, {s: Run(s, ddp=ddp, steps=12, extra="never") for s in specs})
    for spec in specs:
        check(outcomes, spec, rebuilt=False)


@pytest.mark.gpu
def test_weights_are_equal_on_a_gpu(ranks):
    """Two replicas that share one, over gloo."""
    outcomes = outcomes_of(ranks, 2, {s: Run(s, steps=20, device="cuda:0") for s in SPECS})
    for spec in SPECS:
        check(outcomes, spec)


def alone(specs: list[str]) -> list[Outcome | str]:
    return train_all([Run(spec, steps=8) for spec in specs])


def test_one_replica_alone(ranks):
    """A script that is run on one machine for once: nothing to send, nothing to divide by."""
    specs = [*MAIN, "gravac:cf=2-8:bandwidth_mbps=100:window=2+topk:0.1"]
    for spec, outcome in zip(specs, ranks(alone, 1, specs)[0], strict=True):
        assert isinstance(outcome, Outcome), (spec, outcome)
        assert outcome.finite and outcome.report["traffic_bytes"] == 0
