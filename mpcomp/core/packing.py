"""Tensors of a known layout in one flat uint8 buffer, each aligned to its element size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mpcomp.core.tensor_meta import TensorMeta

__all__ = ["Payload", "pack_into", "packed_length", "unpack"]

#: The wire tensors of one message.
Payload = tuple[Tensor, ...]


def _offsets(layout: Sequence[TensorMeta], start: int) -> tuple[list[int], int]:
    """Where each tensor begins, and where the last one ends."""
    offsets, end = [], start
    for part in layout:
        end += -end % part.dtype.itemsize
        offsets.append(end)
        end += part.dense_bytes
    return offsets, end


def packed_length(layout: Sequence[TensorMeta], start: int = 0) -> int:
    """Where tensors of this layout end that are packed from byte ``start`` on."""
    return _offsets(layout, start)[1]


def pack_into(buffer: Tensor, payload: Payload, start: int = 0) -> int:
    """Writes the tensors into a uint8 buffer from byte ``start`` on; returns where they end."""
    offsets, length = _offsets([TensorMeta.of(part) for part in payload], start)
    end = start
    for part, offset in zip(payload, offsets, strict=True):
        buffer[end:offset] = 0  # padding, so that equal payloads are equal messages
        end = offset + part.numel() * part.element_size()
        buffer[offset:end].view(part.dtype).copy_(part.reshape(-1))
    return length


def unpack(buffer: Tensor, layout: Sequence[TensorMeta], start: int = 0) -> Payload:
    """The tensors, as views into the buffer."""
    offsets, _ = _offsets(layout, start)
    return tuple(
        buffer[offset : offset + part.dense_bytes].view(part.dtype).reshape(part.shape)
        for part, offset in zip(layout, offsets, strict=True)
    )
