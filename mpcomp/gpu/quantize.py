"""Codes of `mpcomp.compressors.quantize`, made and packed in one pass over memory, and back."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpcomp.compressors import quantize
from mpcomp.compressors.bits import packed_bytes
from mpcomp.core.wire import Payload
from mpcomp.gpu.launch import as_fp32, as_type, floor, launch, nearest

__all__ = ["pack_codes", "packed", "unpack_codes", "unpacked"]

_BLOCK: Final = 1024  # elements of a program
_MANY: Final = 1 << 31  # elements whose places no int32 holds


@quantize.packed.on("cuda")
def packed(
    groups: Tensor,
    scales: Payload,
    noise: Tensor | None,
    levels: int,
    bits: int,
    rows: tuple[int, int],
) -> Tensor:
    """See `mpcomp.compressors.quantize.packed`."""
    num_rows, row_numel = rows
    size = packed_bytes(row_numel, bits)
    codes = torch.empty((num_rows, size), dtype=torch.uint8, device=groups.device)
    low, step = _scales(scales)
    launch(
        pack_codes,
        num_rows * triton.cdiv(row_numel, _BLOCK),
        groups,
        groups.contiguous(),
        low,
        step,
        None if noise is None else noise.contiguous(),
        codes,
        row_numel,
        size,
        groups.shape[1],
        float(levels),
        levels / 2,
        **_constants(groups.numel(), len(groups), bits),
    )
    return codes


@quantize.unpacked.on("cuda")
def unpacked(
    codes: Tensor,
    scales: Payload,
    levels: int,
    bits: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """See `mpcomp.compressors.quantize.unpacked`."""
    num_groups, numel = shape
    num_rows = len(codes)
    row_numel, group_numel = numel // max(1, num_rows), numel // max(1, num_groups)
    x = torch.empty((num_groups, group_numel), dtype=dtype, device=codes.device)
    low, step = _scales(scales)
    launch(
        unpack_codes,
        num_rows * triton.cdiv(row_numel, _BLOCK),
        codes,
        codes.contiguous(),
        low,
        step,
        x,
        row_numel,
        codes.shape[1],
        group_numel,
        levels / 2,
        **_constants(numel, num_groups, bits),
    )
    return x


def _scales(scales: Payload) -> tuple[Tensor | None, Tensor]:
    """The smallest element if it is sent, and the step, of each group."""
    *lows, step = (scale.contiguous() for scale in scales)
    return lows[0] if lows else None, step


def _constants(numel: int, num_groups: int, bits: int) -> dict[str, Any]:
    return {"ONE": num_groups == 1, "WIDE": numel >= _MANY, "BITS": bits, "BLOCK": _BLOCK}


@triton.jit
def _places(row_numel, group_numel, ONE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A program's row and first element of it, the elements' places among all, and their groups."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    chunks = tl.cdiv(row_numel, BLOCK)
    row, first = program // chunks, program % chunks * BLOCK
    place = row * row_numel + first + tl.arange(0, BLOCK)
    group = tl.zeros_like(place) if ONE else place // group_numel
    return row, first, place, group


@triton.jit
def _offset(BITS: tl.constexpr, FIELD: tl.constexpr):
    """The lowest bit of a field in a code, whose wider fields come first."""
    return BITS // (2 * FIELD) * (2 * FIELD)


@triton.jit
def _put(codes, code, start, first, row_numel, BITS: tl.constexpr, FIELD: tl.constexpr):
    """Stores a field of a block's codes; returns the start of the next one."""
    EACH: tl.constexpr = 8 // FIELD
    NUM_BYTES: tl.constexpr = code.shape[0] // EACH
    size = tl.cdiv(row_numel, EACH)
    if BITS & FIELD:
        field = code >> _offset(BITS, FIELD) & ((1 << FIELD) - 1)
        field = tl.reshape(field, [NUM_BYTES, EACH]) << (tl.arange(0, EACH) * FIELD)[None, :]
        byte = first // EACH + tl.arange(0, NUM_BYTES)
        tl.store(codes + start + byte, tl.sum(field, 1).to(tl.uint8), mask=byte < size)
        start += size
    return start


@triton.jit
def _take(codes, code, start, element, row_numel, BITS: tl.constexpr, FIELD: tl.constexpr):
    """Codes with a field added to them, and the start of the next one."""
    EACH: tl.constexpr = 8 // FIELD
    if BITS & FIELD:
        byte = tl.load(codes + start + element // EACH, mask=element < row_numel, other=0)
        field = byte.to(tl.int32) >> (element % EACH * FIELD).to(tl.int32) & ((1 << FIELD) - 1)
        code |= field << _offset(BITS, FIELD)
        start += tl.cdiv(row_numel, EACH)
    return code, start


@triton.jit
def pack_codes(
    x,
    low,
    step,
    noise,
    codes,
    row_numel,
    row_bytes,
    group_numel,
    levels,
    middle,
    ONE: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes of a block of elements, field by field where the row has them."""
    row, first, place, group = _places(row_numel, group_numel, ONE, WIDE, BLOCK)
    element = first + tl.arange(0, BLOCK)
    inside = element < row_numel
    unit = as_fp32(tl.load(step + group, mask=inside, other=1.0))
    unit = tl.where(unit > 0, unit, 1.0)
    y = tl.load(x + place, mask=inside, other=0.0)
    if low is not None:
        y = tl.div_rn(y - as_fp32(tl.load(low + group, mask=inside, other=0.0)), unit)
    else:
        y = tl.div_rn(y, unit) + middle
    if noise is not None:
        y += tl.load(noise + place, mask=inside, other=0.0)
    y = tl.minimum(tl.maximum(tl.where(y == y, y, 0.0), 0.0), levels)
    y = nearest(y) if noise is None else floor(y)
    code = tl.where(inside, y.to(tl.int32), 0)
    start = row * row_bytes
    if BITS == 8:
        tl.store(codes + start + element, code.to(tl.uint8), mask=inside)
    else:
        start = _put(codes, code, start, first, row_numel, BITS, 4)
        start = _put(codes, code, start, first, row_numel, BITS, 2)
        _put(codes, code, start, first, row_numel, BITS, 1)


@triton.jit
def unpack_codes(
    codes,
    low,
    step,
    x,
    row_numel,
    row_bytes,
    group_numel,
    middle,
    ONE: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The elements of a block's codes."""
    row, first, place, group = _places(row_numel, group_numel, ONE, WIDE, BLOCK)
    element = first + tl.arange(0, BLOCK)
    inside = element < row_numel
    start = row * row_bytes
    if BITS == 8:
        code = tl.load(codes + start + element, mask=inside, other=0).to(tl.int32)
    else:
        code = tl.zeros([BLOCK], tl.int32)
        code, start = _take(codes, code, start, element, row_numel, BITS, 4)
        code, start = _take(codes, code, start, element, row_numel, BITS, 2)
        code, start = _take(codes, code, start, element, row_numel, BITS, 1)
    unit = as_fp32(tl.load(step + group, mask=inside, other=0.0))
    if low is not None:
        y = code.to(tl.float32) * unit
        y += as_fp32(tl.load(low + group, mask=inside, other=0.0))
    else:
        y = (code.to(tl.float32) - middle) * unit
    if x.dtype.element_ty == tl.float16:  # bf16 scales, rounded outwards, lead beyond its range
        y = tl.where(y == y, tl.minimum(tl.maximum(y, -65504.0), 65504.0), y)
    tl.store(x + place, as_type(y, x.dtype.element_ty), mask=inside)
