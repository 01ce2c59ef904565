"""A message in stripes, one for each connection between two ranks.

After a pause TCP sends no more than a small window before the first acknowledgement (slow start,
RFC 5681, 3.1), so on a long link a message that is longer waits for round trips. Every connection
has a window of its own: in as many stripes as there are connections a message waits for fewer.

How long a message is its receiver may learn from its header alone. So room is kept for stripes of
the longest one, and what has arrived is moved together.
"""

from __future__ import annotations

from torch import Tensor

from mpcomp.core.wire import HEADER_BYTES, Header

__all__ = ["closed_up", "stripe_bytes", "stripes_of"]

#: Bytes of the first stripe: what a packet carries, and at least the header.
LEAST_BYTES = 1448


def stripe_bytes(num_bytes: int, connections: int) -> int:
    """Length of all stripes of a message but the last ones, which may be shorter or empty."""
    return num_bytes if connections == 1 else max(-(-num_bytes // connections), LEAST_BYTES)


def stripes_of(message: Tensor, connections: int) -> list[Tensor]:
    """The stripes of a message, uint8 [n], as views of it."""
    each = stripe_bytes(message.numel(), connections)
    return [message[i * each : (i + 1) * each] for i in range(connections)]


def closed_up(rooms: Tensor, connections: int, num_bytes: int) -> Tensor:
    """The message whose stripes have arrived; of one connection with what is left of its room.

    Args:
        rooms: one behind the other, uint8, as many as connections and of one length.
        connections: their number.
        num_bytes: of the message, if its header does not say.
    """
    if connections == 1:
        return rooms
    if num_bytes >= HEADER_BYTES:
        said = Header.of(rooms).length
        # Who unframes a message that says more than there is room for refuses it.
        num_bytes = num_bytes if said is None or said > rooms.numel() else said
    each, room = stripe_bytes(num_bytes, connections), rooms.numel() // connections
    for i in range(1, connections):
        length = min(each, num_bytes - i * each)
        if length <= 0 or each == room:
            break
        # A copy first: places of from where and to where may have bytes in common.
        rooms[i * each : i * each + length] = rooms[i * room : i * room + length].clone()
    return rooms[:num_bytes]
