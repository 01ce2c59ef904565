"""The channels of a pipeline that this rank has an end of."""

from __future__ import annotations

from collections.abc import Sequence

from mpcomp.comm.channels import Channel, LocalChannel
from mpcomp.comm.transport import Transport
from mpcomp.links.boundary import Boundary, ConnectedBoundary
from mpcomp.links.link import Link

__all__ = ["Wiring"]


class Wiring:
    """Makes channels. All ranks ask for all of them, in the same order, as groups are made by all.

    Args:
        transport: between ranks.
        places: of each stage the rank of a pipeline that has it.

    Attributes:
        boundaries: of each cut it and both channels; None where this rank has neither side of it.
    """

    def __init__(
        self, boundaries: Sequence[Boundary], transport: Transport, places: Sequence[int]
    ) -> None:
        self._transport = transport
        self._places = places
        self._channels: list[Channel] = []
        self.boundaries = [self._connected(boundary) for boundary in boundaries]

    def _connected(self, boundary: Boundary) -> ConnectedBoundary | None:
        channels = self.channels_of(boundary.links)
        return None if channels is None else ConnectedBoundary(boundary, *channels)

    def channels_of(self, links: tuple[Link, Link]) -> tuple[Channel, Channel] | None:
        """Channels of two links between the same stages, if one of these is here."""
        first, second = (self._channel(link) for link in links)
        if first is None or second is None:
            return None
        self._channels += [first, second]
        return first, second

    def _channel(self, link: Link) -> Channel | None:
        ends = sorted(self._places[stage] for stage in (link.sender_stage, link.receiver_stage))
        link.defers_nonfinite = True
        if ends[0] == ends[1]:
            link.on_wire = False
            return LocalChannel(self._transport.mesh.device)
        return self._transport.open(ends[0], ends[1], link.name, varies=link.varies)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for messages."""
        return sum(channel.waited_s for channel in self._channels)

    def close(self) -> None:
        """Closes all channels."""
        for channel in self._channels:
            channel.close()
