"""Messages over NCCL: from one GPU's memory to another's.

NCCL has rules that gloo has not. Both ends must name one length. There are no tags: messages
arrive in the order in which they were sent. A group's communicator is made by its first operation,
for which both ranks must come; sends and receives in a batch, if only of one, take the group's own,
and others a second one. A receive that is started occupies the GPU until it ends.

Nothing has run over NCCL yet. Tests hold this module to these rules over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp.comm.channels import Channel
from mpcomp.comm.gloo import Gloo
from mpcomp.comm.transport import GroupChannel, Transport
from mpcomp.core.wire import no_tensor

__all__ = ["NCCL", "NCCLChannel"]


class NCCLChannel(GroupChannel):
    """A channel of messages whose lengths both ends know, received in the order of waiting."""

    equal_lengths = True
    posts_ahead = False

    def room_for(self, num_bytes: int, room: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def start_receive(self, room: Tensor, microbatch: int) -> list[Any]:
        return self._begin(dist.irecv, room)

    def start_send(self, message: Tensor, microbatch: int) -> tuple[Tensor, list[Any]]:
        return message, self._begin(dist.isend, message)

    def _begin(self, kind: Callable[..., Any], x: Tensor) -> list[Any]:
        return dist.batch_isend_irecv([dist.P2POp(kind, x, self.peer, self.group)])

    def send_nothing(self, microbatch: int, num_bytes: int) -> None:
        self.send(microbatch, no_tensor(num_bytes).to(self.device))

    def message_in(self, room: Tensor, num_bytes: int) -> Tensor:
        return room


class NCCL(Transport):
    """Channels of NCCL, and of gloo where messages vary in length.

    A message that varies was coded on the host, where gloo takes it; over NCCL a receive of the
    longest one that there may be would wait for bytes that nobody sends.
    """

    channel: type[GroupChannel] = NCCLChannel

    def open(
        self, a: int, b: int, name: str, *, varies: bool = True, at: Callable[[], str] | None = None
    ) -> Channel | None:
        if varies:
            return Gloo(self.mesh).open(a, b, name, at=at)
        group = self.mesh.pair(a, b)
        if group is None:
            return None
        # Both ranks are here, in the one order of all ranks: later each might wait for the other
        # in a group of its own.
        dist.all_reduce(torch.zeros(1, device=self.mesh.device), group=group)
        return self.channel(group, self.peer_of(a, b), name, self.mesh, at)
