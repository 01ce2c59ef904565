"""A transport by the rules of NCCL, on CPUs: what breaks one fails here, where NCCL would hang.

Messages go by gloo. An error names the rule: lengths are equal, messages arrive in the order in
which they were sent, no receive is begun ahead, both ranks come to a communicator's first use.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

import mpcomp.api.launch as launch
from mpcomp.comm import nccl
from mpcomp.comm.mesh import ProcessMesh

#: Tag of notes, as gloo has tags.
NOTE = 1

#: Of a rank's wait for the other one to make a communicator, so that no test hangs.
LONGEST_S = 60.0


class StrictChannel(nccl.NCCLChannel):
    """NCCL's channel over gloo: ahead of each message goes a note of its number and length."""

    def start_send(self, message: Tensor, microbatch: int) -> tuple[Tensor, list[Any]]:
        note = torch.tensor([microbatch, message.numel()])
        noted = dist.isend(note, self.peer, self.group, NOTE)
        message, works = super().start_send(message, microbatch)
        return message, [noted, *works]

    def start_receive(self, room: Tensor, microbatch: int) -> list[Any]:
        note = torch.empty(2, dtype=torch.int64)
        noted = dist.irecv(note, self.peer, self.group, NOTE)

        def start() -> list[Any]:
            return super(StrictChannel, self).start_receive(room, microbatch)

        return [Checked(noted, note, (microbatch, room.numel()), start, self.name)]

    def post(self, microbatch: int, num_bytes: int, room: int = 0) -> None:
        super().post(microbatch, num_bytes, room)
        begun = self._posted[microbatch][-1]
        assert not begun, f"{self.name}, microbatch {microbatch}: a receive was begun ahead"


@dataclass
class Checked:
    """A receive that ends with an error where what comes is not what is waited for."""

    noted: Any
    note: Tensor
    due: tuple[int, int]
    start: Callable[[], list[Any]]
    name: str

    def wait(self, timeout: timedelta) -> None:
        self.noted.wait(timeout)
        said = tuple(self.note.tolist())
        assert said == self.due, f"{self.name}: (microbatch, bytes) {said}, awaited {self.due}"
        for work in self.start():
            work.wait(timeout)


class Operations:
    """Operations of torch.distributed that `mpcomp.comm.nccl` calls, by NCCL's rules over gloo.

    Collectives and batches take the group's communicator. Each operation that stands alone takes
    another one of both ranks. There are no tags.
    """

    #: Communicators that this process has come to.
    _came: ClassVar[set[str]] = set()

    def all_reduce(self, x: Tensor, *, group: dist.ProcessGroup) -> None:
        self._meet("group", group)
        dist.all_reduce(x, group=group)

    def batch_isend_irecv(self, operations: list[dist.P2POp]) -> list[Any]:
        for group in {operation.group for operation in operations}:
            self._meet("group", group)
        return dist.batch_isend_irecv(operations)

    def P2POp(self, kind: Callable[..., Any], *args: Any) -> dist.P2POp:
        return dist.P2POp({"isend": dist.isend, "irecv": dist.irecv}[kind.__name__], *args)

    def isend(self, x: Tensor, dst: int, group: dist.ProcessGroup) -> Any:
        self._meet("pair", group)
        return dist.isend(x, dst, group)

    def irecv(self, x: Tensor, src: int, group: dist.ProcessGroup) -> Any:
        self._meet("pair", group)
        return dist.irecv(x, src, group)

    def _meet(self, whose: str, group: dist.ProcessGroup) -> None:
        """Makes a communicator, unless it is there: waits until the other rank makes it too.

        Raises:
            AssertionError: the other rank waits where this one has not come, or does not come.
        """
        name = f"the communicator of {whose} {group.group_name}"
        if name in self._came:
            return
        self._came.add(name)
        rank = dist.get_rank()
        (peer,) = set(dist.get_process_group_ranks(group)) - {rank}
        store = PrefixStore("strict", dist.distributed_c10d._get_default_store())
        store.set(f"at/{rank}", name)
        store.set(f"{name}/{rank}", "")
        begin = time.monotonic()
        while time.monotonic() - begin < LONGEST_S:
            # In this order: a peer that waits elsewhere may have come here before.
            there = store.get(f"at/{peer}").decode() if store.check([f"at/{peer}"]) else name
            if store.check([f"{name}/{peer}"]):
                return
            assert there in self._came, (
                f"rank {rank} makes {name}, and rank {peer} {there}: each waits for the other"
            )
            time.sleep(1e-3)
        raise AssertionError(f"rank {rank} makes {name}, and rank {peer} does not come")


class Strict(nccl.NCCL):
    """As `NCCL`, of gloo's groups."""

    channel = StrictChannel


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Pipelines that are made within it have the strict transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "dist", Operations())
        patch.setattr(launch, "transport_for", strict_transport)
        yield


def strict_transport(mesh: ProcessMesh, connections: int | str) -> Strict:
    return Strict(mesh)
