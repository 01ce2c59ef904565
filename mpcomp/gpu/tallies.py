"""Sums and counts of `mpcomp.entropy.tallies`, each in one pass over memory."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.core.transfer import to_host
from mpcomp.entropy import ans, classes, dithered, tallies
from mpcomp.gpu.launch import Tiles, launch, places

__all__ = ["add_symbols", "count_symbols", "summed", "tallied"]

_TILE: Final = 1 << 14  # elements of a tile whose rows and columns are added up
_WARPS: Final = 8  # of it
_APART: Final = 128  # tables of counts: programs that share one wait for each other
_ESCAPE: Final = tl.constexpr(ans.ESCAPE)
_CONTEXTS: Final = tl.constexpr(classes.CONTEXTS)


@tallies.summed.on("cuda")
def summed(q: Tensor) -> NDArray[np.int64]:
    """See `mpcomp.entropy.tallies.summed`."""
    shape = Tiles(q, _TILE)
    figures = torch.zeros(3 + sum(shape.sizes), dtype=torch.int64, device=q.device)
    launch(add_symbols, shape.num, q, q, figures, *shape.sizes, num_warps=_WARPS, **shape.tile)
    of_device: NDArray[np.int64] = to_host(figures).numpy()
    return of_device


@tallies.tallied.on("cuda")
def tallied(
    q: Tensor, offsets: Tensor, rows: Tensor, columns: Tensor, num_symbols: int
) -> NDArray[np.int64]:
    """See `mpcomp.entropy.tallies.tallied`."""
    shape, by = Tiles(q), offsets if len(offsets) else None
    num_contexts = classes.CONTEXTS * (1 if by is None else dithered.SIZES)
    apart = max(1, min(shape.num, _APART))
    counts = torch.zeros((apart, num_contexts, num_symbols), dtype=torch.int32, device=q.device)
    into = counts, apart, num_contexts * num_symbols, num_symbols
    launch(count_symbols, shape.num, q, q, by, rows, columns, *into, *shape.sizes, **shape.tile)
    of_device: NDArray[np.int64] = to_host(counts.sum(0)).numpy()
    return of_device


@triton.jit
def add_symbols(q, figures, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds the symbols of a tile to the figures of all."""
    row, column, place, inside = places(num_rows, num_columns, ROWS, COLUMNS)
    value = tl.load(q + place, mask=inside, other=0).to(tl.int32)
    size = tl.minimum(tl.abs(value), _ESCAPE)
    by_row, by_column = tl.sum(size, 1), tl.sum(size, 0)
    tl.atomic_max(figures, tl.max(tl.max(size, 1), 0).to(tl.int64))
    nonzero, negative = (value != 0).to(tl.int32), (value < 0).to(tl.int32)
    tl.atomic_add(figures + 1, tl.sum(tl.sum(nonzero, 1), 0).to(tl.int64))
    tl.atomic_add(figures + 2, tl.sum(tl.sum(negative, 1), 0).to(tl.int64))
    tl.atomic_add(figures + 3 + row, by_row.to(tl.int64), mask=row < num_rows)
    behind = figures + 3 + num_rows
    tl.atomic_add(behind + column, by_column.to(tl.int64), mask=column < num_columns)


@triton.jit
def count_symbols(
    q,
    offsets,
    of_rows,
    of_columns,
    counts,
    apart,
    size,
    num_symbols,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Counts the symbols of a tile, in one of the tables."""
    row, column, place, inside = places(num_rows, num_columns, ROWS, COLUMNS)
    value = tl.load(q + place, mask=inside, other=0).to(tl.int32)
    of_row = tl.load(of_rows + row, mask=row < num_rows, other=0).to(tl.int32)
    of_column = tl.load(of_columns + column, mask=column < num_columns, other=0).to(tl.int32)
    context = tl.minimum(of_row[:, None] + of_column[None, :], _CONTEXTS - 1)
    if offsets is not None:
        offset = tl.load(offsets + place, mask=inside, other=0).to(tl.int32)
        context += (offset ^ (offset >> 7)) * _CONTEXTS
        away = tl.where(offset < 0, value, -value)
        symbol = 2 * tl.abs(away) - (away < 0).to(tl.int32)
    else:
        symbol = tl.minimum(tl.abs(value), _ESCAPE)
    own = counts + tl.program_id(0) % apart * size
    tl.atomic_add(own + context * num_symbols + symbol, 1, mask=inside, sem="relaxed")
