"""A record of when this rank did what, in steps that somebody wants to look at.

A step carries it (`mpcomp.core.context.Step.during`). Steps that nobody looks at carry none: then
nothing is noted and nothing asked of a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

__all__ = ["BESIDE", "NO_STAGE", "Span", "Trace"]

#: In place of a stage or a microbatch, of what a rank does for all of them.
NO_STAGE: Final = -1


class Span(NamedTuple):
    """One thing that a rank did, from one moment to another.

    Attributes:
        kind: step, forward, loss, backward, weights, update (of them), encode, send, receive,
            decode, fidelity, exchange (between replicas), or agree (on the end of a step).
        step: number of the training step.
        stage: its number; `NO_STAGE` of what is a rank's.
        microbatch: its number; `NO_STAGE` of what is a step's.
        begin_ns: nanoseconds of this machine's `time.perf_counter_ns`.
        end_ns: likewise.
        link: name of the message's link; "" of what is about no message.
        num_bytes: of the message, where it is known.
        beside: whether a thread did it that codes beside the stages.
    """

    kind: str
    step: int
    stage: int
    microbatch: int
    begin_ns: int
    end_ns: int
    link: str = ""
    num_bytes: int = 0
    beside: bool = False


class _Beside(threading.local):
    """Whether this thread codes beside the stages."""

    here = False


#: To be told by such threads.
BESIDE: Final = _Beside()


class Trace:
    """The spans of one training step on this rank.

    Args:
        step: number of the step.
        wait: called at both ends of a span, to wait for an accelerator, which else computes on
            after the host has gone to the next thing; None on a CPU.
    """

    def __init__(self, step: int, wait: Callable[[], None] | None = None) -> None:
        self.step = step
        self.spans: list[Span] = []
        self._wait = wait
        self._pass: tuple[Any, ...] | None = None

    def now(self) -> int:
        """Nanoseconds, once all that was begun has ended."""
        if self._wait is not None:
            self._wait()
        return time.perf_counter_ns()

    @contextmanager
    def during(
        self, kind: str, stage: int, microbatch: int, link: str = "", num_bytes: int = 0
    ) -> Iterator[None]:
        """A context whose time is a span."""
        begin = self.now()
        yield
        self._add(kind, stage, microbatch, begin, link, num_bytes)

    def open(self, kind: str, stage: int, microbatch: int) -> None:
        """Begins the span of a pass, which other code ends: it may cross stages within one call."""
        self._pass = kind, stage, microbatch, self.now()

    def close(self) -> None:
        """Ends the pass under way, if there is one."""
        if self._pass is not None:
            self._add(*self._pass)
            self._pass = None

    def _add(
        self, kind: str, stage: int, mb: int, begin: int, link: str = "", num_bytes: int = 0
    ) -> None:
        end, beside = self.now(), BESIDE.here
        self.spans.append(Span(kind, self.step, stage, mb, begin, end, link, num_bytes, beside))
