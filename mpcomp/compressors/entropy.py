"""Entropy coding of small integers [rows, columns], of which most are zero or near it.

Magnitudes go through an asymmetric numeral system (`mpcomp.compressors.ans`), signs as a bit each.
How often which magnitude comes differs by row (a token) and by column (a channel), so each has a
class, and an element is coded by the table of its context:

    log2 E|q_ij|  ~  r_i + c_j,         context_ij = clip(r_i + c_j),    r, c in halves of an octave

Classes and tables are sent: some hundred bytes for a message of any size, which is why a small one
has a single context. A table is the number of a curve,

    -log2 p(k) = c k^e + constant,    c = 2^(i/4),    e = 1 (Laplace), 3/2, 2 (Gauss),

or, where that takes less with what it codes, -log2 of each magnitude's frequency. Both are in
eighths of a bit, one byte each, from which both ends make the same integers. So nothing depends on
how a machine rounds.

    byte     0       1           2         then
             kind    contexts    tables    ANS states, ANS words, large magnitudes, signs

Where no integer is below zero, as behind a ReLU, the kind says so, and no signs are sent. Where
coding would gain nothing (noise of many bits) the integers are sent as int16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpcomp.compressors import ans
from mpcomp.compressors.ans import ESCAPE

__all__ = ["LARGEST", "decode", "encode", "max_bytes"]

#: Magnitudes are at most this.
LARGEST = 2**15 - 1

# 1 to 3 were by coders of before, which no longer are understood.
_PLAIN, _SIGNED, _UNSIGNED = 0, 4, 5
_ABSENT = 255
# Weight of a frequency 2^(-cost / 8); rounded, as powers differ by machine in their last bits.
_WEIGHTS = np.array([max(1, round(2 ** (24 - cost / 8))) for cost in range(256)], np.int64)
# Curves, from nearly flat ones up to c = 8 bits: c in eighths of a bit, in quarters of an octave.
_MANTISSAS = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429])
_FLATTEST, _STEEPEST = (-6, -9, -13), 6  # octaves of c, the first ones for e = 1, 3/2, 2
_PER_OCTAVE = 2  # classes
_CONTEXTS = 24
# Of rows, and of columns. Were there as many as contexts, one row of zeros would move all others to
# the last context.
_CLASSES = 16
_FEW = 4096  # elements for which tables of several contexts would cost more than they save
_STATES = 4  # of more elements; as many bytes are lost


def max_bytes(rows: int, columns: int) -> int:
    """The most that `encode` takes for integers [rows, columns]."""
    return 1 + 2 * rows * columns


def encode(q: NDArray[np.int16]) -> NDArray[np.uint8]:
    """The coded form of integers [rows, columns], uint8 [n], n <= `max_bytes`.

    Args:
        q: magnitudes up to `LARGEST`.
    """
    q = np.require(q, np.int16, ["C", "W"])  # else there would be machine code for each kind
    parts = _encoded(q) if q.size > 1 else []  # of one, nothing is shorter than itself
    if not parts or sum(map(len, parts)) > max_bytes(*q.shape):
        parts = [bytes([_PLAIN]), q.astype("<i2").tobytes()]
    coded = bytearray().join(parts)  # no bytes, of which an array could not be changed
    return np.frombuffer(coded, np.uint8)


def decode(data: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.int16]:
    """Inverse of `encode`.

    Raises:
        RuntimeError: the data cannot be of such integers. (Of damaged data many are.)
    """
    if not len(data):
        raise RuntimeError("an empty message where coded integers were expected")
    data = np.require(data, np.uint8, ["C", "W"])
    if data[0] == _PLAIN:
        if len(data) != max_bytes(rows, columns):
            raise _damaged(f"{len(data)} bytes, expected {max_bytes(rows, columns)}")
        plain = np.frombuffer(data, "<i2", offset=1).astype(np.int16)
        return np.maximum(plain, -LARGEST).reshape(rows, columns)
    if data[0] not in (_SIGNED, _UNSIGNED):
        raise _damaged(f"kind {data[0]}")
    return _decoded(data, rows, columns)


# -- contexts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contexts:
    """Classes of rows and columns.

    Attributes:
        rows: class of each row, uint8 [rows].
        columns: class of each column, uint8 [columns].
    """

    rows: NDArray[np.uint8]
    columns: NDArray[np.uint8]

    @classmethod
    def single(cls, num_rows: int, num_columns: int) -> _Contexts:
        """Rows and columns that all are alike."""
        return cls(np.zeros(num_rows, np.uint8), np.zeros(num_columns, np.uint8))

    @classmethod
    def of(cls, by_row: NDArray[np.int64], by_column: NDArray[np.int64]) -> _Contexts:
        """The classes of magnitudes, of which some are not zero, by their sums."""
        mean_of_row, mean_of_column = by_row / len(by_column), by_column / len(by_row)
        mean = mean_of_row.mean()
        # What is added keeps a row of zeros near one that has a single one.
        rows = _PER_OCTAVE * np.log2((mean_of_row + 0.25 / len(by_column)) / mean)
        columns = _PER_OCTAVE * np.log2((mean_of_column + 0.25 / len(by_row)) / mean)
        return cls(_classes(rows), _classes(columns))

    @property
    def classes(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Those of rows, and of columns."""
        return self.rows, self.columns

    def occurring(self) -> NDArray[np.intp]:
        """The contexts that have elements, ascending."""
        rows, columns = (np.flatnonzero(np.bincount(each)) for each in (self.rows, self.columns))
        return np.unique(np.minimum(np.add.outer(rows, columns), _CONTEXTS - 1))

    def place(self) -> _Place:
        """Elements, whose tables come behind those of classes."""
        table_of = np.zeros(_CONTEXTS, np.int64)
        occurring = self.occurring()
        table_of[occurring] = 2 + np.arange(len(occurring))
        return _Place(self.rows, self.columns, table_of)


class _Place(NamedTuple):
    """Where symbols are among contexts and tables, as `ans.push` and `ans.pop` take it."""

    rows: NDArray[np.uint8]
    columns: NDArray[np.uint8]
    table_of: NDArray[np.int64]

    @classmethod
    def of_classes(cls, table: int, count: int) -> _Place:
        """A row of classes, which all are coded by one table."""
        return cls(np.zeros(1, np.uint8), np.zeros(count, np.uint8), np.full(1, table, np.int64))


def _classes(octaves: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Whole numbers from 0, the largest for the largest; what is far below counts as alike."""
    rounded = np.rint(octaves)
    largest = int(rounded.max())
    classes = np.maximum(rounded - (largest - _CLASSES + 1), 0)
    from_zero: NDArray[np.uint8] = (classes - classes.min()).astype(np.uint8)
    return from_zero


# -- tables ----------------------------------------------------------------------------------------


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
class _Table:
    """Frequencies of symbols.

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
    def of_each(cls, counts: NDArray[np.int64]) -> list[_Table]:
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

    def to_bytes(self) -> bytes:
        """Number of the curve, its last symbol; or first symbol, number of others, costs."""
        if self.curve != _EXPLICIT:
            return bytes([self.curve, len(self.costs) - 1])
        return bytes([_EXPLICIT, self.first, len(self.costs) - 1]) + self.costs.tobytes()


def _starts(tables: Sequence[_Table]) -> NDArray[np.int64]:
    """Sums of the frequencies of each table before every symbol and behind the last.

    Returns:
        [tables, symbols + 1]; what a table does not have is of frequency zero.

    Raises:
        RuntimeError: a table has no symbol.
    """
    num_symbols = max(table.first + len(table.costs) for table in tables)
    costs = np.full((len(tables), num_symbols), _ABSENT, np.uint8)
    for row, table in zip(costs, tables, strict=True):
        row[table.first : table.first + len(table.costs)] = table.costs
    there = costs != _ABSENT
    weights = np.where(there, _WEIGHTS[costs], 0)
    sums = weights.sum(1, keepdims=True)
    if not sums.all():
        raise _damaged("a table without symbols")
    # Each has one at least; what rounding leaves goes to the most frequent.
    left = ans.TOTAL - there.sum(1, keepdims=True)
    frequencies = there + weights * left // sums
    most = frequencies.argmax(1)
    frequencies[np.arange(len(tables)), most] += ans.TOTAL - frequencies.sum(1)
    starts = np.zeros((len(tables), num_symbols + 1), np.int64)
    np.cumsum(frequencies, axis=1, out=starts[:, 1:])
    return starts


#: The table of symbols that all are zero.
_ALIKE = _Table(0, 0, _CURVES[0, :1], 2.0)


# -- encoding --------------------------------------------------------------------------------------


def _encoded(q: NDArray[np.int16]) -> list[bytes]:
    by_row, by_column, largest, num_signs, num_negative = ans.sums(q)
    signs = np.zeros(num_signs // 8 + 1, np.uint8)
    large = np.empty(num_signs if largest == ESCAPE else 0, np.uint16)
    if q.size < _FEW or not largest:
        contexts = _Contexts.single(*q.shape)
        counts, num_large = ans.tally(q, *contexts.classes, 1, largest, signs, large)
        tables = [_ALIKE, _ALIKE, *_Table.of_each(counts.astype(np.int64))]
    else:
        contexts = _Contexts.of(by_row, by_column)
        counts, num_large = ans.tally(q, *contexts.classes, _CONTEXTS, largest, signs, large)
        one, *tables = _tables_of(contexts, counts)
        # Where little is not zero, its classes may cost more than they tell.
        if one.num_bytes + 2 * _ALIKE.num_bytes <= sum(table.num_bytes for table in tables):
            contexts, tables = _Contexts.single(*q.shape), [_ALIKE, _ALIKE, one]
    states, words = _states_and_words(q, contexts, _starts(tables))
    signs = signs[: -(-num_signs // 8) if num_negative else 0]
    return [
        bytes([_SIGNED if num_negative else _UNSIGNED, len(tables) - 2]),
        *(table.to_bytes() for table in tables),
        states.astype("<u4").tobytes(),
        words.tobytes(),
        large[:num_large].astype("<u2").tobytes(),
        signs[::-1].tobytes(),
    ]


def _num_states(num_elements: int, starts: NDArray[np.int64]) -> int:
    """States for so many elements, one if the tables say all of them."""
    alike = starts[:, 1:] - starts[:, :-1] == ans.TOTAL
    return 1 if num_elements < _FEW or alike.any(1).all() else _STATES


def _tables_of(contexts: _Contexts, counts: NDArray[np.int32]) -> list[_Table]:
    """The table of a single context, those of classes of rows and columns, and of the contexts.

    Args:
        contexts: of integers.
        counts: of each symbol in each context, [`_CONTEXTS`, symbols].
    """
    largest = max(int(each.max()) for each in contexts.classes)
    num_symbols = max(counts.shape[1], largest + 1)
    occurring = contexts.occurring()
    of_each = np.zeros((3 + len(occurring), num_symbols), np.int64)
    of_each[0, : counts.shape[1]] = counts.sum(0)
    of_each[1:3] = [np.bincount(each, minlength=num_symbols) for each in contexts.classes]
    of_each[3:, : counts.shape[1]] = counts[occurring]
    return _Table.of_each(of_each)


def _states_and_words(
    q: NDArray[np.int16], contexts: _Contexts, starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """ANS states that say classes and integers, with the words that follow them."""
    coded = [
        *(
            (classes[None].astype(np.int16), _Place.of_classes(table, len(classes)))
            for table, classes in enumerate(contexts.classes)
        ),
        (q, contexts.place()),
    ]
    out = np.empty(2 * sum(symbols.size for symbols, _ in coded), np.uint8)  # a word each at most
    at = len(out)
    states = np.full(_num_states(q.size, starts), ans.LOWEST, np.int64)
    for symbols, place in reversed(coded):
        at = ans.push(symbols, place.rows, place.columns, place.table_of, starts, states, out, at)
    return states, out[at:]


# -- decoding --------------------------------------------------------------------------------------


class _Reader:
    """A message, read from its beginning behind its kind."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self._at = 1

    def array(self, dtype: str, count: int) -> NDArray[Any]:
        """The next numbers."""
        start, self._at = self._at, self._at + np.dtype(dtype).itemsize * count
        if self._at > len(self._data):
            raise _damaged("it ends too early")
        return np.frombuffer(self._data, dtype, count, start)

    def table(self) -> _Table:
        """The next table."""
        curve, first = map(int, self.array("u1", 2))
        if curve < _EXPLICIT:  # the second byte is the last symbol
            return _Table(curve, 0, _CURVES[curve, : first + 1])
        (others,) = map(int, self.array("u1", 1))
        if curve != _EXPLICIT or first + others > ESCAPE:
            raise _damaged(f"table {curve} with symbols up to {first + others}")
        return _Table(curve, first, self.array("u1", others + 1))

    def states(self, num: int) -> NDArray[np.int64]:
        """The next ANS states."""
        states = self.array("<u4", num).astype(np.int64)
        if (states < ans.LOWEST).any():
            raise _damaged("an impossible state")
        return states

    def symbols(
        self,
        shape: tuple[int, int],
        place: _Place,
        starts: NDArray[np.int64],
        first: NDArray[np.uint8],
        states: NDArray[np.int64],
        *,
        signed: bool,
    ) -> tuple[NDArray[np.int16], int, int]:
        """The next symbols, with their signs if there are any; see `ans.pop`."""
        symbols = np.empty(shape, np.int16)
        self._at, num_signs, num_large = ans.pop(
            self._data,
            self._at,
            signed,
            place.rows,
            place.columns,
            place.table_of,
            starts,
            first,
            states,
            symbols,
        )
        if self._at < 0:
            raise _damaged("it ends too early")
        return symbols, num_signs, num_large

    def check_end(self, num_bytes: int) -> None:
        """Whether so many bytes are left."""
        if len(self._data) - self._at != num_bytes:
            raise _damaged(f"{len(self._data) - self._at} bytes left, expected {num_bytes}")


def _decoded(data: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.int16]:
    reader = _Reader(data)
    (num_contexts,) = map(int, reader.array("u1", 1))
    tables = [reader.table() for _ in range(2 + num_contexts)]
    starts = _starts(tables)
    first = ans.buckets(starts)
    states = reader.states(_num_states(rows * columns, starts))
    classes = [
        reader.symbols(
            (1, count), _Place.of_classes(table, count), starts, first, states, signed=False
        )[0][0]
        for table, count in enumerate((rows, columns))
    ]
    contexts = _Contexts(*(each.astype(np.uint8) for each in classes))
    if len(contexts.occurring()) != num_contexts:
        raise _damaged(f"{num_contexts} tables for {len(contexts.occurring())} contexts")
    q, num_signs, num_large = reader.symbols(
        (rows, columns), contexts.place(), starts, first, states, signed=bool(data[0] == _SIGNED)
    )
    if (states != ans.LOWEST).any():
        raise _damaged("a state that no encoder begins with")
    large = reader.array("<u2", num_large)
    reader.check_end(-(-num_signs // 8))
    if num_large:
        escaped = np.flatnonzero(np.abs(q) == ESCAPE)
        magnitudes = np.minimum(large, LARGEST).astype(np.int16)
        q.reshape(-1)[escaped] = np.where(q.reshape(-1)[escaped] < 0, -magnitudes, magnitudes)
    return q


def _damaged(what: str) -> RuntimeError:
    return RuntimeError(
        f"a coded message that says nothing ({what}): it is damaged, or the two ends have "
        "different methods"
    )
