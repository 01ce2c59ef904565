"""Tables of frequencies for an entropy coder, each a byte or two where it follows a curve.

A table is the number of a curve,

    -log2 p(k) = c k^e + constant,    c = 2^(i/4),    e = 1 (Laplace), 3/2, 2 (Gauss),

or, where that takes less with what it codes, -log2 of each symbol's frequency. Both are in eighths
of a bit, one byte each, from which both ends make the same integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpcomp.compressors import ans

__all__ = ["ALIKE", "Table", "starts_of"]

_ABSENT = 255  # the cost of a symbol that does not occur
# Weight of a frequency 2^(-cost / 8); rounded, as powers differ by machine in their last bits.
_WEIGHTS = np.array([max(1, round(2 ** (24 - cost / 8))) for cost in range(256)], np.int64)
# Curves, from nearly flat ones up to c = 8 bits: c in eighths of a bit, in quarters of an octave.
_MANTISSAS = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429])
_FLATTEST, _STEEPEST = (-6, -9, -13), 6  # octaves of c, the first ones for e = 1, 3/2, 2


def _curves() -> NDArray[np.uint8]:
    """Costs of magnitudes 0 to 255 by each curve, [curves, 256]; rounded, but alike everywhere."""
    k = np.arange(256, dtype=np.float64)
    powers = (k, k * np.sqrt(k), k * k)
    slopes = [
        (power, np.ldexp(mantissa, octave))
        for power, flattest in zip(powers, _FLATTEST, strict=True)
        for octave in range(flattest, _STEEPEST)
        for mantissa in _MANTISSAS
    ]
    curves = [np.minimum(np.rint(slope * power), _ABSENT - 1) for power, slope in slopes]
    return np.stack(curves).astype(np.uint8)


_CURVES = _curves()
# Bits of each frequency but for what all have in common, and that; [256, curves].
_CURVE_BITS = np.log2(_WEIGHTS[_CURVES]).T.copy()
_CURVE_TOTALS = np.log2(_WEIGHTS[_CURVES].cumsum(1)).T.copy()
_EXPLICIT = len(_CURVES)  # the number of no curve


@dataclass(frozen=True)
class Table:
    """Frequencies of symbols, as they are sent.

    Attributes:
        curve: number of the curve that they follow, or `_EXPLICIT`.
        first: the smallest symbol that occurs; 0 of a curve.
        costs: -log2 of the frequencies from there to the largest one, in eighths of a bit, of a
            curve less a constant.
        num_bytes: of the symbols that it was made of and of itself, nearly; 0 of one that was read.
    """

    curve: int
    first: int
    costs: NDArray[np.uint8]
    num_bytes: float = 0.0

    @classmethod
    def of_each(cls, counts: NDArray[np.int64]) -> list[Table]:
        """The table of each stream that takes the fewest bytes with its symbols.

        Args:
            counts: how often each symbol occurs, [streams, symbols].
        """
        there = counts > 0
        first = there.argmax(1)
        last = counts.shape[1] - 1 - there[:, ::-1].argmax(1)
        num_symbols = counts.sum(1)
        bits = num_symbols[:, None] * _CURVE_TOTALS[last]
        # Not "@", which goes to BLAS, whose threads are in the way of torch's.
        bits -= np.einsum("sk,kc->sc", counts.astype(np.float64), _CURVE_BITS[: counts.shape[1]])
        curve = bits.argmin(1)
        by_curve = 2 + bits.min(1) / 8
        with np.errstate(divide="ignore"):
            exact = np.rint(-8 * np.log2(counts / num_symbols[:, None]))
        costs = np.where(there, np.minimum(exact, _ABSENT - 1), _ABSENT).astype(np.uint8)
        explicit = 4 + last - first + (counts * costs).sum(1) / 64
        return [
            cls(c, 0, _CURVES[c, : end + 1], by)
            if by < exactly
            else cls(_EXPLICIT, start, own[start : end + 1], exactly)
            for c, start, end, own, by, exactly in zip(
                curve.tolist(),
                first.tolist(),
                last.tolist(),
                costs,
                by_curve.tolist(),
                explicit.tolist(),
                strict=True,
            )
        ]

    @classmethod
    def read(cls, take: Callable[[int], NDArray[np.uint8]]) -> Table:
        """Inverse of `to_bytes`.

        Args:
            take: gives the next bytes, so many.

        Raises:
            ValueError: they are no table.
        """
        curve, first = map(int, take(2))
        if curve < _EXPLICIT:  # the second byte is the last symbol
            return cls(curve, 0, _CURVES[curve, : first + 1])
        (others,) = map(int, take(1))
        if curve != _EXPLICIT or first + others > ans.ESCAPE:
            raise ValueError(f"table {curve} with symbols up to {first + others}")
        return cls(curve, first, take(others + 1))

    def to_bytes(self) -> bytes:
        """Number of the curve, its last symbol; or first symbol, number of others, costs."""
        if self.curve != _EXPLICIT:
            return bytes([self.curve, len(self.costs) - 1])
        return bytes([_EXPLICIT, self.first, len(self.costs) - 1]) + self.costs.tobytes()


def starts_of(tables: Sequence[Table]) -> NDArray[np.int64]:
    """Sums of the frequencies of each table before every symbol and behind the last.

    Returns:
        [tables, symbols + 1]; what a table does not have is of frequency zero.
    """
    num_symbols = max(table.first + len(table.costs) for table in tables)
    costs = np.full((len(tables), num_symbols), _ABSENT, np.uint8)
    for row, table in zip(costs, tables, strict=True):
        row[table.first : table.first + len(table.costs)] = table.costs
    there = costs != _ABSENT
    weights = np.where(there, _WEIGHTS[costs], 0)
    sums = np.maximum(weights.sum(1, keepdims=True), 1)  # of a damaged table nothing may be there
    # Each has one at least; what rounding leaves goes to the most frequent.
    left = ans.TOTAL - there.sum(1, keepdims=True)
    frequencies = there + weights * left // sums
    most = frequencies.argmax(1)
    frequencies[np.arange(len(tables)), most] += ans.TOTAL - frequencies.sum(1)
    starts = np.zeros((len(tables), num_symbols + 1), np.int64)
    np.cumsum(frequencies, axis=1, out=starts[:, 1:])
    return starts


#: The table of symbols that all are zero.
ALIKE = Table(0, 0, _CURVES[0, :1], 2.0)
