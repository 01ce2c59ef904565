"""Tables of frequencies for an entropy coder, each a byte or two where it follows a curve.

A table is the number of a curve,

    -log2 p(k) = c k^e + constant,    c = 2^(i/4),    e = 1 (Laplace), 3/2, 2 (Gauss),

or, where that takes less with what it codes, -log2 of each symbol's frequency. Both are in eighths
of a bit, one byte each, from which both ends make the same integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpcomp.core.compiled import compiled
from mpcomp.entropy import ans

__all__ = ["Tables", "all_alike", "costs_from", "shares_of", "starts_of"]

_int64: Any = np.int64  # for a type checker, which knows no bits of numpy's own numbers
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
# Of the least frequency; where symbols may go by themselves, those below a part have none: from
# about there on all others lose more by its frequency than it by having none.
_RARE = 32


@dataclass(frozen=True, eq=False)
class Tables:
    """Frequencies of symbols by table, as they are sent.

    Attributes:
        curves: number of the curve that each follows, or `_EXPLICIT`: int64 [tables].
        costs: -log2 of frequencies in eighths of a bit, of a curve less a constant, `_ABSENT` of
            symbols that a table does not have: uint8 [tables, symbols].
        sizes: bytes of the symbols that each was made of and of itself, nearly: float64 [tables].
    """

    curves: NDArray[np.int64]
    costs: NDArray[np.uint8]
    sizes: NDArray[np.float64]

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> Tables:
        """The table of each stream that takes the fewest bytes with its symbols.

        Args:
            counts: how often each symbol occurs, int64 [streams, symbols]; some do in each.
        """
        return cls(*_fitted(counts, _CURVES, _CURVE_BITS, _CURVE_TOTALS))

    @property
    def num_bytes(self) -> float:
        """Of symbols and tables, nearly."""
        return float(self.sizes.sum())

    def __getitem__(self, some: slice) -> Tables:
        return Tables(self.curves[some], self.costs[some], self.sizes[some])

    def __len__(self) -> int:
        return len(self.curves)

    def to_bytes(self) -> bytes:
        """Number of the curve, its last symbol; or first symbol, number of others, costs."""
        written: bytes = _written(self.curves, self.costs).tobytes()
        return written


def costs_from(data: NDArray[np.uint8], at: int, count: int) -> tuple[NDArray[np.uint8], int]:
    """The costs of tables that were sent, as of `Tables`.

    Args:
        data: of a message.
        at: where they begin.
        count: of tables.

    Returns:
        uint8 [tables, symbols], and where they end.

    Raises:
        ValueError: they are no tables.
    """
    costs, at, num_symbols = _read(data, at, _CURVES, np.full((count, 256), _ABSENT, np.uint8))
    if not num_symbols:
        raise ValueError("a table that ends too early, or is none")
    return np.ascontiguousarray(costs[:, :num_symbols]), at


def all_alike(costs: NDArray[np.uint8]) -> bool:
    """Whether each table has a single symbol; costs as of `Tables`."""
    return bool(((costs != _ABSENT).sum(1) <= 1).all())


def starts_of(costs: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Sums of the frequencies of each table before every symbol and behind the last.

    Args:
        costs: as of `Tables`.

    Returns:
        [tables, symbols + 1]; what a table does not have is of frequency zero.
    """
    return _summed(costs, _WEIGHTS, ans.TOTAL)


def shares_of(costs: NDArray[np.uint8], total: int, largest: int) -> NDArray[np.int64]:
    """Frequencies of each table where symbols may have none, as they may go by themselves.

    Args:
        costs: as of `Tables`.
        total: of a table's frequencies.
        largest: symbols above it have none, and neither have rare ones.

    Returns:
        [tables, symbols].
    """
    costs = costs.copy()
    costs[:, largest + 1 :] = _ABSENT
    weights = np.where(costs == _ABSENT, 0, _WEIGHTS[costs])
    costs[weights * (total * _RARE) < weights.sum(1, keepdims=True)] = _ABSENT
    return np.diff(_summed(costs, _WEIGHTS, total))


@compiled
def _read(
    data: NDArray[Any], at: int, curves: NDArray[Any], costs: NDArray[Any]
) -> tuple[NDArray[Any], int, int]:
    """See `costs_from`.

    Args:
        data: of a message.
        at: where its tables begin.
        curves: `_CURVES`.
        costs: of each, uint8 [tables, symbols]; they change.

    Returns:
        Costs, where tables end, and the number of symbols that any has; zero of damaged ones.
    """
    num_symbols, end = 0, len(data)
    for table in range(len(costs)):
        if at + 2 > end:
            return costs, at, 0
        curve, first = _int64(data[at]), _int64(data[at + 1])
        at += 2
        if curve < len(curves):  # the second byte is the last symbol
            last = first
            costs[table, : last + 1] = curves[curve, : last + 1]
        else:
            if curve > len(curves) or at == end:
                return costs, at, 0
            last = first + _int64(data[at])
            start, at = at + 1, at + 2 + last - first
            if last >= costs.shape[1] or at > end:
                return costs, at, 0
            costs[table, first : last + 1] = data[start:at]
        num_symbols = max(num_symbols, last + 1)
    return costs, at, num_symbols


@compiled
def _fitted(
    counts: NDArray[Any],
    curves: NDArray[Any],
    curve_bits: NDArray[Any],
    curve_totals: NDArray[Any],
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The parts of `Tables`: for each stream its best curve, or costs of its own.

    Args:
        counts: how often each symbol occurs, int64 [streams, symbols].
        curves: `_CURVES`.
        curve_bits: `_CURVE_BITS`.
        curve_totals: `_CURVE_TOTALS`.
    """
    num_streams, num_symbols = counts.shape
    chosen, sizes = np.full(num_streams, len(curves), np.int64), np.zeros(num_streams)
    costs = np.full((num_streams, num_symbols), _ABSENT, np.uint8)
    for stream in range(num_streams):
        of_stream = counts[stream]
        total = of_stream.sum()
        there = np.flatnonzero(of_stream)
        first, last = there[0], there[-1]
        bits = total * curve_totals[last]
        own_bits = 0.0
        for symbol in there:
            count = of_stream[symbol]
            bits -= count * curve_bits[symbol]
            cost = min(np.rint(-8 * np.log2(count / total)), _ABSENT - 1)
            costs[stream, symbol] = np.uint8(cost)
            own_bits += count * cost / 8
        by_curve = 2 + bits.min() / 8
        sizes[stream] = 4 + last - first + own_bits / 8
        if by_curve < sizes[stream]:
            chosen[stream], sizes[stream] = bits.argmin(), by_curve
            costs[stream, : last + 1] = curves[chosen[stream], : last + 1]
    return chosen, costs, sizes


@compiled
def _written(curves: NDArray[Any], costs: NDArray[Any]) -> NDArray[Any]:
    """The bytes of `Tables`, uint8 [n]."""
    written = np.empty(len(costs) * (3 + costs.shape[1]), np.uint8)
    at = 0
    for table in range(len(costs)):
        first, last = -1, 0
        for symbol in range(costs.shape[1]):
            if costs[table, symbol] != _ABSENT:
                first, last = symbol if first < 0 else first, symbol
        written[at] = curves[table]
        if curves[table] < _EXPLICIT:
            written[at + 1] = last
            at += 2
        else:
            written[at + 1], written[at + 2] = first, last - first
            written[at + 3 : at + 4 + last - first] = costs[table, first : last + 1]
            at += 4 + last - first
    return written[:at]


@compiled
def _summed(costs: NDArray[Any], weights: NDArray[Any], total: int) -> NDArray[Any]:
    """See `starts_of`.

    Args:
        costs: of symbols, uint8 [tables, symbols].
        weights: `_WEIGHTS`.
        total: of a table's frequencies. (No constant: of another module's, what is compiled would
            not follow a change.)
    """
    num_tables, num_symbols = costs.shape
    starts = np.zeros((num_tables, num_symbols + 1), np.int64)
    for table in range(num_tables):
        sum_of_weights = num_there = 0
        for cost in costs[table]:
            if cost != _ABSENT:
                sum_of_weights += weights[cost]
                num_there += 1
        # Each has one at least; what rounding leaves goes to the most frequent, the first of them.
        left, most = total, 0
        of_table = starts[table, 1:]
        for symbol in range(num_symbols):
            cost = costs[table, symbol]
            if cost != _ABSENT:
                share = weights[cost] * (total - num_there) // sum_of_weights
                of_table[symbol] = 1 + share
                left -= of_table[symbol]
                if of_table[symbol] > of_table[most]:
                    most = symbol
        of_table[most] += left  # of a damaged table without symbols, all
        for symbol in range(1, num_symbols):
            of_table[symbol] += of_table[symbol - 1]
    return starts
