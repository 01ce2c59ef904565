"""Times of runs: as they were, or as if nothing else had run on the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch

from stages.clock import now

__all__ = ["Run", "Settle", "Undisturbed", "timed", "typical"]

_T = TypeVar("_T")

#: Times the processor's time that runs may take, and share by which their medians may be above
#: the least of them, on a machine that counts as idle.
_SLOWDOWN: Final = 1.25
_SPREAD: Final = 0.25


class Run(NamedTuple):
    """The time of one run.

    Attributes:
        clock_s: from its begin to its end.
        own_s: without what other programs took. Threads of this process may together have more
            processor time than the clock shows, and an accelerator computes in none: then as
            ``clock_s``.
    """

    clock_s: float
    own_s: float


#: The seconds that several runs stand for.
Settle = Callable[[Sequence[Run]], float]


def timed(code: Callable[..., _T], *arguments: Any) -> tuple[_T, Run]:
    """The result of a call, and its time."""
    begin, own_begin = now(), time.process_time()
    result = code(*arguments)
    clock_s, own_s = now() - begin, time.process_time() - own_begin
    return result, Run(
        clock_s, clock_s if torch.accelerator.is_available() else min(clock_s, own_s)
    )


def typical(runs: Sequence[Run]) -> float:
    """The median by the clock: what a step sees on this machine, with all that runs there."""
    return statistics.median(run.clock_s for run in runs)


class Undisturbed:
    """The least time that runs took by themselves; notes how far from it they were.

    Other programs only ever add to a time: by what they compute meanwhile, which processor time
    leaves out, and by what they push out of caches, which the least of several runs has least of.
    """

    def __init__(self) -> None:
        self._clock_s = self._own_s = self._median_s = self._least_s = 0.0

    def __call__(self, runs: Sequence[Run]) -> float:
        """The least of these runs."""
        own = [run.own_s for run in runs]
        least = min(own)
        self._clock_s += sum(run.clock_s for run in runs)
        self._own_s += sum(own)
        self._median_s += statistics.median(own)
        self._least_s += least
        return least

    @property
    def slowdown(self) -> float:
        """Times longer than by themselves that all runs took by the clock."""
        return self._clock_s / self._own_s if self._own_s else 1.0

    @property
    def spread(self) -> float:
        """Share by which the medians of runs are above the least of them."""
        return self._median_s / self._least_s - 1 if self._least_s else 0.0

    @property
    def busy(self) -> bool:
        """Whether other programs kept the machine from running what was timed."""
        return self.slowdown > _SLOWDOWN or self.spread > _SPREAD

    def to_dict(self) -> dict[str, Any]:
        """All figures under their names, as JSON can hold them."""
        return {"slowdown": self.slowdown, "spread": self.spread, "busy": self.busy}

    def sentence(self) -> str:
        """A sentence for a reader: how times were taken, and whether to trust them."""
        text = (
            "times measured here are the least of several runs, without what other programs took; "
            f"medians are {self.spread:.0%} above them"
        )
        if not self.busy:
            return text
        return (
            f"{text}. This machine is busy: runs took {self.slowdown:.1f} times as long by the "
            "clock. Measure again when it is idle if two methods are close"
        )
