"""The launch of kernels, and what they have in common."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Tiles", "as_fp32", "as_type", "floor", "launch", "nearest", "places"]

_WIDEST: Final = 1024  # columns of a tile, at most


def launch(kernel: Any, programs: int, on: Tensor, *args: Any, **constants: Any) -> None:
    """Runs programs of a kernel on a tensor's device, in the stream that torch has there.

    Args:
        kernel: of Triton.
        programs: their number; of none nothing runs.
        on: a tensor of the device.
        args: of the kernel.
        constants: likewise, and Triton's own options.
    """
    if programs:
        with torch.cuda.device_of(on):
            kernel[(programs,)](*args, **constants, enable_fp_fusion=False)


class Tiles:
    """Tiles of rows and columns, a program each.

    Args:
        vectors: [rows, columns].
        size: elements of a tile, a power of two, `_WIDEST` or more.

    Attributes:
        sizes: rows and columns of all.
        tile: rows and columns of a tile, as constants of a kernel.
        across: tiles beside each other.
        down: tiles below each other.
        num: tiles in all.
    """

    def __init__(self, vectors: Tensor, size: int = 2048) -> None:
        rows, columns = self.sizes = vectors.shape[0], vectors.shape[1]
        width = min(_WIDEST, triton.next_power_of_2(max(1, columns)))
        self.tile = {"ROWS": size // width, "COLUMNS": width}
        self.across, self.down = triton.cdiv(columns, width), triton.cdiv(rows, size // width)
        self.num = self.across * self.down


@triton.jit
def places(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's rows and columns, their places among all, and whether these are there."""
    program, across = tl.program_id(0).to(tl.int64), tl.cdiv(num_columns, COLUMNS)
    row = program // across * ROWS + tl.arange(0, ROWS)
    column = program % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    return row, column, row[:, None] * num_columns + column[None, :], inside


@triton.jit
def nearest(x):
    """Numbers up to 2^22 rounded to whole ones, half to even: the sum has no bits of fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def floor(x):
    """Numbers up to 2^22 rounded down; that of Triton takes subnormal numbers for zero."""
    whole = nearest(x)
    return tl.where(whole > x, whole - 1.0, whole)


@triton.jit
def as_type(x, TYPE: tl.constexpr):
    """fp32 numbers in another type, half to even, NaN as the CPU has it."""
    # By whole numbers, as Triton's interpreter cuts others off.
    if TYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)


@triton.jit
def as_fp32(x):
    """Numbers of up to 32 bits in fp32, which has them all."""
    if x.dtype == tl.bfloat16:  # likewise: the interpreter has other subnormal numbers
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)
