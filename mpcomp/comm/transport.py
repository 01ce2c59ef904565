"""Transports carry messages between the ranks of a pipeline: the seam for another network.

A transport opens channels (`mpcomp.comm.channels`), one a direction of a cut or a tie. gloo and
NCCL (`mpcomp.comm.gloo`, `mpcomp.comm.nccl`) each are one module. So is another::

    class Mine(Transport):
        def open(self, a, b, name, *, varies=True, at=...):
            return MyChannel(...) if self.mesh.place in (a, b) else None
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from mpcomp.comm.channels import Channel
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.core.wire import CHECKED_HEADER_BYTES, says_no_tensor

__all__ = ["GroupChannel", "Transport"]

_DEPARTURE: Final = "departure of a message"
#: Of waits whose time somebody else limits.
_FOREVER: Final = timedelta(days=30)


class Transport(ABC):
    """Makes the channels of a pipeline.

    Args:
        mesh: the connected ranks.
    """

    #: Between two ranks, of each channel.
    connections: int = 1

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh = mesh

    @abstractmethod
    def open(
        self, a: int, b: int, name: str, *, varies: bool = True, at: Callable[[], str] | None = None
    ) -> Channel | None:
        """A channel between two places of every pipeline; None where this rank is neither.

        All ranks call this in the same order.

        Args:
            a: one place.
            b: the other.
            name: of the link, for errors, as in "boundary 0 act".
            varies: whether a message may be shorter than both ends know ahead.
            at: tells what this rank is doing, for errors; None for the stage that it runs.

        Raises:
            PeerError: a rank failed, or did not come.
        """

    def peer_of(self, a: int, b: int) -> int:
        """The rank at the other one of two places, where this rank is at one."""
        return self.mesh.rank_at(b if a == self.mesh.place else a)


class GroupChannel(Channel):
    """A channel between two ranks by operations of a process group of theirs.

    Args:
        group: of the two ranks; with one group a direction, no message queues behind another's.
        peer: the other rank.
        name: of the link, for errors.
        mesh: of all ranks; messages come from its device and go there.
        at: tells what this rank is doing, for errors; None for the stage that it runs.
    """

    on_wire = True
    posts_ahead = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        name: str,
        mesh: ProcessMesh,
        at: Callable[[], str] | None = None,
    ) -> None:
        self.group = group
        self.peer = peer
        self.name = name
        self.device = mesh.device
        self._timeout = timedelta(seconds=mesh.wait_s)
        self._waits = mesh.waits
        self._at = at or (lambda: mesh.where.partition(",")[0])
        #: Rooms of messages, the lengths that are due, and what is being received.
        self._posted: dict[int, tuple[Tensor, int, list[Any]]] = {}
        self._sent: list[tuple[int, Tensor, list[Any]]] = []

    @abstractmethod
    def room_for(self, num_bytes: int, room: int) -> Tensor:
        """Memory to receive a message into, uint8; arguments as of `post`."""

    @abstractmethod
    def start_receive(self, room: Tensor, microbatch: int) -> list[Any]:
        """Begins to receive a message; what is to be waited for."""

    @abstractmethod
    def start_send(self, message: Tensor, microbatch: int) -> tuple[Tensor, list[Any]]:
        """Begins to send a message; the memory that must live until it has left, and its waits."""

    @abstractmethod
    def message_in(self, room: Tensor, num_bytes: int) -> Tensor:
        """The message that has arrived in a room, of ``num_bytes`` if its header does not say."""

    def post(self, microbatch: int, num_bytes: int, room: int = 0) -> None:
        kept = self.room_for(num_bytes, room)
        # No header is of zeros: a message that is too short must not show what was there before.
        kept[:CHECKED_HEADER_BYTES] = 0
        works = []
        if self.posts_ahead:
            with self._waits.leaving(self._named(microbatch, "message"), self.peer):
                works = self.start_receive(kept, microbatch)
        self._posted[microbatch] = kept, num_bytes, works

    def send(self, microbatch: int, message: Tensor) -> None:
        with self._waits.leaving(self._named(microbatch, _DEPARTURE), self.peer):
            self._sent.append((microbatch, *self.start_send(message, microbatch)))

    def receive(self, microbatch: int) -> Tensor:
        return self.message_in(*self._arrived(microbatch))

    def receive_any(self, microbatch: int) -> Tensor | None:
        room, num_bytes = self._arrived(microbatch)
        return None if says_no_tensor(room) else self.message_in(room, num_bytes)

    def _arrived(self, microbatch: int) -> tuple[Tensor, int]:
        """The room of a message that is there now, and the length that was due."""
        room, num_bytes, works = self._posted.pop(microbatch)
        if self.posts_ahead and not works:  # another thread has waited for it
            return room, num_bytes

        def arrived(_: float) -> None:
            for work in works or self.start_receive(room, microbatch):
                work.wait(self._timeout)

        self.until(microbatch, arrived)
        return room, num_bytes

    def arrive(self, microbatch: int) -> None:
        _, _, works = self._posted[microbatch]
        for work in works:
            work.wait(_FOREVER)
        works.clear()

    def until(self, microbatch: int, arrived: Callable[[float], None]) -> None:
        begin = time.perf_counter()
        with self._waiting(microbatch, "message"):
            arrived(self._timeout.total_seconds())
        self.waited_s += time.perf_counter() - begin

    def release(self) -> None:
        for microbatch, _, works in self._sent:
            with self._waiting(microbatch, _DEPARTURE):
                for work in works:
                    work.wait(self._timeout)
        self._sent.clear()

    def _waiting(self, microbatch: int, what: str) -> AbstractContextManager[None]:
        return self._waits.on(self.peer, self._named(microbatch, what))

    def _named(self, microbatch: int, what: str) -> str:
        return f"{what} of {self.name}, {self._at()}, microbatch {microbatch}"

    def close(self) -> None:
        self._posted.clear()
        self._sent.clear()
        del self.group
