"""Messages of any length from one rank to some others, which take one latency as a rule.

A receive is posted ahead for as much as any message so far had. What a longer one has beyond that
follows in a second message, and from then on there is room for as much::

    room      length, and as much as there is room for ──>
    beyond    the rest, if there is one                ──>
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from mpcomp.comm.all_gather import TAG as OF_RECORDS

__all__ = ["TAGS", "FromFirst"]

#: Of what there is room for, and of the rest; no other message has them.
TAGS: Final = (OF_RECORDS + 1, OF_RECORDS + 2)
#: Bytes that there is room for at first.
_ROOM: Final = 4096
_LENGTH: Final = struct.Struct("<q")
#: Bytes of a message.
_LONGEST: Final = 1 << 30


class FromFirst:
    """One rank's end of it; all of ``ranks`` make one, and then as many calls as the first.

    Args:
        group: of gloo, whose ranks are numbered as those of the world are.
        ranks: the one that sends, then those that receive.
        timeout_s: of each wait.
    """

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], timeout_s: float) -> None:
        self._group = group
        self._first, *self._others = ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._room = _ROOM
        self._posted: tuple[Tensor, Any] | None = None
        #: The last message, whose memory must live until it has left.
        self._sent: list[tuple[Tensor, Any]] = []
        if dist.get_rank(group) != self._first:
            self._posted = self._post(0, self._room)

    def send(self, message: bytes) -> int:
        """Sends to all others; returns the bytes that these are.

        Raises:
            RuntimeError: one of them is gone, or has not taken the message before this one.
        """
        for _, work in self._sent:
            work.wait(self._timeout)
        whole = torch.frombuffer(bytearray(_LENGTH.pack(len(message)) + message), dtype=torch.uint8)
        parts = [part for part in (whole[: self._room], whole[self._room :]) if part.numel()]
        self._sent = [
            (part, dist.isend(part, dst=rank, group=self._group, tag=tag))
            for rank in self._others
            for part, tag in zip(parts, TAGS, strict=False)
        ]
        self._room = max(self._room, whole.numel())
        return whole.numel() * len(self._others)

    def receive(self) -> bytes:
        """Waits for a message.

        Raises:
            RuntimeError: the first rank is gone, or nothing has come within the timeout.
        """
        whole, work = self._posted or self._post(0, self._room)
        self._posted = None
        work.wait(self._timeout)
        (length,) = _LENGTH.unpack(whole[: _LENGTH.size].numpy().tobytes())
        if not 0 <= length <= _LONGEST:
            raise RuntimeError(f"a message of {length} bytes: at most {_LONGEST} are taken")
        end = _LENGTH.size + length
        if end > self._room:
            rest, work = self._post(1, end - self._room)
            work.wait(self._timeout)
            whole = torch.cat([whole, rest])
            self._room = end
        # The first rank may have left with its last message. Then the next call fails.
        with suppress(RuntimeError):
            self._posted = self._post(0, self._room)
        return whole[_LENGTH.size : end].numpy().tobytes()

    def _post(self, part: int, num_bytes: int) -> tuple[Tensor, Any]:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer, dist.irecv(buffer, src=self._first, group=self._group, tag=TAGS[part])
