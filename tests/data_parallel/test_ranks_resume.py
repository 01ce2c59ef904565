"""Save, load, go on is never having stopped, bit for bit, with DDP."""

import re
from typing import Any

import pytest
import torch
from chunks import Chunks, asked_for
from everyday import slow_but_one
from ranks import preload
from replica_methods import STATEFUL
from replica_runs import SMALLEST, Run, Training, digest

from mpcomp import ReplicaNetwork

preload("replica_methods", "replica_runs")

#: Of what clocks and totals say, which do not repeat.
SAID = ("branch", "cf", "gain", "cf_min", "cf_candidate", "critical", "wire_bytes", "steps")


def ends(training: Training) -> Any:
    assert training.handle is not None
    report = training.handle.report()
    tensors = training.handle.state_dict()["tensors"]
    said = {key: report[key] for key in SAID if key in report}
    return training.digest(), digest(tensors), sorted(tensors), said


def resumed(specs: list[str], path: str) -> list[Any]:
    """Nine steps: at once; and five, then four of a new model in a new DDP; and over again."""
    found = []
    for spec in specs:
        # A rate that GraVAC's and Accordion's decisions change under.
        run = Run(spec, ReplicaNetwork(path, smallest=SMALLEST), lr=0.2)
        whole = Training(run)
        start = whole.state()
        whole.go(0, 5)
        half = whole.state()
        whole.go(5, 9)
        later = Training(run)
        later.load(half)
        later.go(5, 9)
        results = [ends(whole), ends(later)]
        # What is loaded replaces all that was there.
        later.load(start)
        later.go(0, 9)
        results.append(ends(later))
        found.append(
            (results, whole.buckets[5], later.buckets[0], len(start["replica"]["tensors"]))
        )
    return found


@pytest.fixture(scope="module")
def gathered(ranks, request):
    # Two replicas: of three, an all-reduce of other buckets would round in another order, with a
    # plain DDP too.
    cases = {spec: spec for spec in STATEFUL}
    return Chunks(ranks, resumed, 2, cases, "auto", size=6, wanted=asked_for(request, "spec"))


@pytest.mark.parametrize("spec", slow_but_one(lambda spec: re.split("[:+]", spec)[0], STATEFUL))
def test_resumed_is_uninterrupted(gathered, spec):
    for (whole, later, again), before, after, held in gathered[spec]:
        assert later == whole
        assert again == whole
        assert before != after  # a new DDP begins with other buckets
        assert held == 0
        assert whole[2]  # something was remembered
    first, second = gathered[spec]
    assert first[0][0][0] == second[0][0][0]  # weights; memories are each one's own
    if not spec.startswith("accordion:low=powersgd"):
        assert first[0][0][1] != second[0][0][1]


TWO_PHASE = ["onebitsgd", "ef+topk:0.1", "dgc:0.1", "ef21+topk:0.2"]


@pytest.mark.slow
def test_what_is_remembered_of_means_is_resumed_too(ranks):
    results = ranks(resumed, 2, TWO_PHASE, "two-phase")
    for of_rank in results:
        for (whole, later, again), *_ in of_rank:
            assert later == whole == again
            assert any(key.startswith("phase/") for key in whole[2])


def refused() -> list[str]:
    said = []
    training = Training(Run("ef+topk:0.1"))
    training.go(0, 2)
    state = training.state()
    other = Training(Run("ef+topk:0.2"))
    assert other.handle is not None and training.handle is not None
    for change in ("method", "name"):
        changed = {"tensors": dict(state["replica"]["tensors"]), "rest": state["replica"]["rest"]}
        target = other.handle if change == "method" else training.handle
        if change == "name":
            changed["tensors"]["own/nowhere.weight/residual"] = torch.zeros(5)
        try:
            target.load_state_dict(changed)
            said.append("loaded")
        except ValueError as error:
            said.append(str(error))
    return said


def test_the_state_of_something_else_is_refused(ranks):
    for method, name in ranks(refused, 2):
        assert "ef+topk:0.1" in method and "ef+topk:0.2" in method
        assert "nowhere.weight" in name
