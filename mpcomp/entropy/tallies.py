"""Sums and counts of integers, which say their tables: made where the integers are.

They are sums of whole numbers, so that all devices have the same ones. `count_bytes` and lanes
(`mpcomp.entropy.lanes`) need no more of an accelerator's integers than these on the host.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.core.compiled import compiled
from mpcomp.core.kernels import kernel
from mpcomp.core.threads import each, slices_of
from mpcomp.core.transfer import to_device, to_host
from mpcomp.entropy import ans, dithered
from mpcomp.entropy.classes import CONTEXTS, Classes

__all__ = ["counts_of", "folded", "summed", "sums_of", "tallied", "tally"]

_SIZES: Final = dithered.SIZES  # here too, as what is compiled does not look elsewhere
_int64: Any = np.int64  # for a type checker, which knows no bits of numpy's own numbers
_int32: Any = np.int32


def sums_of(q: Tensor) -> ans.Sums:
    """As `ans.sums`, of integers on any device, int16 [rows, columns], contiguous."""
    figures, by_row, by_column = np.split(summed(q), [3, 3 + len(q)])
    return ans.Sums(by_row, by_column, *figures.tolist())


def counts_of(
    q: Tensor, offsets: Tensor | None, classes: Classes, sums: ans.Sums
) -> NDArray[np.int64]:
    """Occurrences of each symbol in each context: [contexts, symbols].

    Args:
        q: integers, int16 [rows, columns], contiguous.
        offsets: theirs, int8 [rows, columns], on that device, where symbols are of
            `mpcomp.entropy.dithered` in its contexts; None for magnitudes in those of classes.
        classes: of rows and columns.
        sums: of the integers.
    """
    num_symbols = sums.largest + 1
    if offsets is None:
        offsets = q.new_empty((0, 0), dtype=torch.int8)
    else:
        num_symbols += sums.largest
    rows, columns = (
        to_device(torch.from_numpy(each), q.device) for each in (classes.rows, classes.columns)
    )
    return tallied(q, offsets, rows, columns, num_symbols)


@kernel
def summed(q: Tensor) -> NDArray[np.int64]:
    """Figures of integers, int16 [rows, columns]: int64 [3 + rows + columns].

    They are the largest symbol, how many integers are not zero, how many are below, the sum of each
    row's symbols, and the sum of each column's.
    """
    size = q.abs().clamp_(max=ans.ESCAPE)
    figures = torch.stack([size.max().to(torch.int64), (q != 0).sum(), (q < 0).sum()])
    of_device: NDArray[np.int64] = to_host(torch.cat([figures, size.sum(1), size.sum(0)])).numpy()
    return of_device


@summed.on("cpu")
def _summed_on_cpu(q: Tensor) -> NDArray[np.int64]:
    values = q.numpy()
    sums = each(lambda rows: ans.sums(values[rows]), slices_of(*values.shape))
    figures = np.array(
        [
            max(one.largest for one in sums),
            sum(one.nonzero for one in sums),
            sum(one.negative for one in sums),
        ]
    )
    by_column = np.sum([one.by_column for one in sums], axis=0)
    return np.concatenate([figures, *(one.by_row for one in sums), by_column])


@kernel
def tallied(
    q: Tensor, offsets: Tensor, rows: Tensor, columns: Tensor, num_symbols: int
) -> NDArray[np.int64]:
    """Occurrences of each symbol in each context: [contexts, symbols].

    Args:
        q: integers, int16 [rows, columns].
        offsets: theirs, int8 [rows, columns], where symbols are under a dither; else [0, 0].
        rows: classes, uint8 [rows].
        columns: classes, uint8 [columns].
        num_symbols: all are below.
    """
    contexts = (rows[:, None].to(torch.int64) + columns).clamp_(max=CONTEXTS - 1)
    num_contexts = CONTEXTS
    if len(offsets):
        symbols = folded(torch.where(offsets < 0, q, -q).to(torch.int64))
        contexts += (offsets ^ (offsets >> 7)).to(torch.int64) * CONTEXTS
        num_contexts *= _SIZES
    else:
        symbols = q.abs().clamp_(max=ans.ESCAPE).to(torch.int64)
    places = (contexts * num_symbols + symbols).reshape(-1)
    counts = torch.bincount(places, minlength=num_contexts * num_symbols)
    of_device: NDArray[np.int64] = to_host(counts).numpy()
    return of_device.reshape(num_contexts, num_symbols)


@tallied.on("cpu")
def _tallied_on_cpu(
    q: Tensor, offsets: Tensor, rows: Tensor, columns: Tensor, num_symbols: int
) -> NDArray[np.int64]:
    values, by, of_rows, of_columns = (x.numpy() for x in (q, offsets, rows, columns))

    def of_slice(part: slice) -> NDArray[Any]:
        if len(by):
            return tally(values[part], by[part], of_rows[part], of_columns, CONTEXTS, num_symbols)
        return ans.tally(values[part], of_rows[part], of_columns[None], CONTEXTS, num_symbols - 1)

    counts: NDArray[np.int64]
    counts = np.stack(each(of_slice, slices_of(*values.shape))).sum(0, dtype=np.int64)
    return counts


def folded(d: Tensor) -> Tensor:
    """As `ans.folded`, of int64."""
    return 2 * d.abs() - (d < 0).to(torch.int64)


@compiled
def tally(
    q: NDArray[Any],
    offsets: NDArray[Any],
    rows: NDArray[Any],
    columns: NDArray[Any],
    num_contexts: int,
    num_symbols: int,
) -> NDArray[Any]:
    """Occurrences of each symbol under a dither: int32 [sizes * contexts, symbols].

    Args:
        q: integers, int16 [rows, columns].
        offsets: theirs, int8 [rows, columns].
        rows: classes, uint8 [rows].
        columns: classes, uint8 [columns].
        num_contexts: of offsets of a size.
        num_symbols: all are below.
    """
    num_rows, num_columns = q.shape
    stride, of_class = num_contexts * num_symbols, -1
    counts = np.zeros((2, _SIZES * stride), np.int32)  # two, by turns, as in `ans.tally`
    bases, places = np.zeros(num_columns, np.int32), np.zeros(num_columns, np.int32)
    for i in range(num_rows):
        if rows[i] != of_class:
            of_class = _int64(rows[i])
            for j in range(num_columns):
                context = min(of_class + _int64(columns[j]), num_contexts - 1)
                bases[j] = context * num_symbols
        for j in range(num_columns):
            offset, value = _int32(offsets[i, j]), _int32(q[i, j])
            away = value if offset < 0 else -value
            size = offset ^ (offset >> 7)
            places[j] = bases[j] + size * stride + 2 * abs(away) - (away < 0)
        for j in range(num_columns):
            counts[j & 1, places[j]] += 1
    both: NDArray[Any] = counts[0] + counts[1]
    return both.reshape(_SIZES * num_contexts, num_symbols)
