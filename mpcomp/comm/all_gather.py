"""Small records of all ranks on all ranks, in as few latencies as their number allows.

A step begins and ends with an agreement of a few numbers, and on long links what such a collective
costs is its rounds. gloo's pass records round a ring: with 8 ranks and 50 ms a step's two took 1.7
s. Here a rank hands its record to up to `RADIX` - 1 others at once, and then what it has to others
further away (Bruck et al., *Efficient algorithms for all-to-all communications*, 1997, with that
radix)::

    before   each rank p has the record of p
    round 0  it gets those of p + 1, p + 2, ... p + 15                       16 ranks: all
    round 1  it gets 16 each from p + 16, p + 32, ... p + 240                256 ranks: all

Receives for the next records are posted when the last ones are there, so that a message of gloo's
takes one latency and not a request and an answer.

Nobody waits for what was sent to a rank whose record has come since, where that rank might die and
the wait not end (`mpcomp.comm.channels`). It has gone to the socket: the receive for it was posted
before that record was sent, over the same connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["LARGEST_RECORD", "TAG", "AllGather", "num_rounds"]

#: Ranks that have each other's records after the first round.
RADIX: Final = 16
#: Bytes of a record that receives are posted for; a message may be shorter.
LARGEST_RECORD: Final = 4096
#: Of these messages; no message of a cut has it.
TAG: Final = 1 << 21


class _Message(NamedTuple):
    """A message each way of one round.

    Attributes:
        target: rank that gets this one's records.
        source: rank whose records this one gets.
        first: of the records that come, counted from this rank.
        length: number of the records.
    """

    target: int
    source: int
    first: int
    length: int


class AllGather:
    """Records of all ranks of a group whose ranks are numbered as those of the world are.

    Args:
        group: of gloo.
        timeout_s: of each wait.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = timedelta(seconds=timeout_s)
        self._rounds = list(_rounds(self._rank, self._size))
        #: Buffers and works of the receives for the records to come, by round.
        self._posted: list[list[tuple[Tensor, Any]]] = []
        #: The last records sent, whose memory must live until they have left.
        self._sent: list[tuple[Tensor, Any]] = []

    def __call__(self, record: Tensor) -> Tensor:
        """The records of all ranks [ranks, n], by rank.

        Args:
            record: [n], as long and of the same dtype on all ranks, up to `LARGEST_RECORD` bytes.

        Raises:
            RuntimeError: a rank is gone, or has not come within the timeout.
        """
        return self.begin(record)()

    def begin(self, record: Tensor) -> Callable[[], Tensor]:
        """Sends a record; what it gives waits for those of all ranks, before any other is sent."""
        if not record.numel():  # on no rank
            return lambda: record.new_empty(self._size, 0)
        own = record.view(torch.uint8)
        assert own.numel() <= LARGEST_RECORD, "longer records are for other collectives"
        held = torch.empty(self._size, own.numel(), dtype=torch.uint8)
        held[0] = own
        posted = self._posted or self._post()
        self._posted, before, self._sent = [], self._sent, []
        first = [self._send(held, each) for each in self._rounds[0]]
        # Taken out when it is called: whoever keeps that must not keep connections open.
        begun = [(self, held, posted, first, before)]
        return lambda: AllGather._finish(*begun.pop()).view(record.dtype)

    def _finish(
        self,
        held: Tensor,
        posted: list[list[tuple[Tensor, Any]]],
        first: list[Any],
        before: list[tuple[Tensor, Any]],
    ) -> Tensor:
        """The records of all ranks as bytes, by rank.

        Args:
            held: this rank's, and room for the others', counted from this rank.
            posted: receives, by round.
            first: what was sent in the first round.
            before: what was sent in earlier calls.
        """
        size = held.shape[1]
        for i, (messages, arriving) in enumerate(zip(self._rounds, posted, strict=True)):
            sent = first if i == 0 else [self._send(held, each) for each in messages]
            for each, (buffer, work) in zip(messages, arriving, strict=True):
                work.wait(self._timeout)
                arrived = buffer[: each.length * size].view(each.length, -1)
                held[each.first : each.first + each.length] = arrived
            heard = {each.source for each in messages}
            for each, work in zip(messages, sent, strict=True):
                if each.target in heard:
                    self._sent.append((held, work))
                else:
                    work.wait(self._timeout)
        for _, work in before:  # over by now
            work.wait(self._timeout)
        # A rank that has these records too may leave at once. Then it is the next call, if there is
        # one, that fails, when it posts anew.
        with suppress(RuntimeError):
            self._posted = self._post()
        return held.roll(self._rank, dims=0)

    def _post(self) -> list[list[tuple[Tensor, Any]]]:
        return [[self._receive(each) for each in messages] for messages in self._rounds]

    def _send(self, held: Tensor, message: _Message) -> Any:
        records = held[: message.length].reshape(-1)
        return dist.isend(records, dst=message.target, group=self._group, tag=TAG)

    def _receive(self, message: _Message) -> tuple[Tensor, Any]:
        buffer = torch.empty(message.length * LARGEST_RECORD, dtype=torch.uint8)
        work = dist.irecv(buffer, src=message.source, group=self._group, tag=TAG)
        return buffer, work

    def close(self) -> None:
        """Lets go of the group."""
        self._posted, self._sent = [], []
        del self._group


def num_rounds(size: int) -> int:
    """Latencies that the records of so many ranks take."""
    return sum(1 for _ in _rounds(0, size))


def _rounds(rank: int, size: int) -> Iterator[list[_Message]]:
    held = 1
    while held < size:
        yield [
            _Message((rank - first) % size, (rank + first) % size, first, min(held, size - first))
            for first in range(held, min(RADIX * held, size), held)
        ]
        held *= RADIX
