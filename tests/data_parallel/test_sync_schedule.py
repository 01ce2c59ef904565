"""Turns of the parts of a model within a period."""

import itertools

import pytest

from mpcomp import LocalSGD, parse
from mpcomp.data_parallel.base import SyncSchedule


@pytest.mark.parametrize("period, parts", [(1, 1), (30, 1), (30, 3), (7, 3), (5, 5)])
def test_each_part_has_one_turn_a_period_at_equal_distances(period, parts):
    schedule = SyncSchedule(period, parts)
    turns = [schedule.part_due(step) for step in range(3 * period)]
    for part in range(parts):
        steps = [step for step, due in enumerate(turns) if due == part]
        assert [b - a for a, b in itertools.pairwise(steps)] == [period] * 2
    meetings = [step + 1 for step, due in enumerate(turns) if due is not None]
    assert period in meetings and len(meetings) == 3 * parts
    gaps = {b - a for a, b in itertools.pairwise(meetings)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_parts_are_neighbours_of_about_equal_sizes():
    sizes = {f"block {i}": 10 + i % 3 for i in range(24)}
    shares = SyncSchedule(30, 4).assign_parts(sizes)
    assert list(shares) == list(sizes) and sorted(shares.values()) == list(shares.values())
    of_parts = [sum(n for k, n in sizes.items() if shares[k] == part) for part in range(4)]
    assert max(of_parts) - min(of_parts) <= 2 * max(sizes.values())
    assert SyncSchedule(30).assign_parts(sizes) == dict.fromkeys(sizes, 0)
    assert SyncSchedule(3, 3).assign_parts({"all": 5}) == {
        "all": 1
    }  # nothing is left to the others


@pytest.mark.parametrize(
    "spec, message",
    [
        ("diloco", "diloco needs period; write diloco:<period>"),
        ("diloco:0", "period=0: expected a number of steps, 1 or more"),
        ("diloco:30:parts=0", "parts=0: each has a step of its own"),
        ("diloco:3:parts=4", "parts=4: .* expected 1 to 3"),
        ("diloco:30:lr=0", "lr=0.0: expected a rate of the outer step"),
        ("diloco:30:momentum=1", "momentum=1.0: expected a number in"),
        ("diloco:30+gravac+topk:0.1", "it goes by the gradients of every step"),
        ("diloco:30+diloco:2", "it goes by the gradients of every step"),
        ("diloco:30+ef:lr_scaled=true+topk:0.1", "leave lr_scaled out"),
        ("diloco:30+aqsgd+quant:4", "it belongs at a cut"),
        ("ef:decay=0+topk:0.1", "decay=0.0: expected a part of the residual"),
    ],
)
def test_settings_outside_their_range(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_an_inner_method_is_a_method():
    with pytest.raises(TypeError, match="expected a compressor"):
        LocalSGD(30, 0.1)
    spec = "diloco:30+ef+topk:0.02+quant:2"
    assert str(parse(spec)) == spec and parse(spec).sync_schedule == SyncSchedule(30)
