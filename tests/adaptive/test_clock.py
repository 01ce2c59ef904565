"""Clocks: what a lap is, measured and modelled."""

import math

import pytest

from mpcomp.adaptive.clock import ModelledClock, WallClock


def test_wall_clock_knows_no_first_lap():
    times = iter([5.0, 5.25, 7.0])
    clock = WallClock(now=lambda: next(times))
    assert math.isnan(clock.lap(0, 0))
    assert clock.lap(10, 1) == 0.25
    assert clock.lap(10**9, 7) == 1.75


def test_wall_clock_runs():
    clock = WallClock()
    clock.lap(0, 0)
    assert 0 <= clock.lap(0, 0) < 60


def test_modelled_clock_is_a_function():
    clock = ModelledClock(compute_ms=20, bandwidth_mbps=100, latency_ms=2)
    # 20 ms + 3 * 2 ms + 1 Mbit at 100 Mbit/s
    assert clock.lap(125_000, 3) == pytest.approx(0.036)
    assert clock.lap(125_000, 3) == clock.lap(125_000, 3)
    assert clock.lap(0, 0) == 0.02


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compute_ms": -1}, "compute_ms=-1: expected milliseconds"),
        ({"compute_ms": math.nan}, "compute_ms=nan: expected milliseconds"),
        ({"latency_ms": -1}, "latency_ms=-1: expected milliseconds"),
        ({"latency_ms": math.inf}, "latency_ms=inf: expected milliseconds"),
        ({"bandwidth_mbps": 0}, "bandwidth_mbps=0: expected megabits"),
        ({"bandwidth_mbps": math.inf}, "bandwidth_mbps=inf: expected megabits"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelledClock(**{"compute_ms": 1, "bandwidth_mbps": 1, **settings})
