"""The curve of a plan: how much faster each method is than bf16, at every rate of the links."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

from mpcomp.plan.planner import PlannedStep, Planner, at_rate

__all__ = [
    "LONGEST",
    "RATES",
    "WORTHWHILE",
    "break_even_mbps",
    "rate_text",
    "step_times",
    "time_text",
]

#: Mbit/s, evenly spaced on a logarithmic axis: from a poor uplink to a machine room.
RATES: Final = tuple(10 ** (k / 6) for k in range(25))
#: Stages x microbatches of the longest step that is simulated for each rate.
LONGEST: Final = 2048
#: What a gain has to be above, to be worth a setting at all.
WORTHWHILE: Final = 1.02


def step_times(planner: Planner, steps: Sequence[PlannedStep]) -> list[list[float]]:
    """Seconds of each step at each of `RATES`; all links are as fast, latencies as planned."""
    return [[planner.on(at_rate(planner.network, rate), step) for rate in RATES] for step in steps]


def break_even_mbps(times: Sequence[float], baseline: Sequence[float]) -> float:
    """The rate above which a method gains nothing worth having over the baseline.

    Args:
        times: of the method at `RATES`.
        baseline: seconds likewise.

    Returns:
        Mbit/s, interpolated between two rates; 0 where it gains at none, infinity where it gains at
        all of them.
    """
    gains = [base / own for own, base in zip(times, baseline, strict=True)]
    if gains[-1] > WORTHWHILE:
        return math.inf
    points = list(zip(RATES, gains, strict=True))
    for (slower, more), (faster, less) in reversed(list(itertools.pairwise(points))):
        if more > WORTHWHILE >= less:
            share = (more - WORTHWHILE) / (more - less)
            return float(slower * (faster / slower) ** share)
    return 0.0


def rate_text(mbps: float) -> str:
    """A rate in words."""
    return f"{mbps / 1e3:.1f} Gbit/s" if mbps >= 1e3 else f"{mbps:.3g} Mbit/s"


def time_text(seconds: float) -> str:
    """A time in words."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
