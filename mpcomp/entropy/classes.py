"""Integers coded by classes of their rows and columns.

Magnitudes are symbols (`mpcomp.entropy.ans`), signs are a bit each. How often which magnitude comes
differs by row (a token) and by column (a channel), so each has a class, and a magnitude is coded by
the table of its context:

    log2 E|q_ij|  ~  r_i + c_j,         context_ij = clip(r_i + c_j),    r, c in halves of an octave

Classes and tables are sent: some hundred bytes for a message of any size, which is why a small one
has a single context. Ahead stands the number of contexts, behind are magnitudes from `ans.ESCAPE`
on as uint16, and signs. Where no integer is below zero, as behind a ReLU, no signs are sent.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpcomp.core.compiled import compiled
from mpcomp.entropy import ans
from mpcomp.entropy.frequencies import Tables
from mpcomp.entropy.message import FEW, Coder, Message, Place, Reader, damaged

__all__ = [
    "CONTEXTS",
    "Classes",
    "counts_of_tables",
    "decode",
    "encode",
    "head",
    "message",
    "popped",
    "read",
    "with_tables",
]

#: Contexts by rows and columns.
CONTEXTS: Final = 24
_int64: Any = np.int64  # for a type checker, which knows no bits of numpy's own numbers
_PER_OCTAVE = 2  # classes
# Of rows, and of columns. Were there as many as contexts, one row of zeros would move all others to
# the last context.
_CLASSES = 16


def encode(
    q: NDArray[np.int16],
    sums: ans.Sums,
    classes: Classes,
    counts: NDArray[np.signedinteger[Any]] | None = None,
) -> Message:
    """The message of integers [rows, columns].

    Args:
        q: integers.
        sums: theirs.
        classes: theirs.
        counts: how often each magnitude occurs in each context, if that is known.
    """
    place = classes.place()
    if counts is None:
        num_contexts = 1 if classes.are_single else CONTEXTS
        counts = ans.tally(q, place.rows, place.columns, num_contexts, sums.largest)
    chosen, tables = with_tables(classes, counts[None])
    num_large = int(counts[:, ans.ESCAPE :].sum())
    num_signs = -(-sums.nonzero // 8) if sums.negative else 0

    def behind() -> bytes:
        large = ans.large_of(q, num_large).astype("<u2").tobytes() if num_large else b""
        signs = ans.signs_of(q, sums.by_row, sums.nonzero)[::-1].tobytes() if num_signs else b""
        return large + signs

    said = message(chosen, tables, q, place if chosen is classes else chosen.place())
    return replace(said, num_behind=2 * num_large + num_signs, behind=behind)


def decode(reader: Reader, rows: int, columns: int, *, signed: bool) -> NDArray[np.int16]:
    """The integers [rows, columns] of a message.

    Raises:
        RuntimeError: it cannot be of such integers.
    """
    classes, _, coder = read(reader, rows, columns)
    q, num_signs, num_large = popped(reader, coder, (rows, columns), classes.place(), signed=signed)
    coder.check_end()
    large = reader.array("<u2", num_large)
    reader.check_end(-(-num_signs // 8))
    if num_large:
        escaped = np.flatnonzero(np.abs(q) == ans.ESCAPE)
        magnitudes = np.minimum(large, np.iinfo(np.int16).max).astype(np.int16)
        q.reshape(-1)[escaped] = np.where(q.reshape(-1)[escaped] < 0, -magnitudes, magnitudes)
    return q


def head(classes: Classes, tables: Tables) -> Message:
    """The beginning of a `message`, without the symbols."""
    return Message(
        ahead=bytes([len(tables) - 2]),
        tables=tables,
        coded=[
            (each[None].astype(np.int16), Place.alike(table, len(each)))
            for table, each in enumerate((classes.rows, classes.columns))
        ],
    )


def message(
    classes: Classes,
    tables: Tables,
    symbols: NDArray[np.int16],
    place: Place,
) -> Message:
    """The message of classes, and of symbols [rows, columns] by the contexts that these have.

    Args:
        classes: of rows and columns.
        tables: as of `with_tables`.
        symbols: of the integers.
        place: theirs.
    """
    begun = head(classes, tables)
    return replace(begun, coded=[*begun.coded, (symbols, place)])


def read(
    reader: Reader, rows: int, columns: int, tables_each: int = 1, *, in_lanes: bool = False
) -> tuple[Classes, NDArray[np.uint8], Coder]:
    """The `head` of a message: its classes, costs of all tables, and what decodes the symbols.

    Args:
        reader: of the message.
        rows: of its integers.
        columns: likewise.
        tables_each: of a context.
        in_lanes: whether symbols have states of their own (`mpcomp.entropy.lanes`).

    Raises:
        RuntimeError: it cannot be of such integers.
    """
    (num_tables,) = map(int, reader.array("u1", 1))
    costs = reader.costs(2 + num_tables)
    coder = reader.coder(costs, columns, 2) if in_lanes else reader.coder(costs, rows * columns)
    of_both = [
        popped(reader, coder, (1, count), Place.alike(table, count), signed=False)[0][0]
        for table, count in enumerate((rows, columns))
    ]
    if any(each.any() for each in of_both):
        classes = Classes(*(each.astype(np.uint8) for each in of_both))
    else:
        classes = Classes.single(rows, columns)
    if len(classes.occurring) * tables_each != num_tables:
        raise damaged(f"{num_tables} tables for {len(classes.occurring)} contexts")
    return classes, costs, coder


def popped(
    reader: Reader, coder: Coder, shape: tuple[int, int], place: Place, *, signed: bool
) -> tuple[NDArray[np.int16], int, int]:
    """The next symbols, with their signs if there are any; see `ans.pop`."""
    if place.says_all(coder.starts):
        return np.zeros(shape, np.int16), 0, 0
    symbols = np.empty(shape, np.int16)
    at, num_signs, num_large = ans.pop(reader.data, reader.at, signed, *place, *coder, symbols)
    reader.go_to(at)
    return symbols, num_signs, num_large


@dataclass(frozen=True)
class Classes:
    """Classes of rows and columns.

    Attributes:
        rows: class of each row, uint8 [rows].
        columns: class of each column, uint8 [columns].
    """

    rows: NDArray[np.uint8]
    columns: NDArray[np.uint8]

    @classmethod
    @functools.lru_cache(256)
    def single(cls, num_rows: int, num_columns: int) -> Classes:
        """Rows and columns that all are alike; not to be changed."""
        return cls(np.zeros(num_rows, np.uint8), np.zeros(num_columns, np.uint8))

    @classmethod
    def of(cls, sums: ans.Sums) -> Classes:
        """The classes of magnitudes by their sums; single ones of few magnitudes, and of zeros."""
        if len(sums.by_row) * len(sums.by_column) < FEW or not sums.largest:
            return cls.single(len(sums.by_row), len(sums.by_column))
        by_row, by_column = sums.by_row, sums.by_column
        mean_of_row, mean_of_column = by_row / len(by_column), by_column / len(by_row)
        mean = mean_of_row.mean()
        # What is added keeps a row of zeros near one that has a single one.
        rows = _PER_OCTAVE * np.log2((mean_of_row + 0.25 / len(by_column)) / mean)
        columns = _PER_OCTAVE * np.log2((mean_of_column + 0.25 / len(by_row)) / mean)
        return cls(_from_zero(rows), _from_zero(columns))

    @cached_property
    def are_single(self) -> bool:
        """Whether all rows are alike, and all columns."""
        return not (self.rows.any() or self.columns.any())

    @cached_property
    def occurring(self) -> NDArray[np.intp]:
        """The contexts that have elements, ascending."""
        if self.are_single:
            return np.zeros(1, np.intp)
        rows, columns = (np.flatnonzero(np.bincount(each)) for each in (self.rows, self.columns))
        there = np.zeros(CONTEXTS, np.bool_)
        there[np.minimum(np.add.outer(rows, columns), CONTEXTS - 1)] = True
        return np.flatnonzero(there)

    @cached_property
    def table_of(self) -> NDArray[np.int64]:
        """The table of each context, behind those of classes; of one that does not occur, any."""
        table_of = np.full(CONTEXTS, 2, np.int64)
        table_of[self.occurring] += np.arange(len(self.occurring))
        return table_of

    def place(self) -> Place:
        """Places of integers."""
        return Place(self.rows, self.columns[None], self.table_of)


def _from_zero(octaves: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Whole numbers from 0, the largest for the largest; what is far below counts as alike."""
    rounded = np.rint(octaves)
    largest = int(rounded.max())
    classes = np.maximum(rounded - (largest - _CLASSES + 1), 0)
    from_zero: NDArray[np.uint8] = (classes - classes.min()).astype(np.uint8)
    return from_zero


def with_tables(classes: Classes, counts: NDArray[np.signedinteger[Any]]) -> tuple[Classes, Tables]:
    """Classes, and all tables of their message: those of rows and columns, and of the symbols.

    Where little is not zero, classes may cost more than they tell; then there is a single one.

    Args:
        classes: of integers.
        counts: of each symbol in each context, [tables of a context, `CONTEXTS`, symbols].
    """
    contexts = np.zeros(0, np.intp) if classes.are_single else classes.occurring
    tables = Tables.of(counts_of_tables(counts, classes.rows, classes.columns, contexts))
    single, several = tables[: 2 + len(counts)], tables[2 + len(counts) :]
    if len(several) and several.num_bytes < single.num_bytes:
        return classes, several
    return Classes.single(len(classes.rows), len(classes.columns)), single


@compiled
def counts_of_tables(
    counts: NDArray[Any], rows: NDArray[Any], columns: NDArray[Any], contexts: NDArray[Any]
) -> NDArray[Any]:
    """Counts by which tables are made: of a single class, and of several if there are contexts.

    A table of no symbols would be none, so it has a zero.

    Args:
        counts: as of `with_tables`.
        rows: classes, uint8 [rows].
        columns: classes, uint8 [columns].
        contexts: that occur.

    Returns:
        int64 [tables, symbols]: of classes of rows and of columns, and of symbols; twice.
    """
    num_each, num_contexts, num_symbols = counts.shape
    width, num_single = num_symbols, 2 + num_each
    if len(contexts) > 0:
        width = max(width, _int64(rows.max()) + 1, _int64(columns.max()) + 1)
    num_tables = num_single + (2 + num_each * len(contexts) if len(contexts) > 0 else 0)
    of_tables = np.zeros((num_tables, width), np.int64)
    for each in range(num_each):
        for context in range(num_contexts):
            for symbol in range(num_symbols):
                of_tables[2 + each, symbol] += counts[each, context, symbol]
        for place, context in enumerate(contexts):
            table = num_single + 2 + each * len(contexts) + place
            of_tables[table, :num_symbols] = counts[each, context]
    if len(contexts) > 0:
        for of_row in rows:
            of_tables[num_single, of_row] += 1
        for of_column in columns:
            of_tables[num_single + 1, of_column] += 1
    for table in range(num_tables):
        if not of_tables[table].any():
            of_tables[table, 0] = 1
    return of_tables
