"""Does compression pay: the estimate by hand, and what is said about it."""

import json

import pytest

from mpcomp.api.cost_model import CostModel, RankTimes
from mpcomp.api.report import _times_of

# Rank 0 computes for 0.3 s and waits for 0.1, rank 1 computes for 0.15 and waits for 0.25.
RANKS = [RankTimes(0.40, 0.10, 0.02), RankTimes(0.41, 0.26, 0.04)]


def payoff(bandwidth_mbps, dense_bytes=2e6, wire_bytes=2e5):
    return CostModel.of(RANKS, wire_bytes, dense_bytes, bandwidth_mbps)


def test_figures_of_a_step():
    """The slowest rank's step, the busiest rank's work, the most coding: each its own maximum."""
    found = payoff(10.0)
    assert found.step_s == 0.41
    assert found.coding_s == 0.04
    assert found.busy_s == pytest.approx(0.30)
    assert (found.wire_bytes, found.dense_bytes, found.bandwidth_mbps) == (2e5, 2e6, 10.0)


@pytest.mark.parametrize(
    "bandwidth_mbps, seconds",
    [
        (1.0, 16.0),  # 16 Mbit: the link decides
        (10.0, 1.6),
        (40.0, 0.4),
        (100.0, 0.37),  # the step without coding does
        (1e5, 0.37),
    ],
)
def test_a_step_without_compression(bandwidth_mbps, seconds):
    assert payoff(bandwidth_mbps).uncompressed_step_s == pytest.approx(seconds)


def test_break_even_is_where_a_dense_link_takes_as_long_as_the_busiest_rank():
    found = payoff(10.0)
    assert found.break_even_mbps == pytest.approx(16 / 0.30)
    dense_s = found.dense_bytes * 8e-6 / found.break_even_mbps
    assert dense_s == pytest.approx(found.busy_s)
    assert payoff(None).break_even_mbps == found.break_even_mbps
    assert payoff(10.0, dense_bytes=4e6).break_even_mbps == pytest.approx(2 * 16 / 0.30)


def test_it_pays():
    said = payoff(10.0).sentences()
    assert said == [
        "a step takes 410.0 ms, of which 40.0 ms go into coding; the busiest link carries 0.200 MB "
        "a step one way, 2.000 MB dense",
        "at the measured 10.0 Mbit/s a step without compression would take at least 1.60 s (3.90 "
        "times as long): compression pays; it would gain nothing on links above 53.3 Mbit/s",
    ]


def test_it_does_not_pay():
    """On a fast link a step without coding is the shorter one."""
    figures, verdict = payoff(10_000.0).sentences()
    assert figures == payoff(10.0).sentences()[0]
    assert verdict.startswith("at the measured 10.0 Gbit/s")
    assert "at least 370.0 ms (0.90 times as long): compression does not pay" in verdict


def test_without_a_bandwidth_there_is_no_verdict():
    found = payoff(None)
    assert found.uncompressed_step_s is None and found.bandwidth_mbps is None
    assert found.sentences() == payoff(10.0).sentences()[:1]


def test_the_verdict_turns_once():
    """The slower the link, the more is gained."""
    gains = [payoff(mbps).uncompressed_step_s for mbps in (1, 5, 20, 39, 60, 1000)]
    assert gains == sorted(gains, reverse=True)
    pays = ["compression pays" in payoff(mbps).sentences()[1] for mbps in (1, 5, 20, 39, 60, 1000)]
    assert pays == [True, True, True, True, False, False]


def test_it_is_plain_numbers():
    """Reports are written as JSON."""
    figures = payoff(10.0).to_dict()
    assert CostModel(**json.loads(json.dumps(figures))) == payoff(10.0)
    assert json.loads(json.dumps(payoff(None).to_dict()))["uncompressed_step_s"] is None


def test_one_stall_leaves_a_rank_some_work():
    """Nine steps of 0.1 s with 0.02 s of waiting, and one of 10 s, nearly all of it waiting."""
    times = [(0.1, 0.02)] * 9 + [(10.0, 9.92)]
    found = CostModel.of([RankTimes(*_times_of([], times, 10))], 1e5, 1e6, 10.0)
    assert found.busy_s == pytest.approx(0.08)
    assert found.break_even_mbps > 0
