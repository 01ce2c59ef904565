"""Small integers and positions as bytes, and back: nothing here knows of tensors' meaning.

Integers of any width are stored as fields of 8, 4, 2 and 1 bits (a 7-bit number is a
4-bit, a 2-bit and a 1-bit field), each packed on its own. So the size is known from count
and width alone, every field is byte-parallel, and nothing loops over elements. On a CPU numpy packs
the 1-bit field, and small ones of the others as words.

The positions of a selection, ``k`` ascending ones below ``n``, go in the smallest of three codes.
All sizes follow from ``n`` and ``k``, so both ends choose alike and buffers are posted without
data:

=============  =======================================  =========================
code           bits                                     best for
=============  =======================================  =========================
bitmask        n                                        k above about n / 4
Elias-Fano     k (2 + log2(n / k)) at the most          nearly everything else
integers       k log2 n                                 a handful of positions
=============  =======================================  =========================

Elias-Fano (Elias 1974, Fano 1971): the low ``l = floor(log2(n / k))`` bits of each position
are stored as they are; the high parts, which ascend, as a bit string in which position number
``i`` sets bit ``high_i + i``.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mpcomp.core.kernels import kernel

__all__ = [
    "decode_indices",
    "encode_indices",
    "index_bytes",
    "nonzero",
    "pack",
    "pack_bools",
    "packed_bytes",
    "unpack",
    "unpack_bools",
]

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


# -- positions -------------------------------------------------------------------------------------


def _low_width(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1)


def _upper_bits(n: int, k: int) -> int:
    return k + ((n - 1) >> _low_width(n, k)) + 1


def _sizes(n: int, k: int) -> dict[str, int]:
    """Bytes of each code. The order settles ties."""
    return {
        "bitmask": packed_bytes(n, 1),
        "elias-fano": packed_bytes(k, _low_width(n, k)) + packed_bytes(_upper_bits(n, k), 1),
        "integers": packed_bytes(k, (n - 1).bit_length()),
    }


@functools.lru_cache(4096)
def _cheapest(n: int, k: int) -> str:
    sizes = _sizes(n, k)
    return min(sizes, key=sizes.__getitem__)


@functools.lru_cache(4096)
def index_bytes(n: int, k: int) -> int:
    """Bytes of ``k`` positions below ``n``; zero if all or none are kept."""
    return 0 if k in (0, n) else min(_sizes(n, k).values())


@kernel
def nonzero(mask: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` set elements of a flat bool tensor, ascending; int64 [count]."""
    # With the count known, an accelerator need not be waited for.
    return torch.nonzero_static(mask, size=count).squeeze(1)


@nonzero.on("cpu")
def _nonzero_on_cpu(mask: Tensor, count: int) -> Tensor:
    # numpy's scan is twice as fast as torch's here
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def encode_indices(positions: Tensor, n: int) -> Tensor:
    """Ascending int64 positions [k] below ``n`` -> uint8 [index_bytes(n, k)]."""
    k = positions.numel()
    if k in (0, n):
        return torch.empty(0, dtype=torch.uint8, device=positions.device)
    code = _cheapest(n, k)
    if code == "integers":
        return pack(positions.reshape(1, -1), (n - 1).bit_length())[0]
    if code == "bitmask":
        return pack_bools(_mask(positions, n))
    low = _low_width(n, k)
    upper = (positions >> low) + torch.arange(k, device=positions.device)
    return torch.cat(
        [
            pack(positions.reshape(1, -1), low)[0],
            pack_bools(_mask(upper, _upper_bits(n, k))),
        ]
    )


def decode_indices(code: Tensor, n: int, k: int) -> Tensor:
    """Inverse of `encode_indices`: int64 [k], ascending.

    Raises:
        ValueError: no such code; on the CPU, as an accelerator is not waited for. There what comes
            of a damaged one are other positions below ``n``.
    """
    if k in (0, n):
        return torch.arange(k, device=code.device)
    positions = _decoded(code, n, k)
    if positions.device.type != "cpu":
        return positions.clamp_(0, n - 1)
    found = positions.numpy()  # several times as fast as torch where positions are few
    if not (found[1:] > found[:-1]).all() or not 0 <= found[0] <= found[-1] < n:
        raise _damaged(n, k)
    return positions


def _decoded(code: Tensor, n: int, k: int) -> Tensor:
    """Positions that a code says, int64 [k]; of a damaged one any numbers."""
    kind = _cheapest(n, k)
    if kind == "integers":
        return unpack(code.reshape(1, -1), (n - 1).bit_length(), k)[0].to(torch.int64)
    if kind == "bitmask":
        return _set(unpack_bools(code, n), n, k)
    low = _low_width(n, k)
    split = packed_bytes(k, low)
    upper = _set(unpack_bools(code[split:], _upper_bits(n, k)), n, k)
    high = upper - torch.arange(k, device=code.device)
    lows = unpack(code[:split].reshape(1, -1), low, k)[0]
    return (high << low) | lows.to(torch.int64)


def _set(mask: Tensor, n: int, k: int) -> Tensor:
    positions = nonzero(mask, k)
    if positions.numel() != k:
        raise _damaged(n, k)
    return positions


def _damaged(n: int, k: int) -> ValueError:
    return ValueError(
        f"a code that is not of {k} ascending positions below {n}: it is damaged, or the two ends "
        "have different methods"
    )


def _mask(positions: Tensor, n: int) -> Tensor:
    mask = torch.zeros(n, dtype=torch.bool, device=positions.device)
    return mask.index_fill_(0, positions, True)
