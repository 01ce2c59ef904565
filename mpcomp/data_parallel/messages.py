"""Messages of several gradients: what goes into them, and how a mean comes out of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import pack_into, packed_length, unpack
from mpcomp.data_parallel.base import Draw, Encoded
from mpcomp.data_parallel.item import Context, Item, count, shape_for
from mpcomp.feedback.base import narrow

__all__ = [
    "add_message",
    "compressor_of",
    "encode_item",
    "message_length",
    "packed",
    "without",
]

_ALIGNED = 16  # bytes; no element is longer


def compressor_of(item: Item, context: Context) -> Compressor:
    """The compressor of a parameter that goes compressed."""
    codec = context.controller.codec(item.name)
    assert isinstance(codec, Compressor)
    return codec


def encode_item(item: Item, context: Context) -> Encoded:
    """The message of a whole parameter; what it leaves out goes to the memory."""
    draw = context.draw(item.name, 0)
    codec = compressor_of(item, context)
    meta = item.shaped(codec)
    x = narrow(item.target, meta.dtype).reshape(meta.shape)
    encoded = context.controller.encode(item.name, x, draw)
    if item.end.keeps:
        item.sent(lambda y: without(y, encoded, meta, draw), encoded.positions)
    count(context.traffic, encoded)
    return encoded


def without(y: Tensor, encoded: Encoded, meta: TensorMeta, draw: Draw) -> Tensor:
    """A tensor [n] less what a message says."""
    y = y.clone()
    encoded.compressor.add_to(
        y,
        encoded.payload,
        meta,
        draw(encoded.compressor.shares_choice),
        scale=-1.0,
        positions=encoded.positions,
    )
    return y


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
