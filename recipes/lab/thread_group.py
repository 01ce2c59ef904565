"""A process group whose members are threads of this process, on one device.

It has the collectives of an exchange between replicas on one level. One thread computes at a time;
all are there when tensors are moved, which one of them does for all.

torch has a group of threads for its own tests, and it works here. But it replaces the state of
torch.distributed for the whole process while it lasts, has no limit for waits, and lets one
thread's error end every such group: to undo all this takes more code than these collectives.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

__all__ = ["WAIT_S", "Meeting", "NobodyComes", "thread_group"]

T = TypeVar("T")

#: Seconds that a thread waits for the others.
WAIT_S: Final = 600.0
_BACKEND: Final = "mpcomp_threads"


class NobodyComes(RuntimeError):
    """An error of threads that wait in vain, as another one has failed or takes too long."""


class Meeting:
    """The place where threads meet: one computes at a time, and all are there when tensors move.

    Args:
        size: number of threads.
    """

    def __init__(self, size: int) -> None:
        #: Held while a thread computes: so the library need not bear several at a time.
        self.turn = threading.Lock()
        self._size = size
        self._barrier = threading.Barrier(size, self._act, timeout=WAIT_S)
        self._brought: list[Any] = [None] * size
        self._move: Callable[[list[Any]], None] = list.clear

    def join(self, rank: int, brought: T, move: Callable[[list[T]], None]) -> _Done:
        """Waits for all, and lets one of them ``move`` what each has brought.

        Args:
            rank: of the thread, which has the turn, and has it again at the end.
            brought: its tensors.
            move: the same for all; called with what they have brought, by rank.

        Raises:
            NobodyComes: another thread has failed, or takes too long.
        """
        self._brought[rank], self._move = brought, move
        self.turn.release()
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise NobodyComes(
                f"another replica has failed, or has not come within {WAIT_S:g} seconds"
            ) from error
        finally:
            self.turn.acquire()
        return _Done()

    def _act(self) -> None:
        brought, self._brought = self._brought, [None] * self._size
        self._move(brought)

    def end(self) -> None:
        """Ends the waits of all, now and later, with an error."""
        self._barrier.abort()


class _Done:
    """The work of a collective, which has ended when it has begun."""

    def wait(self) -> bool:
        return True


class _Group(dist.ProcessGroup):
    """One replica's process group, as far as an exchange on one level uses it."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # unknown to torch's stubs
        self._meeting = meeting

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Done:  # type: ignore[override]
        assert opts.reduceOp == dist.ReduceOp.SUM, "an exchange has no other"
        return self._meeting.join(self.rank(), tensors[0], _sum)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> _Done:
        return self._meeting.join(self.rank(), (outputs[0], inputs[0]), _gather)

    def alltoall_base(  # type: ignore[override]
        self, output: Tensor, given: Tensor, _: list[int], sizes: list[int], opts: Any
    ) -> _Done:
        return self._meeting.join(self.rank(), (output, torch.split(given, sizes)), _deal)

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # its name since torch 2.13


def _sum(brought: list[Tensor]) -> None:
    first, *others = brought
    for other in others:
        first += other
    for other in others:
        other.copy_(first)


def _gather(brought: list[tuple[list[Tensor], Tensor]]) -> None:
    for outputs, _ in brought:
        for output, (_, given) in zip(outputs, brought, strict=True):
            output.copy_(given)


def _deal(brought: list[tuple[Tensor, tuple[Tensor, ...]]]) -> None:
    for rank, (output, _) in enumerate(brought):
        torch.cat([parts[rank] for _, parts in brought], out=output)


def _made(options: Any, meeting: Meeting) -> _Group:
    return _Group(options.group_rank, options.group_size, meeting)


dist.Backend.register_backend(_BACKEND, _made, extended_api=True, devices=["cpu", "cuda"])


@contextmanager
def thread_group(rank: int, size: int, meeting: Meeting) -> Iterator[dist.ProcessGroup]:
    """A group as one of the threads has it, to be handed on as ``dist.group.WORLD``.

    torch.distributed knows it within this context alone, and is then as it was; the group goes on.

    Args:
        rank: of the thread.
        size: number of threads.
        meeting: of these threads.

    Raises:
        ValueError: torch.distributed has another group.
    """
    hook = sys.excepthook
    dist.init_process_group(
        _BACKEND,
        store=HashStore(),
        rank=rank,
        world_size=size,
        pg_options=meeting,
    )
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
