"""The time of a step, for methods that weigh what they send against it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Clock", "ModelledClock", "WallClock", "modelled_clock"]


class Clock(Protocol):
    """A clock of steps."""

    def lap(self, traffic_bytes: float, num_messages: int) -> float:
        """Seconds of the step that ends now; NaN where that is not known.

        Replicas have clocks of their own, so their laps are to be averaged before anything is
        decided by them. (A lap that one replica does not know then makes all of them NaN.)

        Args:
            traffic_bytes: what this replica sent in the step.
            num_messages: how many messages it waited for, one after the other.
        """


class WallClock:
    """The time between one lap and the next.

    The first lap is NaN: before it lies whatever came before training, not a step. So it is after
    a resume too, and a run that is measured is never repeated exactly; use a `ModelledClock` where
    it has to be.

    Args:
        now: seconds on some scale.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = math.nan

    def lap(self, traffic_bytes: float, num_messages: int) -> float:
        """Seconds since the last lap."""
        now = self._now()
        seconds = now - self._last
        self._last = now
        return seconds


@dataclass(frozen=True)
class ModelledClock:
    """Computing, then sending: what a step takes on links of a given kind, exactly repeatable.

    Args:
        compute_ms: of a step without any traffic.
        bandwidth_mbps: megabits a second of each replica's link.
        latency_ms: of a message.

    Raises:
        ValueError: a setting outside those.
    """

    compute_ms: float
    bandwidth_mbps: float
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute_ms", "latency_ms"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value}: expected milliseconds, 0 or more")
        if not (self.bandwidth_mbps > 0 and math.isfinite(self.bandwidth_mbps)):
            raise ValueError(
                f"bandwidth_mbps={self.bandwidth_mbps}: expected megabits a second, more than 0"
            )

    def lap(self, traffic_bytes: float, num_messages: int) -> float:
        """compute + messages * latency + bytes / bandwidth, in seconds."""
        waits = (self.compute_ms + num_messages * self.latency_ms) / 1000
        return waits + traffic_bytes * 8 / (self.bandwidth_mbps * 1e6)


def modelled_clock(method: Any) -> ModelledClock | None:
    """The clock of the links that a method describes; None where steps are measured.

    Args:
        method: with ``bandwidth_mbps``, ``latency_ms`` and ``compute_ms``.

    Raises:
        ValueError: a setting outside those of `ModelledClock`, or times without a bandwidth.
    """
    if method.bandwidth_mbps is not None:
        return ModelledClock(method.compute_ms, method.bandwidth_mbps, method.latency_ms)
    if method.latency_ms or method.compute_ms:
        raise ValueError(
            f"latency_ms={method.latency_ms}, compute_ms={method.compute_ms} without "
            "bandwidth_mbps: give it as well, or leave them out to measure the time of a step"
        )
    return None
