"""Masks of `mpcomp.compressors.topk`, by radix select of eight bits at a time.

Magnitudes are compared as whole numbers, as on a CPU. fp32 has four digits, others have two.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpcomp.compressors import topk
from mpcomp.gpu.launch import launch

__all__ = ["count_digits", "count_equal", "mark_largest", "mask_of_largest", "pick_digit"]

_BLOCK: Final = 4096  # elements of a program
_LEAST: Final = 256  # likewise, of short rows
_MANY: Final = 1 << 31  # elements that no int32 counts


@topk.mask_of_largest.on("cuda")
def mask_of_largest(rows: Tensor, k: int) -> Tensor:
    """See `mpcomp.compressors.topk.mask_of_largest`."""
    num_rows, n = rows.shape
    if n >= _MANY:
        return topk.mask_of_largest.anywhere(rows, k)
    wide = rows.dtype.itemsize == 4
    bits = rows.contiguous().view(torch.int32 if wide else torch.int16)
    block = min(_BLOCK, max(_LEAST, triton.next_power_of_2(n)))
    blocks = triton.cdiv(n, block)
    programs, tile = num_rows * blocks, {"BLOCK": block}

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=rows.device)

    found, left = zeros(num_rows), zeros(num_rows).fill_(k)
    for shift in (24, 16, 8, 0) if wide else (8, 0):
        counts, digit = zeros(num_rows, 256), {"SHIFT": shift}
        launch(count_digits, programs, rows, bits, found, counts, n, **digit, **tile)
        launch(pick_digit, num_rows, rows, counts, found, left, **digit)
    equal = zeros(num_rows, blocks)
    launch(count_equal, programs, rows, bits, found, equal, n, **tile)
    before = equal.cumsum(1, dtype=torch.int32) - equal
    mask = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    into: tuple[Any, ...] = before, left, mask.view(torch.uint8)
    launch(mark_largest, programs, rows, bits, found, *into, n, **tile)
    return mask


@triton.jit
def _magnitudes(x, n, BLOCK: tl.constexpr):
    """A program's row, its elements' places among all, magnitudes, and whether the row has them."""
    blocks = tl.cdiv(n, BLOCK)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    inside = tl.arange(0, BLOCK) < n - block * BLOCK
    place = row.to(tl.int64) * n + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x + place, mask=inside, other=0)
    largest: tl.constexpr = (1 << (x.dtype.element_ty.primitive_bitwidth - 1)) - 1
    return row, place, bits.to(tl.int32) & largest, inside


@triton.jit
def count_digits(x, found, counts, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Adds a block's digits to its row's counts, where the digits above are those found."""
    row, _, size, inside = _magnitudes(x, n, BLOCK)
    # Shifted twice: by 32 at once, nothing is said of the result.
    above = (size >> SHIFT >> 8) == (tl.load(found + row) >> SHIFT >> 8)
    here = tl.histogram(size >> SHIFT & 255, 256, mask=inside & above)
    tl.atomic_add(counts + row.to(tl.int64) * 256 + tl.arange(0, 256), here, mask=here > 0)


@triton.jit
def pick_digit(counts, found, left, SHIFT: tl.constexpr):
    """Adds the digit of the k-th largest to those found, and leaves its rank among equal digits."""
    row = tl.program_id(0)
    here = tl.load(counts + row.to(tl.int64) * 256 + tl.arange(0, 256))
    reach = tl.cumsum(here, 0, reverse=True)
    k = tl.load(left + row)
    digit = tl.sum((reach >= k).to(tl.int32), 0) - 1
    larger = tl.sum(tl.where(tl.arange(0, 256) > digit, here, 0), 0)
    tl.store(left + row, k - larger)
    tl.store(found + row, tl.load(found + row) | digit << SHIFT)


@triton.jit
def count_equal(x, found, equal, n, BLOCK: tl.constexpr):
    """A block's elements that are equal to the k-th largest."""
    row, _, size, inside = _magnitudes(x, n, BLOCK)
    here = inside & (size == tl.load(found + row))
    tl.store(equal + tl.program_id(0), tl.sum(here.to(tl.int32), 0))


@triton.jit
def mark_largest(x, found, before, left, mask, n, BLOCK: tl.constexpr):
    """Marks a block's elements above the k-th largest, and the first of those equal to it."""
    row, place, size, inside = _magnitudes(x, n, BLOCK)
    kth = tl.load(found + row)
    here = (inside & (size == kth)).to(tl.int32)
    first = tl.load(before + tl.program_id(0)) + tl.cumsum(here, 0) <= tl.load(left + row)
    tl.store(mask + place, ((size > kth) | ((here > 0) & first)).to(tl.uint8), mask=inside)
