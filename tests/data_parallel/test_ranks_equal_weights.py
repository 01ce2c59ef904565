"""Every method with DDP: all replicas hold the same bits after 50 steps, and learn.

Also after DDP has rebuilt its buckets, with parameters that some or all replicas do not use, in
bf16, on all paths and over two levels.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from methods import BETWEEN_REPLICAS
from ranks import preload
from replica_methods import BY_CLASS, SPECS, replica_classes
from replica_runs import SMALLEST, Outcome, Run, train_all

from mpcomp import Cast, ReplicaNetwork

preload("replica_methods", "replica_runs")

Outcomes = dict[str, list[Outcome]]


def test_every_method_between_replicas_is_under_these_laws():
    assert {cls.__name__ for cls in replica_classes()} == BY_CLASS.keys()
    assert replica_classes() == BETWEEN_REPLICAS.keys()


def outcomes_of(
    ranks: Callable[..., list[Any]], num_ranks: int, make: Callable[[str], Run]
) -> Outcomes:
    """By method, those of all ranks."""
    results = ranks(train_all, num_ranks, [make(spec) for spec in SPECS], timeout_s=170.0)
    return {spec: [of_rank[i] for of_rank in results] for i, spec in enumerate(SPECS)}


def check(outcomes: Outcomes, spec: str, *, rebuilt: bool = True) -> Outcome:
    """The same weights everywhere, compressed, and learning; gives the first rank's outcome."""
    own = outcomes[spec]
    assert all(isinstance(outcome, Outcome) for outcome in own), own
    first = own[0]
    assert {outcome.weights for outcome in own} == {first.weights}
    assert {str(outcome.report["cf_min"]) for outcome in own if "cf_min" in outcome.report} in (
        set(),
        {str(first.report.get("cf_min"))},
    )
    steps = len(first.losses)
    assert first.finite and first.report["steps"] == steps == len(first.history)
    assert all(outcome.report["ratio"] < 1 for outcome in own if outcome.report["wire_bytes"])
    assert first.report["ratio"] < 0.9 and first.report["floats"] > 0
    # The mean over the replicas' own data.
    losses = torch.tensor([outcome.losses for outcome in own]).mean(0)
    assert losses[-10:].mean() < losses[:10].mean() - 0.01
    for outcome in own:
        assert outcome.buckets == first.buckets
        assert len(first.buckets[0]) > 3
        if rebuilt:
            assert first.buckets[0] != first.buckets[1] == first.buckets[-1]
    return first


@pytest.fixture(scope="module")
def plain(ranks) -> Outcomes:
    """Four replicas, the cheapest path."""
    return outcomes_of(ranks, 4, lambda spec: Run(spec))


@pytest.mark.parametrize("spec", SPECS)
def test_weights_are_equal(plain, spec):
    check(plain, spec)


def odd_run(spec: str) -> Run:
    return Run(
        spec,
        ReplicaNetwork("two-phase", smallest=SMALLEST),
        (("find_unused_parameters", True), ("gradient_as_bucket_view", True)),
        steps=30,
        extra="changing",
        channels_last=True,
        lr=0.2,
    )


@pytest.fixture(scope="module")
def odd(ranks) -> Outcomes:
    """Three replicas, two phases, unused parameters, kernels in channels-last."""
    return outcomes_of(ranks, 3, odd_run)


@pytest.mark.parametrize("spec", SPECS)
def test_weights_are_equal_with_unused_parameters(odd, spec):
    # DDP does not rebuild buckets where it looks for unused parameters.
    check(odd, spec, rebuilt=False)


def machines_run(spec: str) -> Run:
    inside = Cast("bf16") if SPECS.index(spec) % 2 else None
    network = ReplicaNetwork(smallest=SMALLEST, per_machine=2, inside=inside)
    return Run(spec, network, steps=30, dtype=torch.bfloat16, accumulate=2, lr=0.2)


@pytest.fixture(scope="module")
def machines(ranks) -> Outcomes:
    """Two machines of two replicas, parameters in bf16, two backward passes to a step."""
    return outcomes_of(ranks, 4, machines_run)


@pytest.mark.parametrize("spec", SPECS)
def test_weights_are_equal_over_two_levels_in_bf16(machines, spec):
    check(machines, spec)
