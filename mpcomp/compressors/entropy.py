"""Entropy coding of small integers [rows, columns], of which most are zero or near it.

Magnitudes go through an asymmetric numeral system (ANS; Duda, arXiv 1311.2540; the coder is that of
the package constriction), signs as a bit each. How often which magnitude comes differs by row (a
token) and by column (a channel), so each has a class, and an element is coded by the table of
its context:

    log2 E|q_ij|  ~  r_i + c_j,         context_ij = clip(r_i + c_j),    r, c in halves of an octave

Classes and tables are sent: some hundred bytes for a message of any size, which is why a small one
has a single context. A table is the number of a curve,

    -log2 p(k) = c k^e + constant,    c = 2^(i/4),    e = 1 (Laplace), 3/2, 2 (Gauss),

or, where that takes less with what it codes, -log2 of each magnitude's frequency. Both are in
eighths of a bit, one byte each, from which both ends make the same integers. So nothing depends on
how a machine rounds.

    byte     0       1..4         then
             kind    ANS words    classes' tables, tables, signs, large magnitudes, ANS words

Where no integer is below zero, as behind a ReLU, the kind says so, and no signs are sent. Where
coding would gain nothing (noise of many bits) the integers are sent as int16.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST", "decode", "encode", "max_bytes"]

#: Magnitudes are at most this.
LARGEST = 2**15 - 1

# 1 was a coding without curves, which no longer is understood.
_PLAIN, _SIGNED, _UNSIGNED = 0, 2, 3
_HEAD = struct.Struct("<BI")
_ESCAPE = 255  # the symbol of magnitudes from here on, which follow by themselves
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


def max_bytes(rows: int, columns: int) -> int:
    """The most that `encode` takes for integers [rows, columns]."""
    return 1 + 2 * rows * columns


def encode(q: NDArray[np.int16]) -> NDArray[np.uint8]:
    """The coded form of integers [rows, columns], uint8 [n], n <= `max_bytes`.

    Args:
        q: magnitudes up to `LARGEST`.
    """
    coded = _encoded(q) if q.size > 1 else b""  # of one, nothing is shorter than itself
    if not coded or len(coded) > max_bytes(*q.shape):
        coded = bytes([_PLAIN]) + q.astype("<i2").tobytes()
    return np.frombuffer(coded, np.uint8)


def decode(data: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.int16]:
    """Inverse of `encode`.

    Raises:
        RuntimeError: the data cannot be of such integers. (Of damaged data many are.)
    """
    raw = data.tobytes()
    if not raw:
        raise RuntimeError("an empty message where coded integers were expected")
    if raw[0] == _PLAIN:
        if len(raw) != max_bytes(rows, columns):
            raise _damaged(f"{len(raw)} bytes, expected {max_bytes(rows, columns)}")
        plain = np.frombuffer(raw, "<i2", offset=1).astype(np.int16)
        return np.maximum(plain, -LARGEST).reshape(rows, columns)
    if raw[0] not in (_SIGNED, _UNSIGNED):
        raise _damaged(f"kind {raw[0]}")
    return _decoded(_Reader(raw), rows, columns, signed=raw[0] == _SIGNED)


# -- contexts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contexts:
    """Rows and columns in the order of their classes, and the blocks that share a context.

    Attributes:
        rows: class of each row, uint8 [rows].
        columns: class of each column, uint8 [columns].
    """

    rows: NDArray[np.uint8]
    columns: NDArray[np.uint8]

    @classmethod
    def of(cls, magnitudes: NDArray[np.uint8]) -> _Contexts:
        """The classes of magnitudes [rows, columns], of which some are not zero."""
        num_rows, num_columns = magnitudes.shape
        # Sums, not products with ones: those go to BLAS, whose threads are in the way of torch's.
        by_row = magnitudes.sum(1, dtype=np.int64) / num_columns
        by_column = magnitudes.sum(0, dtype=np.int64) / num_rows
        mean = by_row.mean()
        # What is added keeps a row of zeros near one that has a single one.
        rows = _PER_OCTAVE * np.log2((by_row + 0.25 / num_columns) / mean)
        columns = _PER_OCTAVE * np.log2((by_column + 0.25 / num_rows) / mean)
        return cls(_classes(rows), _classes(columns))

    def blocks(self) -> list[list[tuple[slice, slice]]]:
        """Places of each context that occurs, in the matrix that is ordered by `orders`."""
        blocks: list[list[tuple[slice, slice]]] = [[] for _ in range(_CONTEXTS)]
        columns = _runs(self.columns)
        for row, among_rows in _runs(self.rows):
            for column, among_columns in columns:
                blocks[min(row + column, _CONTEXTS - 1)].append((among_rows, among_columns))
        return [places for places in blocks if places]

    def counts(self, magnitudes: NDArray[np.uint8], largest: int) -> NDArray[np.int64]:
        """Occurrences of each magnitude by context: [contexts that occur, magnitudes].

        Args:
            magnitudes: as for `of`.
            largest: of them.
        """
        contexts = np.minimum(self.rows[:, None] + self.columns, np.uint16(_CONTEXTS - 1))
        contexts *= largest + 1
        contexts += magnitudes
        counts: NDArray[np.int64] = np.bincount(
            contexts.reshape(-1), minlength=_CONTEXTS * (largest + 1)
        ).reshape(_CONTEXTS, -1)
        return counts[counts.any(1)]

    def orders(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows, and columns, ordered by class."""
        return np.argsort(self.rows, kind="stable"), np.argsort(self.columns, kind="stable")


def _classes(octaves: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Whole numbers from 0, the largest for the largest; what is far below counts as alike."""
    rounded = np.rint(octaves)
    largest = int(rounded.max())
    classes = np.maximum(rounded - (largest - _CLASSES + 1), 0)
    from_zero: NDArray[np.uint8] = (classes - classes.min()).astype(np.uint8)
    return from_zero


def _runs(classes: NDArray[np.uint8]) -> list[tuple[int, slice]]:
    """Each class that occurs, and where it is among all in order."""
    counts = np.bincount(classes)
    ends = np.cumsum(counts)
    return [(int(k), slice(int(ends[k] - counts[k]), int(ends[k]))) for k in np.flatnonzero(counts)]


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
        # Not "@", which goes to BLAS: see `_Contexts.of`.
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

    def model(self) -> constriction.stream.model.Categorical:
        """The distribution, of symbols counted from the first."""
        if self.curve != _EXPLICIT:
            return _model_of_curve(self.curve, len(self.costs))
        return _model(self.costs)


def _model(costs: NDArray[np.uint8]) -> constriction.stream.model.Categorical:
    weights = _WEIGHTS[costs]
    return constriction.stream.model.Categorical(
        (weights / weights.sum()).astype(np.float32), perfect=False
    )


@functools.lru_cache(1024)
def _model_of_curve(curve: int, num_symbols: int) -> constriction.stream.model.Categorical:
    """The distribution of few curves that come again and again."""
    return _model(_CURVES[curve, :num_symbols])


#: The table of symbols that all are zero.
_ALIKE = _Table(0, 0, _CURVES[0, :1], 2.0)


# -- encoding --------------------------------------------------------------------------------------


def _encoded(q: NDArray[np.int16]) -> bytes:
    absolute = np.abs(q)
    magnitudes = np.minimum(absolute, _ESCAPE).astype(np.uint8)
    tables, streams = _tables_and_streams(magnitudes)
    coder = constriction.stream.stack.AnsCoder()
    for table, stream in zip(reversed(tables), reversed(streams), strict=True):
        if len(table.costs) > 1:  # else all are alike
            symbols = np.subtract(stream, table.first, dtype=np.int32)
            coder.encode_reverse(symbols, table.model())
    words = coder.get_compressed().astype("<u4")
    signed = q.min() < 0
    parts = [_HEAD.pack(_SIGNED if signed else _UNSIGNED, len(words))]
    parts += [table.to_bytes() for table in tables]
    if signed:
        negative = np.compress((q != 0).ravel(), (q < 0).ravel())
        parts.append(np.packbits(negative, bitorder="little").tobytes())
    large = absolute[absolute >= _ESCAPE].astype("<u2")
    parts += [large.tobytes(), words.tobytes()]
    return b"".join(parts)


def _tables_and_streams(
    magnitudes: NDArray[np.uint8],
) -> tuple[list[_Table], list[NDArray[np.uint8]]]:
    """Of the classes of rows, of columns, and the magnitudes of each context; fewest bytes."""
    elements = magnitudes.reshape(-1)
    alike = np.zeros(0, np.uint8)  # classes of a single context, which none needs to be told
    largest = int(magnitudes.max())
    if not largest:
        return [_ALIKE, _ALIKE, _ALIKE], [alike, alike, elements]
    if magnitudes.size < _FEW:
        (table,) = _Table.of_each(np.bincount(elements)[None])
        return [_ALIKE, _ALIKE, table], [alike, alike, elements]
    contexts = _Contexts.of(magnitudes)
    classes = contexts.rows, contexts.columns
    num_symbols = 1 + max(largest, *(int(each.max()) for each in classes))
    of_contexts = contexts.counts(magnitudes, largest)
    counts = np.zeros((3 + len(of_contexts), num_symbols), np.int64)
    counts[0, : largest + 1] = of_contexts.sum(0)
    counts[1:3] = [np.bincount(each, minlength=num_symbols) for each in classes]
    counts[3:, : largest + 1] = of_contexts
    one, *several = _Table.of_each(counts)
    # Where little is not zero, its classes may cost more than they tell.
    if one.num_bytes + 2 * _ALIKE.num_bytes <= sum(table.num_bytes for table in several):
        return [_ALIKE, _ALIKE, one], [alike, alike, elements]
    by_row, by_column = contexts.orders()
    ordered = magnitudes.take(by_column, 1).take(by_row, 0)
    streams = [
        np.concatenate([ordered[place].reshape(-1) for place in places])
        for places in contexts.blocks()
    ]
    return several, [*classes, *streams]


# -- decoding --------------------------------------------------------------------------------------


class _Reader:
    """A message, read from its beginning, its ANS words apart."""

    def __init__(self, raw: bytes) -> None:
        if len(raw) < _HEAD.size:
            raise _damaged(f"{len(raw)} bytes")
        _, num_words = _HEAD.unpack_from(raw)
        self._raw = raw
        self._at = _HEAD.size
        self._end = len(raw) - 4 * num_words
        if self._end < self._at:
            raise _damaged(f"{len(raw)} bytes, {num_words} words")
        words = np.frombuffer(raw, "<u4", offset=self._end).astype(np.uint32)
        try:
            self._coder = constriction.stream.stack.AnsCoder(words)
        except ValueError as error:
            raise _damaged(str(error)) from error

    def take(self, num_bytes: int) -> bytes:
        """The next bytes."""
        start, self._at = self._at, self._at + num_bytes
        if self._at > self._end:
            raise _damaged("it ends too early")
        return self._raw[start : self._at]

    def array(self, dtype: str, count: int) -> NDArray[Any]:
        """The next numbers."""
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype)

    def table(self) -> _Table:
        """The next table."""
        curve, first = self.take(2)
        if curve < _EXPLICIT:  # the second byte is the last symbol
            return _Table(curve, 0, _CURVES[curve, : first + 1])
        (others,) = self.take(1)
        if curve != _EXPLICIT or first + others > _ESCAPE:
            raise _damaged(f"table {curve} with symbols up to {first + others}")
        return _Table(curve, first, self.array("u1", others + 1))

    def symbols(self, table: _Table, count: int) -> NDArray[np.uint8]:
        """The next symbols that are coded by a table."""
        if len(table.costs) == 1 or not count:
            return np.full(count, table.first, np.uint8)
        decoded = self._coder.decode(table.model(), count)
        symbols: NDArray[np.uint8] = np.add(decoded, table.first, dtype=np.uint8, casting="unsafe")
        return symbols

    def check_end(self) -> None:
        """Whether all bytes were taken."""
        if self._at != self._end:
            raise _damaged(f"{self._end - self._at} bytes too many")


def _decoded(reader: _Reader, rows: int, columns: int, *, signed: bool) -> NDArray[np.int16]:
    class_tables = reader.table(), reader.table()
    contexts = _Contexts(
        reader.symbols(class_tables[0], rows), reader.symbols(class_tables[1], columns)
    )
    blocks = contexts.blocks()
    tables = [reader.table() for _ in blocks]
    ordered = np.empty((rows, columns), np.uint8)
    for table, places in zip(tables, blocks, strict=True):
        parts = [ordered[place] for place in places]
        stream = reader.symbols(table, sum(part.size for part in parts))
        start = 0
        for part in parts:
            part[...] = stream[start : start + part.size].reshape(part.shape)
            start += part.size
    # Whole rows and columns, and places of the few: numpy is slow where it goes by masks.
    by_row, by_column = (np.argsort(order) for order in contexts.orders())
    values = ordered.take(by_row, 0).take(by_column, 1).astype(np.int16).reshape(-1)
    present = np.flatnonzero(values != 0) if signed else values[:0]  # of bools it is far faster
    signs = reader.array("u1", -(-len(present) // 8))
    escaped = np.flatnonzero(values == _ESCAPE)
    large = reader.array("<u2", len(escaped))
    values[escaped] = np.minimum(large, LARGEST)
    reader.check_end()
    is_negative = np.unpackbits(signs, count=len(present), bitorder="little").view(np.bool_)
    negative = present[np.flatnonzero(is_negative)]
    values[negative] = -values[negative]
    return values.reshape(rows, columns)


def _damaged(what: str) -> RuntimeError:
    return RuntimeError(
        f"a coded message that says nothing ({what}): it is damaged, or the two ends have "
        "different methods"
    )
