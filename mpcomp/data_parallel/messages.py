"""Messages of several gradients: what goes into them, and how a mean comes out of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.core.packing import pack_into, packed_length, unpack
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.base import Encoded
from mpcomp.data_parallel.item import Context, Item, count, shape_for
from mpcomp.feedback.base import narrow

__all__ = [
    "add_message",
    "compressor_of",
    "encode_item",
    "message_length",
    "packed",
    "take_away",
]

_ALIGNED = 16  # bytes; no element is longer


def compressor_of(item: Item, context: Context) -> Compressor:
    """What a parameter that goes compressed is sent with."""
    codec = context.controller.codec(item.name)
    assert isinstance(codec, Compressor)
    return codec


def encode_item(item: Item, context: Context) -> Encoded:
    """The message of a whole parameter; what it leaves out goes to the memory."""
    draw = context.draw(item.name, 0)
    codec = compressor_of(item, context)
    meta = item.shaped(codec)
    x = narrow(item.wanted, meta.dtype).reshape(meta.shape)
    encoded = context.controller.encode(item.name, x, draw)
    if item.memory.keeps:
        rest = item.wanted.clone()
        take_away(rest, encoded, meta, draw(encoded.compressor.shares_choice))
        item.keep(rest, encoded.positions, context)
    count(context.tally, encoded)
    return encoded


def take_away(rest: Tensor, encoded: Encoded, meta: TensorMeta, generator: torch.Generator) -> None:
    """Takes what a message says from ``rest`` [n], in place."""
    encoded.compressor.add_to(
        rest, encoded.payload, meta, generator, scale=-1.0, positions=encoded.positions
    )


def packed(sent: Sequence[Encoded]) -> Tensor:
    """Payloads behind each other, uint8 [n]."""
    payload = tuple(part for encoded in sent for part in encoded.payload)
    length = message_length([TensorMeta.of(part) for part in payload])
    device = payload[0].device if payload else torch.device("cpu")
    buffer = torch.empty(length, dtype=torch.uint8, device=device)
    buffer[pack_into(buffer, payload) :] = 0
    return buffer


def message_length(layout: Sequence[TensorMeta]) -> int:
    """Of a message; rounded up, so that messages behind each other are aligned."""
    return -(-packed_length(layout) // _ALIGNED) * _ALIGNED


def add_message(
    mean: Tensor,
    name: str,
    piece: int,
    meta: TensorMeta,
    codec: Compressor,
    message: Tensor,
    start: int,
    context: Context,
) -> int:
    """Adds one replica's part of a mean from its message; returns where the next one begins."""
    meta = shape_for(codec, meta)
    layout = codec.layout(meta)
    generator = context.draw(name, piece)(codec.shares_choice)
    codec.add_to(
        mean, unpack(message, layout, start), meta, generator, scale=1 / context.peers.size
    )
    return packed_length(layout, start)
