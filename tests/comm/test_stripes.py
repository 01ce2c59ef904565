"""Messages over several connections: what was sent arrives, whatever its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from mpcomp.comm.gloo import Gloo
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.comm.stripes import LEAST_BYTES, closed_up, stripe_bytes, stripes_of
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import (
    COMPRESSED,
    HEADER_BYTES,
    LONG_HEADER_BYTES,
    Form,
    Header,
)

#: Seconds; for what hangs, as a busy machine takes minutes.
TIMEOUT_S = 180.0
MOST = 50_000
FORM = Form((TensorMeta((MOST,), torch.uint8),), variable=True)
#: Of payloads, about where a stripe is full, empty, or one byte long.
LENGTHS = tuple(
    each - LONG_HEADER_BYTES
    for each in (
        *(LONG_HEADER_BYTES, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1),
        *(2 * LEAST_BYTES, 3 * LEAST_BYTES + 1, 4 * LEAST_BYTES, 4 * LEAST_BYTES + 1),
        *(20_000, MOST + LONG_HEADER_BYTES - 1, MOST + LONG_HEADER_BYTES),
    )
)


def message_of(length: int, *, variable: bool) -> torch.Tensor:
    payload = torch.arange(length, dtype=torch.int64).mul(7).to(torch.uint8)
    form = Form((TensorMeta.of(payload),), variable=variable)
    return form.frame(Header(COMPRESSED, step=3), (payload,))


def arrived(message: torch.Tensor, due: int, connections: int) -> torch.Tensor:
    """The message as a receiver has it that kept room for one of the length that was due."""
    room = stripe_bytes(due, connections)
    rooms = torch.full((connections * room,), 255, dtype=torch.uint8)
    for i, stripe in enumerate(stripes_of(message, connections)):
        rooms[i * room : i * room + stripe.numel()] = stripe
    return closed_up(rooms, connections, due)


@pytest.mark.parametrize("connections", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_stripes_are_the_message(length: int, connections: int) -> None:
    for variable in (False, True):
        message = message_of(length, variable=variable)
        stripes = stripes_of(message, connections)
        assert len(stripes) == connections
        assert torch.equal(torch.cat(stripes), message)
        assert stripes[0].numel() >= min(message.numel(), HEADER_BYTES)
    most = LONG_HEADER_BYTES + MOST
    found = arrived(message, most, connections)
    (payload,) = FORM.payload(found)
    assert torch.equal(payload, message[LONG_HEADER_BYTES:])
    fixed = message_of(length, variable=False)
    assert torch.equal(arrived(fixed, fixed.numel(), connections), fixed)


def test_a_length_that_cannot_be_is_refused_as_over_one_connection() -> None:
    message = message_of(9_000, variable=True)
    message[HEADER_BYTES : HEADER_BYTES + 8] = 127
    found = arrived(message, LONG_HEADER_BYTES + MOST, 4)
    with pytest.raises(RuntimeError, match="says it has .* bytes where 24 to 50024 were expected"):
        FORM.payload(found)


def exchanged(connections: int) -> tuple[int, list[bool]]:
    """Connections that came to this process, and whether each message arrived as it was sent."""
    rank = dist.get_rank()
    mesh = ProcessMesh(1, TIMEOUT_S, torch.device("cpu"))
    before = _num_connections()
    channel = Gloo(mesh, connections).open(0, 1, "test", at=lambda: "test")
    dist.barrier()
    made = _num_connections() - before
    assert channel is not None
    messages = [message_of(length, variable=True) for length in LENGTHS]
    same = []
    if rank == 1:
        for i in range(len(messages)):
            channel.post(i, LONG_HEADER_BYTES + MOST)
    dist.barrier()
    if rank == 0:
        for i in reversed(range(len(messages))):  # in any order
            channel.send(i, messages[i])
    else:
        for i, message in enumerate(messages):
            same.append(torch.equal(channel.receive(i)[: message.numel()], message))
    dist.barrier()
    channel.release()
    channel.close()
    return made, same


def _num_connections() -> int:
    found = psutil.Process().net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED for each in found)


@pytest.mark.parametrize("connections", [1, 4])
def test_every_message_arrives_over_so_many_connections(
    ranks: Callable[..., Any], connections: int
) -> None:
    (made, _), (also_made, same) = ranks(exchanged, 2, connections)
    assert made == also_made == connections
    assert same == [True] * len(LENGTHS)
