"""Loops of `mpcomp.compressors.rounding`, a pass over memory each."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.compressors import rounding
from mpcomp.compressors.rounding import Grid
from mpcomp.gpu.launch import Tiles, floor, launch, nearest, places

__all__ = ["norms_of", "parts_of", "restored", "rounded", "sums_of"]

_TILE: Final = 2048  # parts that a program makes
_LARGEST: Final = tl.constexpr(rounding._LARGEST)


@rounding.norms_of.on("cuda")
def norms_of(vectors: Tensor) -> NDArray[np.float64]:
    """See `mpcomp.compressors.rounding.norms_of`."""
    shape = Tiles(vectors)
    sums = vectors.new_empty((len(vectors), shape.across), dtype=torch.float64)
    launch(add_squares, shape.num, vectors, vectors.contiguous(), sums, *shape.sizes, **shape.tile)
    norms: NDArray[np.float64] = sums.sum(1).sqrt().cpu().numpy()
    return norms


@rounding.sums_of.on("cuda")
def sums_of(vectors: Tensor, grid: Grid) -> NDArray[np.float64]:
    """See `mpcomp.compressors.rounding.sums_of`."""
    shape = Tiles(vectors)
    sums = vectors.new_empty((shape.down, vectors.shape[1]), dtype=torch.float64)
    launch(
        add_columns,
        shape.num,
        vectors,
        vectors.contiguous(),
        *_columns(grid.units),
        *_columns(grid.centred),
        sums,
        *shape.sizes,
        **shape.tile,
    )
    of_columns: NDArray[np.float64] = sums.sum(0).cpu().numpy()
    return of_columns


@rounding.rounded.on("cuda")
def rounded(
    vectors: Tensor, grid: Grid, dither: Tensor | None, dead_zone: float, limit: int
) -> Tensor:
    """See `mpcomp.compressors.rounding.rounded`."""
    shape = Tiles(vectors)
    q = torch.empty(vectors.shape, dtype=torch.int16, device=vectors.device)
    launch(
        round_tile,
        shape.num,
        vectors,
        vectors.contiguous(),
        *_of_grid(grid),
        None if dither is None else dither.contiguous(),
        q,
        *shape.sizes,
        float(1 - dead_zone),
        float(limit),
        NEAREST=dead_zone == 0.5 or dither is not None,
        **shape.tile,
    )
    return q


@rounding.restored.on("cuda")
def restored(q: Tensor, grid: Grid, dither: Tensor | None, limit: float) -> Tensor:
    """See `mpcomp.compressors.rounding.restored`."""
    shape = Tiles(q)
    x = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    launch(
        restore_tile,
        shape.num,
        q,
        q.contiguous(),
        *_of_grid(grid),
        None if dither is None else dither.contiguous(),
        x,
        *shape.sizes,
        float(limit),
        **shape.tile,
    )
    return x


@rounding.parts_of.on("cuda")
def parts_of(dither: Tensor, num: int) -> Tensor:
    """See `mpcomp.compressors.rounding.parts_of`."""
    parts = torch.empty(dither.shape, dtype=torch.int8, device=dither.device)
    programs = triton.cdiv(dither.numel(), _TILE)
    args = dither.contiguous(), parts, dither.numel(), float(num)
    launch(floor_parts, programs, dither, *args, TILE=_TILE)
    return parts


def _columns(each: Tensor) -> tuple[Tensor, int]:
    """A number of each row, or of all; and how far the next row's is."""
    return each.contiguous(), int(len(each) > 1)


def _of_grid(grid: Grid) -> tuple[Any, ...]:
    """Units, means and shares, as kernels take them."""
    means = None if grid.means is None else grid.means.contiguous()
    return *_columns(grid.units), means, *_columns(grid.centred)


@triton.jit
def _finite(x):
    """Numbers as `torch.nan_to_num` has them."""
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -_LARGEST), _LARGEST)


@triton.jit
def _means(means, centred, centred_stride, row, column, num_rows, num_columns):
    """The mean of each element's channel, where its vector has one."""
    share = tl.load(centred + row * centred_stride, mask=row < num_rows, other=0.0)
    mean = tl.load(means + column, mask=column < num_columns, other=0.0)
    return share[:, None] * mean[None, :]


@triton.jit
def add_squares(x, sums, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of squares of a tile's rows, fp64 [rows, tiles beside each other]."""
    row, _, place, inside = places(num_rows, num_columns, ROWS, COLUMNS)
    value = _finite(tl.load(x + place, mask=inside, other=0.0)).to(tl.float64)
    across = tl.cdiv(num_columns, COLUMNS)
    at = row * across + tl.program_id(0) % across
    tl.store(sums + at, tl.sum(value * value, 1), mask=row < num_rows)


@triton.jit
def add_columns(
    x,
    units,
    units_stride,
    centred,
    centred_stride,
    sums,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of a tile's columns in units of the rows, fp64 [tiles below each other, columns]."""
    row, column, place, inside = places(num_rows, num_columns, ROWS, COLUMNS)
    unit = tl.load(units + row * units_stride, mask=row < num_rows, other=0.0)
    share = tl.load(centred + row * centred_stride, mask=row < num_rows, other=0.0)
    counts = (unit > 0) & (share > 0)
    value = _finite(tl.load(x + place, mask=inside & counts[:, None], other=0.0)).to(tl.float64)
    times = 1.0 / tl.where(counts, unit, 1.0).to(tl.float64)
    at = tl.program_id(0).to(tl.int64) // tl.cdiv(num_columns, COLUMNS) * num_columns + column
    tl.store(sums + at, tl.sum(value * times[:, None], 0), mask=column < num_columns)


@triton.jit
def round_tile(
    x,
    units,
    units_stride,
    means,
    centred,
    centred_stride,
    dither,
    q,
    num_rows,
    num_columns,
    up,
    limit,
    NEAREST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Whole numbers of a tile."""
    row, column, place, inside = places(num_rows, num_columns, ROWS, COLUMNS)
    unit = tl.load(units + row * units_stride, mask=row < num_rows, other=1.0)
    unit = tl.where(unit > 0, unit, float("inf"))
    y = tl.div_rn(_finite(tl.load(x + place, mask=inside, other=0.0)), unit[:, None])
    if means is not None:
        y -= _means(means, centred, centred_stride, row, column, num_rows, num_columns)
    if dither is not None:
        y += tl.load(dither + place, mask=inside, other=0.0)
    if NEAREST:
        y = nearest(tl.minimum(tl.maximum(y, -limit), limit))
    else:
        size = floor(tl.minimum(tl.abs(y) + up, limit))
        y = tl.where(y < 0, -size, size)
    tl.store(q + place, y.to(tl.int16), mask=inside)


@triton.jit
def restore_tile(
    q,
    units,
    units_stride,
    means,
    centred,
    centred_stride,
    dither,
    x,
    num_rows,
    num_columns,
    limit,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Elements of a tile's whole numbers."""
    row, column, place, inside = places(num_rows, num_columns, ROWS, COLUMNS)
    y = tl.load(q + place, mask=inside, other=0).to(tl.float32)
    if means is not None:
        y += _means(means, centred, centred_stride, row, column, num_rows, num_columns)
    if dither is not None:
        y -= tl.load(dither + place, mask=inside, other=0.0)
    unit = tl.load(units + row * units_stride, mask=row < num_rows, other=0.0)
    y = tl.minimum(tl.maximum(y * unit[:, None], -limit), limit)
    tl.store(x + place, y, mask=inside)


@triton.jit
def floor_parts(dither, parts, numel, num, TILE: tl.constexpr):
    """Parts of a step, of a block of a dither."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    v = tl.load(dither + place, mask=place < numel, other=0.0)
    tl.store(parts + place, floor(v * num).to(tl.int8), mask=place < numel)
