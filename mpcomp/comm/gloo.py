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
from mpcomp.core.transfer import to_host
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
        peer = self.peer_of(a, b)
        return self.channel(group, peer, name, self.mesh, at, self.connections, varies=varies)


class GlooChannel(GroupChannel):
    """A channel whose messages go in stripes, one a connection, from host memory to host memory.

    Those that lie on a GPU leave through pinned memory. Rooms are pinned where messages of one
    length come, which go on to the GPU as they are.

    A message that gloo is just taking up when the other rank dies is forgotten: a wait for its
    departure ends with nothing but its timeout.

    Args:
        group: as of `GroupChannel`, and so are those that follow.
        peer: likewise.
        name: likewise.
        mesh: likewise.
        at: likewise.
        connections: of the group; each carries a stripe of every message.
        varies: whether a message may be shorter than both ends know ahead.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        name: str,
        mesh: ProcessMesh,
        at: Callable[[], str] | None = None,
        connections: int = 1,
        *,
        varies: bool = True,
    ) -> None:
        super().__init__(group, peer, name, mesh, at)
        self._connections = connections
        self._pins = self.device.type != "cpu" and not varies

    def room_for(self, num_bytes: int, room: int) -> Tensor:
        each = stripe_bytes(max(num_bytes, room), self._connections)
        return torch.empty(self._connections * each, dtype=torch.uint8, pin_memory=self._pins)

    def _tagged(self, stripes: Sequence[Tensor], microbatch: int) -> Iterator[tuple[int, Tensor]]:
        """Each stripe with its tag: gloo takes the connection of the tag's remainder."""
        return enumerate(stripes, microbatch * self._connections)

    def start_receive(self, room: Tensor, microbatch: int) -> list[Any]:
        return [
            dist.irecv(each, src=self.peer, group=self.group, tag=tag)
            for tag, each in self._tagged(stripes_of(room, self._connections), microbatch)
        ]

    def start_send(self, message: Tensor, microbatch: int) -> tuple[Tensor, list[Any]]:
        message = to_host(message)
        return message, [
            dist.isend(each, dst=self.peer, group=self.group, tag=tag)
            for tag, each in self._tagged(stripes_of(message, self._connections), microbatch)
        ]

    def send_nothing(self, microbatch: int, num_bytes: int) -> None:
        self.send(microbatch, no_tensor(HEADER_BYTES))

    def message_in(self, room: Tensor, num_bytes: int) -> Tensor:
        return closed_up(room, self._connections, num_bytes)
