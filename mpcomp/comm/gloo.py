"""Messages over gloo: TCP between hosts, from host memory, over one connection or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp.comm.channels import Channel
from mpcomp.comm.connections import several_connections
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.comm.stripes import closed_up, stripe_bytes, stripes_of
from mpcomp.comm.transport import GroupChannel, Transport
from mpcomp.core.wire import HEADER_BYTES, no_tensor

__all__ = ["Gloo", "GlooChannel"]


class Gloo(Transport):
    """Channels of gloo.

    Args:
        mesh: the connected ranks.
        connections: between two ranks, of each channel.
    """

    def __init__(self, mesh: ProcessMesh, connections: int = 1) -> None:
        super().__init__(mesh)
        self.connections = connections

    @property
    def channel(self) -> type[GlooChannel]:
        """The kind of its channels."""
        return GlooChannel

    def open(
        self, a: int, b: int, name: str, *, varies: bool = True, at: Callable[[], str] | None = None
    ) -> Channel | None:
        with several_connections(self.connections):
            group = self.mesh.pair(a, b, "gloo")
        if group is None:
            return None
        return self.channel(group, self.peer_of(a, b), name, self.mesh, at, self.connections)


class GlooChannel(GroupChannel):
    """A channel whose messages go in stripes, one a connection; a GPU's through pinned memory.

    A message that gloo is just taking up when the other rank dies is forgotten: a wait for its
    departure ends with nothing but its timeout.

    Args:
        group: as of `GroupChannel`, and so are those that follow.
        peer: likewise.
        name: likewise.
        mesh: likewise.
        at: likewise.
        connections: of the group; each carries a stripe of every message.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        name: str,
        mesh: ProcessMesh,
        at: Callable[[], str] | None = None,
        connections: int = 1,
    ) -> None:
        super().__init__(group, peer, name, mesh, at)
        self._connections = connections
        self._staged = self.device.type != "cpu"  # gloo reads host memory

    def room_for(self, num_bytes: int, room: int) -> Tensor:
        each = stripe_bytes(max(num_bytes, room), self._connections)
        return torch.empty(self._connections * each, dtype=torch.uint8, pin_memory=self._staged)

    def _tagged(self, stripes: Sequence[Tensor], microbatch: int) -> Iterator[tuple[int, Tensor]]:
        """Each stripe with its tag: gloo takes the connection of the tag's remainder."""
        return enumerate(stripes, microbatch * self._connections)

    def start_receive(self, room: Tensor, microbatch: int) -> list[Any]:
        return [
            dist.irecv(each, src=self.peer, group=self.group, tag=tag)
            for tag, each in self._tagged(stripes_of(room, self._connections), microbatch)
        ]

    def start_send(self, message: Tensor, microbatch: int) -> tuple[Tensor, list[Any]]:
        if message.device.type != "cpu":
            host = torch.empty(message.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(message, non_blocking=True)
            torch.cuda.current_stream(message.device).synchronize()
            message = host
        return message, [
            dist.isend(each, dst=self.peer, group=self.group, tag=tag)
            for tag, each in self._tagged(stripes_of(message, self._connections), microbatch)
        ]

    def send_nothing(self, microbatch: int, num_bytes: int) -> None:
        self.send(microbatch, no_tensor(HEADER_BYTES))

    def message_in(self, room: Tensor, num_bytes: int) -> Tensor:
        message = closed_up(room, self._connections, num_bytes)
        return message.to(self.device, non_blocking=True) if self._staged else message
