"""An asymmetric numeral system, which codes symbols by their frequencies, and what counts them.

It is the range variant (rANS; Duda, arXiv 1311.2540). With frequencies f_s that sum to M and
the sums before each b_s, a symbol s takes a state x to

    x' = M floor(x / f_s) + b_s + x mod f_s,    log2 x' - log2 x  ~  log2 (M / f_s),

and x' says s again: it is the one with b_s <= x' mod M < b_s + f_s. States are kept in
[2^16, 2^32): what would go beyond leaves in words of two bytes, low byte first. What is pushed last
is popped first, so symbols are pushed from the last to the first, and words are written towards the
beginning. Several states that take turns along a row are independent of each other, which keeps a
processor busy.

Symbols are magnitudes up to `ESCAPE` of integers [rows, columns], or what says integers of images
(`mpcomp.entropy.neighbours`) or under a dither (`mpcomp.entropy.dithered`). Each is coded by the
table of its context, which is its row's class plus its column's or its own, at most the last one.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpcomp.core.compiled import compiled

__all__ = [
    "ESCAPE",
    "LOWEST",
    "TOTAL",
    "Sums",
    "buckets",
    "folded",
    "large_of",
    "pop",
    "pop_row",
    "push",
    "signs_of",
    "sums",
    "tally",
    "unfolded",
]

#: The symbol of magnitudes from here on.
ESCAPE: Final = 255
#: States begin here, and are never below.
LOWEST: Final = 1 << 16
_BITS: Final = 15
#: Frequencies of a table sum to this.
TOTAL: Final = 1 << _BITS
_INVERSE: Final = 47  # bits behind the point of a frequency's inverse
_BUCKETS: Final = 256
_IN_BUCKET: Final = _BITS - 8  # bits
# For a type checker, which knows no larger or absolute one of numpy's own numbers.
_int32: Any = np.int32
_int64: Any = np.int64
_uint64: Any = np.uint64


class Sums(NamedTuple):
    """Sums of symbols of integers [rows, columns].

    Attributes:
        by_row: int64 [rows].
        by_column: int64 [columns].
        largest: of the symbols.
        nonzero: how many integers are not zero.
        negative: how many are below.
    """

    by_row: NDArray[np.int64]
    by_column: NDArray[np.int64]
    largest: int
    nonzero: int
    negative: int


@compiled
def folded(d: int) -> int:
    """The symbol of a whole number d: 2 |d|, or one less below zero."""
    return 2 * abs(d) - (d < 0)


@compiled
def unfolded(symbol: int) -> int:
    """The inverse of `folded`."""
    return -((symbol + 1) >> 1) if symbol & 1 else symbol >> 1


@compiled
def sums(q: NDArray[Any]) -> Sums:
    """Sums of symbols of integers, int16 [rows, columns]."""
    num_rows, num_columns = q.shape
    by_row = np.zeros(num_rows, np.int64)
    by_column = np.zeros(num_columns, np.int64)
    largest = nonzero = negative = 0
    for i in range(num_rows):
        total = 0
        for j in range(num_columns):
            value = _int32(q[i, j])
            symbol = min(abs(value), _int32(ESCAPE))
            by_column[j] += symbol
            total += symbol
            largest = max(largest, symbol)
            nonzero += value != 0
            negative += value < 0
        by_row[i] = total
    return Sums(by_row, by_column, largest, nonzero, negative)


@compiled
def tally(
    q: NDArray[Any],
    rows: NDArray[Any],
    columns: NDArray[Any],
    num_contexts: int,
    largest: int,
) -> NDArray[Any]:
    """Occurrences of each symbol in each context, int32 [contexts, symbols].

    Args:
        q: integers, int16 [rows, columns].
        rows: classes, uint8 [rows].
        columns: classes, uint8 [1, columns], or of each integer [rows, columns].
        num_contexts: contexts are counted from 0 to one less than that.
        largest: of the symbols.
    """
    num_rows, num_columns = q.shape
    num_symbols, num_classes = largest + 1, len(columns)
    # Two, by turns: a count that was just written would be waited for.
    counts = np.zeros((2, num_contexts * num_symbols), np.int32)
    places = np.zeros(num_columns, np.int64)
    last, of_class = num_contexts - 1, -1
    for i in range(num_rows):
        if rows[i] != of_class or num_classes > 1:
            of_class = _int64(rows[i])
            of_row = columns[min(i, num_classes - 1)]
            for j in range(num_columns):
                places[j] = min(of_class + _int64(of_row[j]), last) * num_symbols
        for j in range(num_columns):
            counts[j & 1, places[j] + min(abs(_int64(q[i, j])), ESCAPE)] += 1
    both: NDArray[Any] = counts[0] + counts[1]
    return both.reshape(num_contexts, num_symbols)


@compiled
def signs_of(q: NDArray[Any], by_row: NDArray[Any], nonzero: int) -> NDArray[Any]:
    """A bit for each integer that is not zero, set if it is below: uint8 [bytes].

    Args:
        q: integers, int16 [rows, columns].
        by_row: their `sums`, of which a row of zeros has none.
        nonzero: how many are not zero.
    """
    num_rows, num_columns = q.shape
    signs = np.zeros(nonzero // 8 + 1, np.uint8)
    bits, held, at = _uint64(0), _uint64(0), 0
    for i in range(num_rows):
        if by_row[i] > 0:
            for j in range(num_columns):  # nearly without branches, as random as signs are
                value = q[i, j]
                bits |= _uint64(value < 0) << held
                held += _uint64(value != 0)
                if held >= 56:
                    for _ in range(7):
                        signs[at] = np.uint8(bits & _uint64(255))
                        bits >>= _uint64(8)
                        at += 1
                    held -= _uint64(56)
    while at < len(signs):
        signs[at] = np.uint8(bits & _uint64(255))
        bits >>= _uint64(8)
        at += 1
    return signs[: (nonzero + 7) // 8]


@compiled
def large_of(q: NDArray[Any], count: int) -> NDArray[Any]:
    """The magnitudes from `ESCAPE` on, of which there are so many, uint16 [count]."""
    num_rows, num_columns = q.shape
    large = np.empty(count, np.uint16)
    found = 0
    for i in range(num_rows):
        for j in range(num_columns):
            magnitude = abs(_int64(q[i, j]))
            if magnitude >= ESCAPE and found < count:
                large[found] = magnitude
                found += 1
    return large


@compiled
def push(
    q: NDArray[Any],
    rows: NDArray[Any],
    columns: NDArray[Any],
    table_of: NDArray[Any],
    inverses: NDArray[Any],
    moves: NDArray[Any],
    states: NDArray[Any],
    out: NDArray[Any],
    at: int,
) -> int:
    """Codes symbols, from the last to the first.

    Args:
        q: integers, int16 [rows, columns].
        rows: classes, uint8 [rows].
        columns: classes, uint8 [1, columns], or of each integer [rows, columns].
        table_of: the table of each context, int64.
        inverses: as of `divisors`; symbols that occur have one.
        moves: likewise.
        states: a power of two of them, int64; they change.
        out: takes the words, uint8; before ``at`` are two bytes for each symbol.
        at: where they begin so far.

    Returns:
        Where they begin now.
    """
    num_rows, num_columns = q.shape
    lanes, last, of_class = len(states) - 1, len(table_of) - 1, -1
    width, num_classes = inverses.shape[1], len(columns)
    flat_inverses, flat_moves = inverses.reshape(-1), moves.reshape(-1)
    bases, places = np.zeros(num_columns, np.int32), np.zeros(num_columns, np.int32)
    end = _uint64(at)
    for i in range(num_rows - 1, -1, -1):
        if rows[i] != of_class or num_classes > 1:
            of_class = _int64(rows[i])
            of_row = columns[min(i, num_classes - 1)]
            for j in range(num_columns):
                bases[j] = table_of[min(of_class + _int64(of_row[j]), last)] * width
        for j in range(num_columns):
            places[j] = bases[j] + min(abs(_int32(q[i, j])), _int32(ESCAPE))
        for j in range(num_columns - 1, -1, -1):  # without branches, and of numbers without signs
            lane, place = _uint64(j & lanes), _uint64(places[j])
            x, move = _uint64(states[lane]), flat_moves[place]
            start, rest = move & _uint64(TOTAL - 1), move >> _uint64(_BITS)
            full = (x >> _uint64(32 - _BITS)) + rest >> _uint64(_BITS)  # whether x is too large
            out[end - _uint64(2)] = np.uint8(x)
            out[end - _uint64(1)] = np.uint8(x >> _uint64(8))
            end -= full << _uint64(1)
            x >>= full << _uint64(4)
            states[lane] = x + quotient(x, flat_inverses[place]) * rest + start
    begin: int = _int64(end)
    return begin


@compiled
def divisors(starts: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inverses of frequencies f, ceil(2^47 / f), and what `push` adds: (M - f) M + b.

    Args:
        starts: sums of the frequencies before each symbol and behind the last, int64 [tables,
            symbols + 1].

    Returns:
        Both of each symbol, uint64 [tables, symbols]; zero of what does not occur.
    """
    num_tables, num_symbols = starts.shape[0], starts.shape[1] - 1
    inverses, moves = np.zeros((2, num_tables, num_symbols), np.uint64)
    for table in range(num_tables):
        for symbol in range(num_symbols):
            start = starts[table, symbol]
            frequency = starts[table, symbol + 1] - start
            if frequency > 0:
                inverses[table, symbol] = ((1 << _INVERSE) + frequency - 1) // frequency
                moves[table, symbol] = (TOTAL - frequency) << _BITS | start
    return inverses, moves


@compiled
def quotient(x: Any, inverse: Any) -> Any:
    """floor(x / f) of a state x < 2^17 f, by the inverse of f as of `divisors`.

    It is exact: an inverse too large by less than 1 adds less than x / 2^47 < 1 / f.
    """
    return x * inverse >> _uint64(_INVERSE)


@compiled
def buckets(starts: NDArray[Any]) -> NDArray[Any]:
    """The first symbol that each 256th of a table's range may say: uint8 [tables, 256].

    Args:
        starts: as of `divisors`.
    """
    first = np.zeros((len(starts), _BUCKETS), np.uint8)
    for table in range(len(starts)):
        symbol = 0
        for bucket in range(_BUCKETS):
            while starts[table, symbol + 1] <= bucket << _IN_BUCKET:
                symbol += 1
            first[table, bucket] = symbol
    return first


@compiled
def pop(
    data: NDArray[Any],
    at: int,
    signed: bool,
    rows: NDArray[Any],
    columns: NDArray[Any],
    table_of: NDArray[Any],
    starts: NDArray[Any],
    first: NDArray[Any],
    states: NDArray[Any],
    out: NDArray[Any],
) -> tuple[int, int, int]:
    """The inverse of `push`, of any bytes.

    Args:
        data: words from ``at`` on, and signs from the end backwards, uint8.
        at: where words begin.
        signed: whether there are signs.
        rows: classes, uint8 [rows].
        columns: classes, uint8 [1, columns], or of each integer [rows, columns].
        table_of: the table of each context, int64.
        starts: of those tables; the last of each is `TOTAL`.
        first: their `buckets`.
        states: as they were after `push`, int64; they change.
        out: takes the integers, int16 [rows, columns], `ESCAPE` for magnitudes from there on.

    Returns:
        Where the words end, or -1 where the data ends before them; the number of signs, which may
        be more than there is room for, and of integers with the magnitude `ESCAPE`.
    """
    num_rows, num_columns = out.shape
    last, of_class, end = len(table_of) - 1, -1, len(data)
    tables, num_classes = np.zeros(num_columns, np.int64), len(columns)
    seen = escaped = 0
    for i in range(num_rows):
        if rows[i] != of_class or num_classes > 1:
            of_class = _int64(rows[i])
            of_row = columns[min(i, num_classes - 1)]
            for j in range(num_columns):
                tables[j] = table_of[min(of_class + _int64(of_row[j]), last)]
        at, largest = pop_row(data, at, tables, starts, first, states, out[i])
        if at < 0:
            return -1, 0, 0
        if signed and largest > 0:
            for j in range(num_columns):
                symbol = _int64(out[i, j])
                byte = max(end - 1 - (seen >> 3), 0)
                negative = _int64(data[byte] >> (seen & 7) & 1) & (symbol != 0)
                out[i, j] = (symbol ^ -negative) + negative
                seen += symbol != 0
        if largest == ESCAPE:
            for j in range(num_columns):
                escaped += abs(out[i, j]) == ESCAPE
    return at, seen, escaped


@compiled
def pop_row(
    data: NDArray[Any],
    at: int,
    tables: NDArray[Any],
    starts: NDArray[Any],
    first: NDArray[Any],
    states: NDArray[Any],
    out: NDArray[Any],
) -> tuple[int, int]:
    """The symbols of a row.

    Args:
        data: words from ``at`` on, uint8.
        at: where they begin.
        tables: the table of each symbol, int64 [columns].
        starts: as of `pop`, and so are those that follow.
        out: takes the symbols, int16 [columns].

    Returns:
        Where the words end, or -1 where the data ends before them, and the largest symbol.
    """
    lanes, width, end = len(states) - 1, starts.shape[1], len(data)
    flat, flat_first = starts.reshape(-1), first.reshape(-1)
    largest, enough = 0, at + 2 * len(out) <= end
    for j in range(len(out)):  # of numbers without signs, and with few branches
        lane, table = _uint64(j & lanes), _uint64(tables[j])
        x = _uint64(states[lane])
        slot = x & _uint64(TOTAL - 1)
        base = table * _uint64(width)
        bucket = table * _uint64(_BUCKETS) + (slot >> _uint64(_IN_BUCKET))
        place = base + _uint64(flat_first[bucket])
        while _uint64(flat[place + _uint64(1)]) <= slot:
            place += _uint64(1)
        start = _uint64(flat[place])
        x = (_uint64(flat[place + _uint64(1)]) - start) * (x >> _uint64(_BITS)) + slot - start
        needs = _uint64(x < _uint64(LOWEST))
        if enough or at + 2 <= end:
            word = _uint64(data[_uint64(at)]) | _uint64(data[_uint64(at + 1)]) << _uint64(8)
            x = x << (needs << _uint64(4)) | word & (_uint64(0) - needs)
            at += _int64(needs << _uint64(1))
        elif needs:
            return -1, 0
        states[lane] = x
        symbol = _int64(place - base)
        out[j] = symbol
        largest = max(largest, symbol)
    return at, largest
