"""Lloyd-Max quantization to 1-8 bits: the best code book there is for Gaussian elements.

The code book is fixed, c_1 < ... < c_n, n = 2^b, the fixed point of

    c_i = E[z | m_(i-1) < z <= m_i],    m_i = (c_i + c_(i+1)) / 2,    z ~ N(0, 1)

(Lloyd 1982; Max 1960). An element goes to the centroid that is nearest to x / rms of its group, and
arrives as that times the group's scale.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors import bits as bitpack
from mpcomp.compressors.base import Compressor
from mpcomp.compressors.groups import Grouping, divisor, largest_of, scale_dtype
from mpcomp.compressors.quantize import bit_ladder, bits_of
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["LloydMax", "gaussian_centroids"]

_NORMAL = statistics.NormalDist()
_LLOYD_STEPS, _MOST_STEPS = 5, 50  # ten do
# Code books are rounded to multiples of this, so that machines whose exp and erf differ in the last
# bit have the same; it adds 1e-10 to the error.
_GRAIN = 2.0**-16
# Cells of the table that finds a centroid: enough to part the midpoints of 8 bits, which lie
# 0.017 apart at the least and within 4.
_CELLS, _REACH = 1024, 4.5
# Scales are at the most so much over the largest centroid: what arrives stays finite.
_LIMIT = torch.finfo(torch.float32).max / 4


@dataclass(frozen=True)
class LloydMax(Compressor):
    """Nearest of 2^b Gaussian centroids, times a scale. Spec ``lloyd:3``, ``lloyd:2:scale=128``.

    With c the centroids [n] nearest to the elements of x / rms(x) of a group, x^ = s c, where

        s = <x, c> / <c, c>,    so    ||x - x^||^2 = ||x||^2 - <x, c>^2 / ||c||^2.

    This is the scale of least squares, as in DRIVE where it need not be unbiased (Vargaftik et al.,
    NeurIPS 2021). For Gaussian elements it is the rms to within their number's noise; for any
    others it is at least as good, and it makes this a contraction for every x: the scale's rounding
    to bf16, by a factor 1 + d, adds ``d^2 <x, c>^2 / ||c||^2``, and ``|d| < 1``.

    Relative squared errors of Gaussian elements at 1 to 4 bits: 0.363, 0.117, 0.0345, 0.0095
    (Max, IRE Trans. Inf. Theory 1960, table I). Elements with other distributions are made nearly
    Gaussian by `Rotate`; together they are TurboQuant's (Zandieh et al., arXiv 2504.19874). No
    centroid is zero, so the zeros of a ReLU do not stay zeros.

    * Source: Max, IRE Trans. Inf. Theory 1960; the scale of DRIVE (Vargaftik et al., NeurIPS 2021).
    * Theory: a contraction for every x, and biased: for `ErrorFeedback` and `EF21`.

    Args:
        bits: 1 to 8.
        scale: what shares a scale: "token" (a row of the innermost dimension in memory), "tensor",
            "sample", "channel" or a number of consecutive elements, as for `Quantize`.

    Scales are fp32 for a tensor, bf16 (fp32's range) for all that is finer.

    Raises:
        ValueError: a setting outside those.
    """

    bits: int
    scale: str | int = "token"
    spec: ClassVar[str] = "lloyd"
    draws = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits}: LloydMax packs 1 to 8 bits; for 16 use Cast")
        Grouping.check(self.scale)

    def with_cf(self, cf: float) -> LloydMax:
        """The same with floor(32 / cf) bits, 1 to 8: fp32 shrinks at least so far, if it can."""
        return dataclasses.replace(self, bits=bits_of(cf, 1))

    def cf_ladder(self, lowest: float, highest: float) -> tuple[float, ...]:
        return bit_ladder(lowest, highest)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        grouping = Grouping.of(meta, self.scale)
        packed = bitpack.packed_bytes(grouping.row_numel, self.bits)
        return (
            TensorMeta((grouping.num_groups,), scale_dtype(self.scale)),
            TensorMeta((grouping.num_rows, packed), torch.uint8),
        )

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        grouping = Grouping.of(TensorMeta.of(x), self.scale)
        groups = grouping.split(x)
        book = _book(self.bits, groups.device)
        # By the largest magnitude first: squares may overflow or vanish.
        unit = divisor(largest_of(groups))
        y = grouping.clear_padding(groups / unit[:, None])
        rms = (y.square().sum(dim=1) / grouping.counts(y.device)).sqrt()
        codes = book.nearest(y / divisor(rms)[:, None])
        c = grouping.clear_padding(book.centroids.index_select(0, codes.reshape(-1)).view_as(y))
        fit = (y * c).sum(dim=1) / divisor(c.square().sum(dim=1))
        # Below the best scale the error only grows towards that of sending nothing.
        scales = (fit * unit).clamp(max=_LIMIT / book.largest).to(scale_dtype(self.scale))
        return (scales, bitpack.pack(grouping.rows(codes.to(torch.uint8)), self.bits))

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        scales, packed = payload
        grouping = Grouping.of(meta, self.scale)
        codes = grouping.groups(bitpack.unpack(packed, self.bits, grouping.row_numel))
        centroids = _book(self.bits, packed.device).centroids
        x = centroids.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
        x.mul_(scales.to(torch.float32)[:, None])
        limit = min(torch.finfo(meta.dtype).max, torch.finfo(torch.float32).max)
        return grouping.join(x.clamp_(-limit, limit).to(meta.dtype))


@functools.cache
def gaussian_centroids(bits: int) -> tuple[float, ...]:
    """The 2^bits Lloyd-Max centroids of the standard normal distribution, ascending.

    Those above zero solve c_i P_i = phi(m_(i-1)) - phi(m_i), with P_i the probability of cell i,
    m_0 = 0 and the last edge infinite. A few steps of Lloyd's iteration, which would need tens
    of thousands at 8 bits, come near enough for Newton's method; its Jacobian is tridiagonal. All
    in fp64; exact to 1e-10.

    Args:
        bits: 1 to 8.
    """
    half = 1 << (bits - 1)
    # The cells of least error are asymptotically spread as phi^(1/3): a Gaussian again.
    spread = statistics.NormalDist(0.0, math.sqrt(3.0))
    c = [spread.inv_cdf(0.5 + (i + 0.5) / (2 * half)) for i in range(half)]
    for iteration in range(_MOST_STEPS):
        edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(c))]
        density = [*map(_NORMAL.pdf, edges), 0.0]
        above = [*(_NORMAL.cdf(-m) for m in edges), 0.0]  # of the tail: no difference near 1
        mass = [above[i] - above[i + 1] for i in range(half)]
        residual = [c[i] * mass[i] - density[i] + density[i + 1] for i in range(half)]
        if iteration < _LLOYD_STEPS:
            step = [r / p for r, p in zip(residual, mass, strict=True)]
        else:
            # By its edge m the residual changes at (c - m) phi(m), and by half of that for each
            # of the two centroids that the edge lies between.
            upper = [(c[i] - edges[i + 1]) * density[i + 1] / 2 for i in range(half - 1)] + [0.0]
            lower = [0.0] + [(edges[i] - c[i]) * density[i] / 2 for i in range(1, half)]
            diagonal = [mass[i] + upper[i] + lower[i] for i in range(half)]
            step = _solve_tridiagonal(lower, diagonal, upper, residual)
        c = [value - change for value, change in zip(c, step, strict=True)]
        if iteration >= _LLOYD_STEPS and max(map(abs, step)) < 1e-9:  # squared by the next
            return (*(-value for value in reversed(c)), *c)
    raise AssertionError(f"no {bits}-bit code book after {_MOST_STEPS} steps")


def _solve_tridiagonal(
    lower: list[float], diagonal: list[float], upper: list[float], right: list[float]
) -> list[float]:
    """x of A x = right, where row i of A is lower[i], diagonal[i], upper[i]: elimination."""
    diagonal, x = list(diagonal), list(right)
    for i in range(1, len(x)):
        factor = lower[i] / diagonal[i - 1]
        diagonal[i] -= factor * upper[i - 1]
        x[i] -= factor * x[i - 1]
    for i in reversed(range(len(x))):
        after = upper[i] * x[i + 1] if i + 1 < len(x) else 0.0
        x[i] = (x[i] - after) / diagonal[i]
    return x


@dataclass(frozen=True)
class _Book:
    """A code book on a device, and a table that finds the nearest centroid in it.

    Attributes:
        centroids: fp32 [n], ascending.
        midpoints: fp32 [n]: between each centroid and the next, then infinity.
        table: int32 [_CELLS]: how many midpoints lie in the cells below each.
        largest: the last centroid.
    """

    centroids: Tensor
    midpoints: Tensor
    table: Tensor
    largest: float

    def nearest(self, z: Tensor) -> Tensor:
        """Index of the centroid nearest to each element, the lower one of two: int32; 0 for NaN.

        Several times as fast as a binary search, and exact: an element's cell leaves two centroids
        to choose from, as no cell has two midpoints, and the one comparison decides.
        """
        codes = self.table.index_select(0, _cells(z).reshape(-1)).view_as(z)
        midpoints = self.midpoints.index_select(0, codes.reshape(-1)).view_as(z)
        return codes.add_(z > midpoints)


@functools.lru_cache(64)
def _book(bits: int, device: torch.device) -> _Book:
    exact = torch.tensor(gaussian_centroids(bits), dtype=torch.float64)
    centroids = (exact / _GRAIN).round().mul(_GRAIN).to(torch.float32)
    midpoints = (centroids[1:] + centroids[:-1]) / 2
    at = _cells(midpoints)
    assert bool((at.diff() > 0).all()), "two midpoints in one cell: more cells are needed"
    # Cells do not descend with their elements, so a midpoint of a lower cell is below an element.
    table = torch.searchsorted(at, torch.arange(_CELLS, dtype=torch.int32), out_int32=True)
    return _Book(
        centroids.to(device),
        torch.nn.functional.pad(midpoints, (0, 1), value=torch.inf).to(device),
        table.to(device),
        float(centroids[-1]),
    )


def _cells(z: Tensor) -> Tensor:
    """The cell of each element, of _CELLS equal ones from -_REACH to _REACH: int32."""
    position = (z * (_CELLS / (2 * _REACH))).add_(_CELLS / 2).clamp_(0, _CELLS - 1)
    # NaN (a group that is not finite) must not reach the integer cast undefined.
    return position.nan_to_num_(nan=0.0).to(torch.int32)
