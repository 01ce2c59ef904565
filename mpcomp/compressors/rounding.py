"""Vectors rounded to whole numbers of their units, and back.

    y = x / u - m,    q = round(y + v),    x^ = u (q + m - v)

with a unit u of each vector, means m of the channels and a dither v of each element
(`mpcomp.compressors.ecsq`). On a CPU each of these is one compiled pass over memory: a tensor in
between takes longer to be given its pages than to be computed. On other devices they are torch's
operations, of the same bits; only sums (`norms_of`, `sums_of`) may differ in their last ones.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.core.compiled import compiled
from mpcomp.core.kernels import kernel
from mpcomp.core.threads import each, slices_of
from mpcomp.core.transfer import to_host

__all__ = ["Grid", "means_of", "norms_of", "parts_of", "restored", "rounded"]

_LANES: Final = 8  # sums of a row that do not wait for each other
_LARGEST: Final = float(torch.finfo(torch.float32).max)
# For a type checker, which knows no arithmetic of numpy's own numbers.
_float32: Any = np.float32
_float64: Any = np.float64
_Array: TypeAlias = NDArray[Any]


class Grid(NamedTuple):
    """Places of whole numbers: number q of a vector lies at u (q + m).

    Attributes:
        units: u of each vector, fp32 [T, 1], or of all [1, 1]; zero of those that become zero.
        means: m of each channel, fp32 [C]; None for zero.
        centred: one for vectors that have means and zero for others, fp32 [T, 1], or of all [1, 1].
    """

    units: Tensor
    means: Tensor | None
    centred: Tensor


@kernel
def norms_of(vectors: Tensor) -> NDArray[np.float64]:
    """Euclidean norms of vectors, fp32 [T, C], in fp64, where no square overflows: [T]."""
    on_device = torch.linalg.vector_norm(vectors.nan_to_num(), dim=1, dtype=torch.float64)
    of_device: NDArray[np.float64] = to_host(on_device).numpy()
    return of_device


@norms_of.on("cpu")
def _norms_on_cpu(vectors: Tensor) -> NDArray[np.float64]:
    norms = np.empty(len(vectors))
    x = vectors.numpy()
    each(lambda rows: fill_norms(x[rows], norms[rows]), slices_of(*x.shape))
    return norms


def means_of(vectors: Tensor, grid: Grid, num_centred: int) -> NDArray[np.float64]:
    """Means over x / u of vectors that are centred; zero if none is: fp64 [C], finite.

    Args:
        vectors: x, fp32 [T, C].
        grid: its means do not count.
        num_centred: vectors that are, which an accelerator would have to be asked for.
    """
    return sums_of(vectors, grid) / max(1, num_centred)


@kernel
def sums_of(vectors: Tensor, grid: Grid) -> NDArray[np.float64]:
    """Sums over x / u of vectors that are centred: fp64 [C]; arguments as of `means_of`."""
    y = vectors.nan_to_num().to(torch.float64) / _positive(grid.units) * grid.centred
    sums: NDArray[np.float64] = to_host(y.sum(0)).numpy()
    return sums


@sums_of.on("cpu")
def _sums_on_cpu(vectors: Tensor, grid: Grid) -> NDArray[np.float64]:
    arrays = _Arrays.of(vectors, grid, None)

    def added_up_of(rows: slice) -> NDArray[np.float64]:
        some = arrays.some(rows)
        return added_up(some.elements, some.units, some.centred)

    of_slices = each(added_up_of, slices_of(*vectors.shape))
    return sum(of_slices, start=np.zeros(vectors.shape[1]))


@kernel
def rounded(
    vectors: Tensor, grid: Grid, dither: Tensor | None, dead_zone: float, limit: int
) -> Tensor:
    """q of vectors x, fp32 [T, C]: int16 [T, C].

    Args:
        vectors: x; what is no number counts as zero.
        grid: of these.
        dither: v, fp32 [T, C]; None for zero.
        dead_zone: smallest |y| that is not rounded to zero, without a dither.
        limit: larger magnitudes are clipped.
    """
    y = vectors.nan_to_num() / _positive(grid.units)
    if grid.means is not None:
        y -= grid.centred * grid.means
    if dither is not None:
        y.add_(dither).round_()
    elif dead_zone == 0.5:
        y.round_()
    else:
        y = torch.copysign(y.abs().add_(1 - dead_zone).floor_(), y)
    return y.clamp_(-limit, limit).to(torch.int16)


@rounded.on("cpu")
def _rounded_on_cpu(
    vectors: Tensor, grid: Grid, dither: Tensor | None, dead_zone: float, limit: int
) -> Tensor:
    q = np.empty(vectors.shape, np.int16)
    arrays = _Arrays.of(vectors, grid, dither)
    each(
        lambda rows: fill_rounded(*arrays.some(rows), dead_zone, limit, q[rows]),
        slices_of(*q.shape),
    )
    return torch.from_numpy(q)


@kernel
def restored(q: Tensor, grid: Grid, dither: Tensor | None, limit: float) -> Tensor:
    """x^ of whole numbers, int16 [T, C]: fp32 [T, C].

    Args:
        q: of `rounded`.
        grid: likewise.
        dither: likewise.
        limit: larger magnitudes are clipped.
    """
    y = q.to(torch.float32)
    if grid.means is not None:
        y += grid.centred * grid.means
    if dither is not None:
        y -= dither
    return y.mul_(grid.units).clamp_(-limit, limit)


@restored.on("cpu")
def _restored_on_cpu(q: Tensor, grid: Grid, dither: Tensor | None, limit: float) -> Tensor:
    x = np.empty(q.shape, np.float32)
    arrays = _Arrays.of(q, grid, dither)
    each(
        lambda rows: fill_restored(*arrays.some(rows), limit, x[rows]),
        slices_of(*x.shape),
    )
    return torch.from_numpy(x)


@kernel
def parts_of(dither: Tensor, num: int) -> Tensor:
    """floor(num v) of a dither v, fp32 in [-1/2, 1/2): int8 of the same shape, there too."""
    return (dither * num).floor_().to(torch.int8)


@parts_of.on("cpu")
def _parts_on_cpu(dither: Tensor, num: int) -> Tensor:
    parts = np.empty(dither.shape, np.int8)
    v = dither.numpy()
    each(lambda rows: fill_parts(v[rows], num, parts[rows]), slices_of(*v.shape))
    return torch.from_numpy(parts)


def _positive(units: Tensor) -> Tensor:
    """Units, of which none is zero: by infinite ones all becomes zero."""
    return torch.where(units > 0, units, torch.inf)


class _Arrays(NamedTuple):
    """Arguments of loops: elements, a `Grid` with zeros for no means, and a dither or no rows."""

    elements: _Array
    units: _Array
    means: _Array
    centred: _Array
    dither: _Array

    @classmethod
    def of(cls, elements: Tensor, grid: Grid, dither: Tensor | None) -> _Arrays:
        """The arrays of tensors."""
        width = elements.shape[1]
        means = np.zeros(width, np.float32) if grid.means is None else grid.means.numpy()
        given = np.empty((0, width), np.float32) if dither is None else dither.numpy()
        return cls(elements.numpy(), grid.units.numpy(), means, grid.centred.numpy(), given)

    def some(self, rows: slice) -> _Arrays:
        """The arguments for some of the rows."""
        units, centred, dither = (
            each_row[rows] if len(each_row) > 1 else each_row
            for each_row in (self.units, self.centred, self.dither)
        )
        return _Arrays(self.elements[rows], units, self.means, centred, dither)


@compiled
def finite(value: Any) -> Any:
    """The number as ``torch.nan_to_num`` has it."""
    there = value if value == value else _float32(0)
    return min(max(there, _float32(-_LARGEST)), _float32(_LARGEST))


@compiled
def fill_norms(vectors: _Array, norms: _Array) -> None:
    """See `norms_of`.

    Args:
        vectors: fp32 [T, C].
        norms: takes them, fp64 [T].
    """
    num_columns = vectors.shape[1]
    whole = num_columns - num_columns % _LANES
    sums = np.zeros(_LANES)
    for i in range(len(vectors)):
        sums[:] = 0
        for j in range(0, whole, _LANES):
            for lane in range(_LANES):
                value = _float64(finite(vectors[i, j + lane]))
                sums[lane] += value * value
        for j in range(whole, num_columns):
            value = _float64(finite(vectors[i, j]))
            sums[0] += value * value
        norms[i] = np.sqrt(sums.sum())


@compiled
def added_up(vectors: _Array, units: _Array, centred: _Array) -> _Array:
    """Sums over x / u of vectors that are centred.

    Args:
        vectors: x, fp32 [T, C].
        units: as of `Grid`.
        centred: likewise.

    Returns:
        Sums of the channels, fp64 [C].
    """
    sums = np.zeros(vectors.shape[1])
    for i in range(len(vectors)):
        unit = units[min(i, len(units) - 1), 0]
        if unit > 0 and centred[min(i, len(centred) - 1), 0] > 0:
            times = 1 / _float64(unit)
            for j in range(vectors.shape[1]):
                sums[j] += _float64(finite(vectors[i, j])) * times
    return sums


@compiled
def fill_rounded(
    vectors: _Array,
    units: _Array,
    means: _Array,
    centred: _Array,
    dither: _Array,
    dead_zone: float,
    limit: int,
    q: _Array,
) -> None:
    """See `rounded`.

    Args:
        vectors: x, fp32 [T, C].
        units: as of `Grid`.
        means: likewise, fp32 [C].
        centred: likewise.
        dither: fp32 [T, C], or [0, C] for none.
        dead_zone: smallest |y| that is not rounded to zero, without a dither.
        limit: of magnitudes.
        q: takes the whole numbers, int16 [T, C].
    """
    up, largest = _float32(1 - dead_zone), _float32(limit)
    for i in range(len(vectors)):
        unit = units[min(i, len(units) - 1), 0]
        if not unit > 0:
            unit = _float32(np.inf)
        share = centred[min(i, len(centred) - 1), 0]
        if len(dither) > 0:
            for j in range(vectors.shape[1]):
                y = finite(vectors[i, j]) / unit - share * means[j]
                q[i, j] = np.int16(min(max(np.rint(y + dither[i, j]), -largest), largest))
        elif dead_zone == 0.5:
            for j in range(vectors.shape[1]):
                y = finite(vectors[i, j]) / unit - share * means[j]
                q[i, j] = np.int16(min(max(np.rint(y), -largest), largest))
        else:
            for j in range(vectors.shape[1]):
                y = finite(vectors[i, j]) / unit - share * means[j]
                size = min(np.floor(abs(y) + up), largest)
                q[i, j] = np.int16(-size if y < 0 else size)


@compiled
def fill_restored(
    q: _Array,
    units: _Array,
    means: _Array,
    centred: _Array,
    dither: _Array,
    limit: float,
    x: _Array,
) -> None:
    """See `restored`.

    Args:
        q: whole numbers, int16 [T, C].
        units: as of `fill_rounded`, and so are those that follow.
        means: likewise.
        centred: likewise.
        dither: likewise.
        limit: of magnitudes.
        x: takes the elements, fp32 [T, C].
    """
    largest = _float32(limit)
    for i in range(len(q)):
        unit = units[min(i, len(units) - 1), 0]
        share = centred[min(i, len(centred) - 1), 0]
        if len(dither) > 0:
            for j in range(q.shape[1]):
                y = _float32(q[i, j]) + share * means[j] - dither[i, j]
                x[i, j] = min(max(y * unit, -largest), largest)
        else:
            for j in range(q.shape[1]):
                y = _float32(q[i, j]) + share * means[j]
                x[i, j] = min(max(y * unit, -largest), largest)


@compiled
def fill_parts(dither: _Array, num: int, parts: _Array) -> None:
    """See `parts_of`.

    Args:
        dither: fp32 [T, C].
        num: of a step.
        parts: takes them, int8 [T, C].
    """
    for i in range(len(dither)):
        for j in range(dither.shape[1]):
            parts[i, j] = np.int8(np.floor(dither[i, j] * _float32(num)))
