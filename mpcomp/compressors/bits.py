"""Packing small integers into bytes, and back: nothing here knows of tensors' meaning.

Integers of any width are stored as fields of 8, 4, 2 and 1 bits (a 7-bit number is a
4-bit, a 2-bit and a 1-bit field), each packed on its own. So the size is known from count
and width alone, every field is byte-parallel, and nothing loops over elements. On a CPU numpy packs
the 1-bit field, and small ones of the others as words.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mpcomp.core.kernels import kernel

__all__ = ["pack", "pack_bools", "packed_bytes", "unpack", "unpack_bools"]

#: Numbers up to which numpy is ahead of torch, by three to five times where they are thousands.
_FEW: Final = 1 << 20
#: A word of as many bytes as a byte has numbers of so many bits, and how a byte becomes a word with
#: one number a byte: (shift, mask) of each halving.
_WORDS: Final = {4: ("<u2", [(4, 0x0F0F)]), 2: ("<u4", [(12, 0x000F000F), (6, 0x03030303)])}


@functools.lru_cache
def _fields(width: int) -> tuple[tuple[int, int], ...]:
    """(offset, bits) of the fields of a ``width``-bit integer, low bits first."""
    fields, offset = [], 0
    while width - offset >= 8:
        fields.append((offset, 8))
        offset += 8
    for bits in (4, 2, 1):
        if (width - offset) & bits:
            fields.append((offset, bits))
            offset += bits
    return tuple(fields)


def packed_bytes(count: int, width: int) -> int:
    """Bytes that `pack` needs for ``count`` integers of ``width`` bits."""
    return sum(-(-count * bits // 8) for _, bits in _fields(width))


def pack(values: Tensor, width: int) -> Tensor:
    """Packs unsigned integers below 2**width: [rows, count] -> uint8 [rows, packed_bytes]."""
    return torch.cat(
        [_pack_field(values, offset, bits) for offset, bits in _fields(width)]
        or [values.new_zeros((values.shape[0], 0), dtype=torch.uint8)],
        dim=1,
    )


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Inverse of `pack`: [rows, count], uint8 for widths up to 8 and int64 above."""
    dtype = torch.uint8 if width <= 8 else torch.int64
    out: Tensor | None = None
    start = 0
    for offset, bits in _fields(width):
        size = -(-count * bits // 8)
        field = _unpack_field(packed[:, start : start + size], bits, count).to(dtype)
        out = field if out is None else out | (field << offset)
        start += size
    return packed.new_zeros((packed.shape[0], count), dtype=dtype) if out is None else out


def pack_bools(mask: Tensor) -> Tensor:
    """One bit an element, first element in the lowest bit: bool [n] -> uint8 [ceil(n / 8)]."""
    return pack_low(mask.view(torch.uint8).reshape(1, -1), 1)[0]


def unpack_bools(packed: Tensor, count: int) -> Tensor:
    """Inverse of `pack_bools`: bool [count]."""
    return unpack_low(packed.reshape(1, -1), 1, count)[0].view(torch.bool)


def _pack_field(values: Tensor, offset: int, bits: int) -> Tensor:
    field = values >> offset if offset else values
    if bits == 8:
        return (field & 0xFF).to(torch.uint8) if field.dtype != torch.uint8 else field
    return pack_low((field & ((1 << bits) - 1)).to(torch.uint8), bits)


@kernel
def pack_low(field: Tensor, bits: int) -> Tensor:
    """Packs integers below 2**bits for 1, 2 or 4 bits: uint8 [rows, count] -> [rows, bytes]."""
    rows, count = field.shape
    per_byte = 8 // bits
    padding = -count % per_byte
    if padding:
        field = torch.nn.functional.pad(field, (0, padding))
    field = field.reshape(rows, field.shape[1] // per_byte, per_byte)
    out = field[:, :, 0].clone()
    for i in range(1, per_byte):
        out |= field[:, :, i] << (i * bits)
    return out


@pack_low.on("cpu")
def _pack_low_on_cpu(field: Tensor, bits: int) -> Tensor:
    numbers = field.numpy()
    if bits == 1:
        return torch.from_numpy(np.packbits(numbers, axis=1, bitorder="little"))
    if field.numel() > _FEW:
        return pack_low.anywhere(field, bits)
    dtype, halvings = _WORDS[bits]
    count = numbers.shape[1]
    if rest := -count % (8 // bits):
        padded = np.zeros((len(numbers), count + rest), np.uint8)
        padded[:, :count] = numbers
        numbers = padded
    words = np.ascontiguousarray(numbers).view(dtype)
    for shift, _ in reversed(halvings):
        words = words | words >> shift
    return torch.from_numpy(words.astype(np.uint8))


def _unpack_field(packed: Tensor, bits: int, count: int) -> Tensor:
    return packed if bits == 8 else unpack_low(packed, bits, count)


@kernel
def unpack_low(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack_low`: uint8 [rows, count]."""
    rows, size = packed.shape
    per_byte = 8 // bits
    out = torch.empty((rows, size, per_byte), dtype=torch.uint8, device=packed.device)
    for i in range(per_byte):
        out[:, :, i] = (packed >> (i * bits)) & ((1 << bits) - 1)
    return out.reshape(rows, size * per_byte)[:, :count]


@unpack_low.on("cpu")
def _unpack_low_on_cpu(packed: Tensor, bits: int, count: int) -> Tensor:
    if bits == 1:
        ones = np.unpackbits(packed.numpy(), axis=1, count=count, bitorder="little")
        return torch.from_numpy(ones)
    if packed.numel() * 8 > _FEW * bits:
        return unpack_low.anywhere(packed, bits, count)
    dtype, halvings = _WORDS[bits]
    words = packed.numpy().astype(dtype, order="C")
    for shift, mask in halvings:
        words = (words | words << shift) & mask
    return torch.from_numpy(words.view(np.uint8)[:, :count])
