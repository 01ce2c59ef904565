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

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
_FEW = 4096  # elements for which tables of several contexts would cost more than they save


def max_bytes(rows: int, columns: int) -> int:
    """The most that `encode` takes for integers [rows, columns]."""
    return 1 + 2 * rows * columns


def encode(q: NDArray[np.int16]) -> NDArray[np.uint8]:
    """The coded form of integers [rows, columns], uint8 [n], n <= `max_bytes`.

    Args:
        q: magnitudes up to `LARGEST`.
    """
    coded = _encoded(q) if q.size else b""
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
    def one(cls, num_rows: int, num_columns: int) -> _Contexts:
        """A single context."""
        return cls(np.zeros(num_rows, np.uint8), np.zeros(num_columns, np.uint8))

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

    def blocks(self) -> Iterator[tuple[int, list[tuple[slice, slice]]]]:
        """Each context, and where it is in the matrix that is ordered by `orders`."""
        runs: dict[int, list[tuple[slice, slice]]] = {}
        rows, columns = _runs(self.rows), _runs(self.columns)
        for row, among_rows in rows:
            for column, among_columns in columns:
                context = min(row + column, _CONTEXTS - 1)
                runs.setdefault(context, []).append((among_rows, among_columns))
        return iter(sorted(runs.items()))

    def orders(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows, and columns, ordered by class."""
        return np.argsort(self.rows, kind="stable"), np.argsort(self.columns, kind="stable")


def _classes(octaves: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Whole numbers from 0, the largest for the largest; what is far below counts as alike."""
    rounded = np.rint(octaves)
    largest = int(rounded.max())
    classes = np.clip(rounded - (largest - _CONTEXTS + 1), 0, None)
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
_CURVE_BITS = np.log2(_WEIGHTS[_CURVES])  # that of a frequency but for what all have in common
_CURVE_TOTALS = np.log2(_WEIGHTS[_CURVES].cumsum(1))
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
    def of(cls, counts: NDArray[np.int64]) -> _Table:
        """The table that takes the fewest bytes with symbols of which there are so many."""
        num_symbols = int(counts.sum())
        last = len(counts) - 1
        first = int(np.argmax(counts > 0))
        bits = num_symbols * _CURVE_TOTALS[:, last] - _CURVE_BITS[:, : last + 1] @ counts
        curve = int(np.argmin(bits))
        by_curve = 2 + float(bits[curve]) / 8
        counts = counts[first:]
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = np.minimum(np.rint(-8 * np.log2(counts / num_symbols)), _ABSENT - 1)
        costs = np.where(counts > 0, exact, _ABSENT).astype(np.uint8)
        explicit = 3 + len(costs) + float(counts @ costs.astype(np.int64)) / 64
        if by_curve < explicit:
            return cls(curve, 0, _CURVES[curve, : last + 1], by_curve)
        return cls(_EXPLICIT, first, costs, explicit)

    def to_bytes(self) -> bytes:
        """Number of the curve, its last symbol; or first symbol, number of others, costs."""
        if self.curve != _EXPLICIT:
            return bytes([self.curve, len(self.costs) - 1])
        return bytes([_EXPLICIT, self.first, len(self.costs) - 1]) + self.costs.tobytes()

    def model(self) -> constriction.stream.model.Categorical:
        """The distribution, of symbols counted from the first."""
        weights = _WEIGHTS[self.costs]
        return constriction.stream.model.Categorical(
            (weights / weights.sum()).astype(np.float32), perfect=False
        )


# -- encoding --------------------------------------------------------------------------------------


def _encoded(q: NDArray[np.int16]) -> bytes:
    absolute = np.abs(q)
    magnitudes = np.minimum(absolute, _ESCAPE).astype(np.uint8)
    contexts = _Contexts.one(*q.shape)
    streams = [contexts.rows, contexts.columns, magnitudes.ravel()]
    if q.size >= _FEW and magnitudes.any():
        several = _streams(magnitudes, _Contexts.of(magnitudes))
        counts = [_counts(stream) for stream in several]
        of_several = [_Table.of(of_stream) for of_stream in counts]
        together = _sum(counts[2:])
        tables = [_Table.of(of_stream) for of_stream in (*map(_counts, streams[:2]), together)]
        # Where little is not zero, its classes may cost more than they tell.
        if sum(t.num_bytes for t in of_several) < sum(t.num_bytes for t in tables):
            streams, tables = several, of_several
    else:
        tables = [_Table.of(_counts(stream)) for stream in streams]
    coder = constriction.stream.stack.AnsCoder()
    for table, stream in zip(reversed(tables), reversed(streams), strict=True):
        if len(table.costs) > 1:  # else all are alike
            coder.encode_reverse(stream.astype(np.int32) - table.first, table.model())
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


def _counts(symbols: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Number of each symbol, from 0 to the largest that occurs; two are counted at a time."""
    pairs = symbols[: len(symbols) // 2 * 2].view("<u2")
    of_pairs = np.bincount(pairs, minlength=1)
    square = np.zeros((-(-len(of_pairs) // 256), 256), np.int64)  # by second and first of a pair
    square.reshape(-1)[: len(of_pairs)] = of_pairs
    counts: NDArray[np.int64] = square.sum(0)
    counts[: len(square)] += square.sum(1)
    if len(symbols) % 2:
        counts[symbols[-1]] += 1
    last = int(np.flatnonzero(counts)[-1]) if len(symbols) else 0
    return counts[: last + 1]


def _sum(counts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The counts of all streams together."""
    total = np.zeros(max(map(len, counts)), np.int64)
    for of_stream in counts:
        total[: len(of_stream)] += of_stream
    return total


def _streams(magnitudes: NDArray[np.uint8], contexts: _Contexts) -> list[NDArray[np.uint8]]:
    """The classes of rows, of columns, and the magnitudes of each context."""
    by_row, by_column = contexts.orders()
    ordered = magnitudes.take(by_column, 1).take(by_row, 0)
    return [contexts.rows, contexts.columns] + [
        np.concatenate([ordered[block].ravel() for block in blocks])
        for _, blocks in contexts.blocks()
    ]


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

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """The next bytes."""
        if self._at + num_bytes > self._end:
            raise _damaged("it ends too early")
        taken = np.frombuffer(self._raw, np.uint8, num_bytes, self._at)
        self._at += num_bytes
        return taken

    def table(self) -> _Table:
        """The next table."""
        curve, first = (int(byte) for byte in self.take(2))
        if curve < _EXPLICIT:  # the second byte is the last symbol
            return _Table(curve, 0, _CURVES[curve, : first + 1])
        (others,) = (int(byte) for byte in self.take(1))
        if curve != _EXPLICIT or first + others > _ESCAPE:
            raise _damaged(f"table {curve} with symbols up to {first + others}")
        return _Table(curve, first, self.take(others + 1))

    def symbols(self, table: _Table, count: int) -> NDArray[np.uint8]:
        """The next symbols that are coded by a table."""
        if len(table.costs) == 1 or not count:
            return np.full(count, table.first, np.uint8)
        decoded: NDArray[np.int32] = self._coder.decode(table.model(), count)
        return (decoded + table.first).astype(np.uint8)

    def check_end(self) -> None:
        """Whether all bytes were taken."""
        if self._at != self._end:
            raise _damaged(f"{self._end - self._at} bytes too many")


def _decoded(reader: _Reader, rows: int, columns: int, *, signed: bool) -> NDArray[np.int16]:
    class_tables = reader.table(), reader.table()
    contexts = _Contexts(
        reader.symbols(class_tables[0], rows), reader.symbols(class_tables[1], columns)
    )
    blocks = list(contexts.blocks())
    tables = [reader.table() for _ in blocks]
    ordered = np.empty((rows, columns), np.uint8)
    for table, (_, places) in zip(tables, blocks, strict=True):
        sizes = [(r.stop - r.start) * (c.stop - c.start) for r, c in places]
        stream = reader.symbols(table, sum(sizes))
        start = 0
        for (r, c), size in zip(places, sizes, strict=True):
            ordered[r, c] = stream[start : start + size].reshape(r.stop - r.start, -1)
            start += size
    # Whole rows and columns, and places of the few: numpy is slow where it goes by masks.
    by_row, by_column = (np.argsort(order) for order in contexts.orders())
    values = ordered.take(by_row, 0).take(by_column, 1).astype(np.int16).reshape(-1)
    present = np.flatnonzero(values != 0) if signed else values[:0]  # of bools it is far faster
    signs = reader.take(-(-len(present) // 8))
    escaped = np.flatnonzero(values == _ESCAPE)
    large = reader.take(2 * len(escaped)).view("<u2")
    values[escaped] = np.minimum(large, LARGEST)
    reader.check_end()
    negative = present[np.flatnonzero(np.unpackbits(signs, count=len(present), bitorder="little"))]
    values[negative] = -values[negative]
    return values.reshape(rows, columns)


def _damaged(what: str) -> RuntimeError:
    return RuntimeError(
        f"a coded message that says nothing ({what}): it is damaged, or the two ends have "
        "different methods"
    )
