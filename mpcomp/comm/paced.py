"""Links between stages that are slow on purpose, for trials on one machine without its root.

    with slow_links(20):
        pipe = mpcomp.pipeline(...)     # 20 Mbit/s from rank to rank, each way

Every byte is sent, over gloo. A message leaves its rank at the moment when its last byte would have
arrived: behind those before it to the same rank, at the rate, after the latency.

    sent     |a   |b
    line      aaaaaaaaaaaabbbbbb        a has twice the bytes of b
    leaves               |a    |b       and arrives within a moment

Messages of cuts and ties are held. What ranks agree on, and what replicas exchange, is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet  # the builtin one from Python 3.11 on
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final

from torch import Tensor

from mpcomp.comm.channels import Channel
from mpcomp.comm.gloo import Gloo, GlooChannel
from mpcomp.comm.mesh import ProcessMesh

__all__ = ["Paced", "slow_link", "slow_links"]

#: Mbit/s and seconds of latency of the links that are to be made.
_SLOW: Final[ContextVar[tuple[float, float] | None]] = ContextVar("slow links", default=None)


@contextmanager
def slow_links(mbps: float | None, latency_ms: float = 0.0) -> Iterator[None]:
    """A context: pipelines of several ranks that are made in it have links of this rate.

    Args:
        mbps: Mbit/s between two ranks, each way; None leaves links as they are.
        latency_ms: milliseconds from one rank to another.

    Raises:
        ValueError: a rate that is not above 0, or a latency below 0.
    """
    if mbps is not None and not 0 < mbps < math.inf:
        raise ValueError(f"mbps is {mbps}; pass Mbit/s above 0")
    if not 0 <= latency_ms < math.inf:
        raise ValueError(f"latency_ms is {latency_ms}; pass milliseconds, 0 or more")
    before = _SLOW.set(None if mbps is None else (mbps, latency_ms / 1e3))
    try:
        yield
    finally:
        _SLOW.reset(before)


def slow_link() -> tuple[float, float] | None:
    """Mbit/s and seconds of latency within `slow_links`; None outside."""
    return _SLOW.get()


class PacedChannel(GlooChannel):
    """As of `GlooChannel`; messages wait in its line."""

    line: _Line

    def start_send(self, message: Tensor, microbatch: int) -> tuple[Tensor, list[Any]]:
        def send() -> list[Any]:
            return super(PacedChannel, self).start_send(message, microbatch)[1]

        return message, [self.line.take(message.numel(), send)]


class Paced(Gloo):
    """Channels of gloo whose messages leave as late as a slow link would deliver them.

    Args:
        mesh: the connected ranks, on processors.
        connections: between two ranks, of each channel, which share the rate.
        mbps: from rank to rank, each way.
        latency_s: from rank to rank.

    Raises:
        ValueError: a rank is on an accelerator.
    """

    def __init__(self, mesh: ProcessMesh, connections: int, mbps: float, latency_s: float) -> None:
        if mesh.device.type != "cpu":
            raise ValueError(
                f"slow links are between ranks on processors, and this one is on {mesh.device}; "
                "pass devices='cpu'"
            )
        super().__init__(mesh, connections)
        self._rate = mbps, latency_s
        self._lines: dict[int, _Line] = {}

    @property
    def channel(self) -> type[GlooChannel]:
        return PacedChannel

    def open(
        self, a: int, b: int, name: str, *, varies: bool = True, at: Callable[[], str] | None = None
    ) -> Channel | None:
        channel = super().open(a, b, name, varies=varies, at=at)
        if isinstance(channel, PacedChannel):
            channel.line = self._lines.setdefault(channel.peer, _Line(*self._rate))
        return channel


class _Line:
    """The way to another rank, which carries one message after the other.

    Args:
        mbps: its rate.
        latency_s: from its beginning to its end.
    """

    def __init__(self, mbps: float, latency_s: float) -> None:
        self._seconds_a_byte = 8e-6 / mbps
        self._latency_s = latency_s
        self._free = 0.0
        self._thread = ThreadPoolExecutor(1, "slow link")

    def take(self, num_bytes: int, send: Callable[[], list[Any]]) -> _Held:
        """Takes up a message, which ``send`` hands to gloo when it would have arrived."""
        return _Held(self._thread.submit(self._carry, time.monotonic(), num_bytes, send))

    def _carry(self, taken: float, num_bytes: int, send: Callable[[], list[Any]]) -> list[Any]:
        self._free = max(taken, self._free) + num_bytes * self._seconds_a_byte
        time.sleep(max(0.0, self._free + self._latency_s - time.monotonic()))
        return send()


class _Held:
    """A message on its line.

    Args:
        sent: gives what gloo is to be waited for.
    """

    def __init__(self, sent: Future[list[Any]]) -> None:
        self._sent = sent

    def wait(self, timeout: timedelta) -> None:
        """Waits until the message has left.

        Raises:
            RuntimeError: it has not within the time.
        """
        try:
            works = self._sent.result(timeout.total_seconds())
        except NotYet as error:
            raise RuntimeError(f"a slow link has not carried it within {timeout}") from error
        for work in works:
            work.wait(timeout)
