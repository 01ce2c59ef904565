"""The clocks of ranks, compared by an exchange of timestamps, so that their moments make one line.

`time.perf_counter_ns` counts from a moment of its own on each machine. The first rank answers each
other one with its time (Cristian, *Probabilistic clock synchronization*, 1989)::

    rank r    asks at t0 ─┐                  ┌─> has the answer at t1
    rank 0                └─> answers with T ┘

T is taken for the middle of t0 and t1; it is at most half of that round trip away from it, so of
several round trips the shortest counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from mpcomp.comm.all_gather import TAG

__all__ = ["Offset", "offset_to_first"]

#: Round trips, of which the shortest counts.
ROUNDS: Final = 8


class Offset(NamedTuple):
    """The first rank's clock against this rank's.

    Attributes:
        ns: to be added to this rank's nanoseconds.
        error_ns: bound of its error: half of a round trip.
    """

    ns: int = 0
    error_ns: int = 0


def offset_to_first(
    group: dist.ProcessGroup,
    timeout_s: float,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Offset:
    """The offset of this rank's clock; all ranks of a group call it.

    Args:
        group: of gloo, numbered as the world is.
        timeout_s: of each wait.
        waiting: a context for each wait.

    Raises:
        RuntimeError: a rank is gone, or has not come within the timeout.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    timeout, tag = timedelta(seconds=timeout_s), TAG + 1
    word = torch.zeros(1, dtype=torch.int64)

    def send(to: int) -> None:
        with waiting():
            dist.isend(word, dst=to, group=group, tag=tag).wait(timeout)  # type: ignore[union-attr]

    def receive(source: int) -> None:
        with waiting():
            dist.irecv(word, src=source, group=group, tag=tag).wait(timeout)  # type: ignore[union-attr]

    if rank == 0:
        for _ in range(ROUNDS):
            for other in range(1, size):  # by turns, so that a busy moment costs none all rounds
                receive(other)
                word[0] = time.perf_counter_ns()
                send(other)
        return Offset()
    found: list[Offset] = []
    for _ in range(ROUNDS):
        asked = time.perf_counter_ns()
        send(0)
        receive(0)
        told = time.perf_counter_ns()
        found.append(Offset(int(word) - (asked + told) // 2, (told - asked + 1) // 2))
    return min(found, key=lambda one: one.error_ns)
