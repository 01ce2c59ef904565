"""Messages of several gradients: what goes into them, and how a mean comes out of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.compressors.coding import Coding, Encoded
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import Payload, pack_into, packed_length, unpack
from mpcomp.data_parallel.item import Context, Item
from mpcomp.feedback.base import narrow

__all__ = [
    "add_message",
    "compressor_of",
    "encode_item",
    "message_length",
    "packed",
]

_ALIGNED = 16  # bytes; no element is longer


def compressor_of(item: Item, context: Context) -> Compressor:
    """The compressor of a parameter that goes compressed."""
    codec = context.controller.codec(item.name)
    assert isinstance(codec, Compressor)
    return codec


def encode_item(item: Item, context: Context) -> Encoded:
    """The message of a whole parameter; what it leaves out goes to the memory."""
    codec = compressor_of(item, context)
    meta = item.shaped(codec)
    x = narrow(item.target, meta.dtype).reshape(meta.shape)
    coding = context.coding(codec, meta, item.name, 0)
    encoded = context.controller.encode(item.name, x, coding)
    if item.end.keeps:
        item.sent(encoded.without, encoded.positions)
    context.count(encoded)
    return encoded


def packed(payloads: Iterable[Payload]) -> Tensor:
    """Payloads behind each other, uint8 [n]."""
    payload = tuple(part for each in payloads for part in each)
    length = message_length([TensorMeta.of(part) for part in payload])
    device = payload[0].device if payload else torch.device("cpu")
    buffer = torch.empty(length, dtype=torch.uint8, device=device)
    buffer[pack_into(buffer, payload) :] = 0
    return buffer


def message_length(layout: Sequence[TensorMeta]) -> int:
    """Of a message; rounded up, so that messages behind each other are aligned."""
    return -(-packed_length(layout) // _ALIGNED) * _ALIGNED


def add_message(
    total: Tensor, coding: Coding, message: Tensor, start: int, scale: float = 1.0
) -> int:
    """Adds what a payload in a message says, ``scale`` times; returns where the next one begins."""
    coding.add_to(total, unpack(message, coding.layout, start), scale=scale)
    return packed_length(coding.layout, start)
