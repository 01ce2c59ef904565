"""Moving messages of one direction of a cut or a tie, from one end of its link to the other.

Both ends know the length of every message before it is sent, so receives are posted ahead and a
message needs no announcement. Sends return at once, and nobody waits for one until something else
tells that it has arrived: one that gloo is just taking up when the other rank dies is forgotten,
and a wait for it ends with nothing but its timeout. All receives end with their connection.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp.comm.failures import Waits
from mpcomp.comm.stripes import closed_up, stripe_bytes, stripes_of
from mpcomp.core.wire import CHECKED_HEADER_BYTES, HEADER_BYTES, no_tensor, says_no_tensor

__all__ = ["Channel", "LocalChannel", "WireChannel"]


class Channel(ABC):
    """One direction of one cut, as this rank sees it."""

    #: Whether messages leave this rank.
    on_wire: bool
    #: Whether both ends must name one length for a message.
    equal_lengths: bool = False
    #: Where messages arrive, and whence those leave that cross the network.
    device: torch.device
    #: Seconds spent waiting for messages.
    waited_s: float = 0.0

    @abstractmethod
    def post(self, microbatch: int, num_bytes: int, room: int = 0) -> None:
        """Prepares for a message of this length.

        Args:
            microbatch: its number.
            num_bytes: of the message, the most where that varies.
            room: bytes for one that is longer than it should be, where a transport can tell.
        """

    @abstractmethod
    def send(self, microbatch: int, message: Tensor) -> None:
        """Hands a message to the transport, uint8 [n]; returns at once."""

    @abstractmethod
    def send_nothing(self, microbatch: int, num_bytes: int) -> None:
        """Says that there is nothing to send; as long as this where lengths must be equal."""

    @abstractmethod
    def receive(self, microbatch: int) -> Tensor:
        """Waits for a message that was posted: uint8 [n] on this rank's device."""

    @abstractmethod
    def receive_any(self, microbatch: int) -> Tensor | None:
        """As `receive`, where there may be nothing to send, which gives None.

        From an accelerator's network (NCCL) this waits for the message on the host.
        """

    @abstractmethod
    def release(self) -> None:
        """Lets go of the messages sent so far, which the other end is known to have received."""


class LocalChannel(Channel):
    """Both stages are on this rank: a message goes to the device of the one that receives it.

    Args:
        device: that one.
    """

    on_wire = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._messages: dict[int, Tensor | None] = {}

    def post(self, microbatch: int, num_bytes: int, room: int = 0) -> None:
        pass

    def send(self, microbatch: int, message: Tensor) -> None:
        self._messages[microbatch] = message.to(self.device, non_blocking=True)

    def send_nothing(self, microbatch: int, num_bytes: int) -> None:
        self._messages[microbatch] = None

    def receive(self, microbatch: int) -> Tensor:
        message = self.receive_any(microbatch)
        assert message is not None
        return message

    def receive_any(self, microbatch: int) -> Tensor | None:
        return self._messages.pop(microbatch)

    def release(self) -> None:
        pass


class WireChannel(Channel):
    """The stages are on two ranks, which share a process group of this direction alone.

    Args:
        group: of the two ranks; with one group a direction, no message queues behind another's.
        peer: the other rank.
        connections: of the group, each of which carries a stripe of every message.
        name: for errors, as in "boundary 0 act".
        device: where messages come from and go to.
        timeout_s: of each wait.
        waits: told what this rank waits for.
        at: tells the stage that this rank is running, for errors.
    """

    on_wire = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        *,
        connections: int = 1,
        name: str,
        device: torch.device,
        timeout_s: float,
        waits: Waits,
        at: Callable[[], str],
    ) -> None:
        self._group = group
        self._peer = peer
        self._name = name
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._waits = waits
        self._at = at
        nccl = group._get_backend(device).name() == "nccl"
        #: gloo reads host memory; so a GPU's messages go through pinned buffers.
        self._staged = device.type != "cpu" and not nccl
        #: NCCL knows no tags: receives are started in the order in which they are waited for.
        self._in_order = self.equal_lengths = nccl
        self._connections = 1 if nccl else connections  # NCCL has its own
        #: Rooms of the stripes, the length that is due, and what is being received.
        self._posted: dict[int, tuple[Tensor, int, list[Any]]] = {}
        self._sent: list[tuple[int, Tensor, list[Any]]] = []

    def post(self, microbatch: int, num_bytes: int, room: int = 0) -> None:
        device = torch.device("cpu") if self._staged else self.device
        # NCCL wants both ends to name one length.
        longest = num_bytes if self._in_order else max(num_bytes, room)
        rooms = torch.empty(
            self._connections * stripe_bytes(longest, self._connections),
            dtype=torch.uint8,
            device=device,
            pin_memory=self._staged,
        )
        # No header is of zeros: a message that is too short must not show what was there before.
        rooms[:CHECKED_HEADER_BYTES] = 0
        works = [] if self._in_order else self._start(rooms, microbatch)
        self._posted[microbatch] = rooms, num_bytes, works

    def _start(self, rooms: Tensor, microbatch: int) -> list[Any]:
        with self._waiting(microbatch, "message"):
            return [
                dist.irecv(each, src=self._peer, group=self._group, tag=tag)
                for tag, each in self._tagged(stripes_of(rooms, self._connections), microbatch)
            ]

    def _tagged(self, stripes: Sequence[Tensor], microbatch: int) -> Iterator[tuple[int, Tensor]]:
        """Each stripe with its tag: gloo takes the connection of the tag's remainder."""
        return enumerate(stripes, microbatch * self._connections)

    def send(self, microbatch: int, message: Tensor) -> None:
        if self._staged and message.device.type != "cpu":
            host = torch.empty(message.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(message, non_blocking=True)
            torch.cuda.current_stream(message.device).synchronize()
            message = host
        with self._waiting(microbatch, "departure of a message"):
            works = [
                dist.isend(each, dst=self._peer, group=self._group, tag=tag)
                for tag, each in self._tagged(stripes_of(message, self._connections), microbatch)
            ]
        self._sent.append((microbatch, message, works))  # its memory must live until it has left

    def send_nothing(self, microbatch: int, num_bytes: int) -> None:
        notice = no_tensor(num_bytes if self.equal_lengths else HEADER_BYTES)
        self.send(microbatch, notice if self._staged else notice.to(self.device))

    def receive(self, microbatch: int) -> Tensor:
        return self._message(*self._arrived(microbatch))

    def receive_any(self, microbatch: int) -> Tensor | None:
        rooms, num_bytes = self._arrived(microbatch)
        return None if says_no_tensor(rooms) else self._message(rooms, num_bytes)

    def _arrived(self, microbatch: int) -> tuple[Tensor, int]:
        """Rooms of a message's stripes, which are there now, and the length that was due."""
        rooms, num_bytes, works = self._posted.pop(microbatch)
        works = works or self._start(rooms, microbatch)
        begin = time.perf_counter()
        with self._waiting(microbatch, "message"):
            for work in works:
                work.wait(self._timeout)
        self.waited_s += time.perf_counter() - begin
        return rooms, num_bytes

    def _message(self, rooms: Tensor, num_bytes: int) -> Tensor:
        message = closed_up(rooms, self._connections, num_bytes)
        return message.to(self.device, non_blocking=True) if self._staged else message

    def release(self) -> None:
        for microbatch, _, works in self._sent:
            with self._waiting(microbatch, "departure of a message"):
                for work in works:
                    work.wait(self._timeout)
        self._sent.clear()

    def _waiting(self, microbatch: int, what: str) -> AbstractContextManager[None]:
        where = f"{what} of {self._name}, {self._at()}, microbatch {microbatch}"
        return self._waits.on(self._peer, where)

    def close(self) -> None:
        """Lets go of the connection."""
        self._posted.clear()
        self._sent.clear()
        del self._group
