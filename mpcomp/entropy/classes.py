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

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mpcomp.entropy import ans
from mpcomp.entropy.frequencies import ALIKE, Table
from mpcomp.entropy.message import FEW, Coder, Message, Place, Reader, damaged

__all__ = ["decode", "encode"]

_PER_OCTAVE = 2  # classes
_CONTEXTS = 24
# Of rows, and of columns. Were there as many as contexts, one row of zeros would move all others to
# the last context.
_CLASSES = 16


def encode(q: NDArray[np.int16], sums: ans.Sums) -> Message:
    """The message of integers [rows, columns], whose sums these are."""
    signs = np.zeros(sums.nonzero // 8 + 1, np.uint8)
    large = np.empty(sums.nonzero if sums.largest == ans.ESCAPE else 0, np.uint16)
    if q.size < FEW or not sums.largest:
        classes = _Classes.single(*q.shape)
        place = classes.place()
        counts, num_large = ans.tally(q, place.rows, place.columns, 1, sums.largest, signs, large)
        tables = [ALIKE, ALIKE, *Table.of_each(counts.astype(np.int64))]
    else:
        classes = _Classes.of(sums.by_row, sums.by_column)
        place = classes.place()
        counts, num_large = ans.tally(
            q, place.rows, place.columns, _CONTEXTS, sums.largest, signs, large
        )
        one, *tables = _tables_of(classes, counts)
        # Where little is not zero, its classes may cost more than they tell.
        if one.num_bytes + 2 * ALIKE.num_bytes <= sum(table.num_bytes for table in tables):
            classes, tables = _Classes.single(*q.shape), [ALIKE, ALIKE, one]
            place = classes.place()
    signs = signs[: -(-sums.nonzero // 8) if sums.negative else 0]
    return Message(
        ahead=bytes([len(tables) - 2]),
        tables=tables,
        coded=[
            *(
                (each[None].astype(np.int16), Place.alike(table, len(each)))
                for table, each in enumerate((classes.rows, classes.columns))
            ),
            (q, place),
        ],
        behind=large[:num_large].astype("<u2").tobytes() + signs[::-1].tobytes(),
    )


def decode(reader: Reader, rows: int, columns: int, *, signed: bool) -> NDArray[np.int16]:
    """The integers [rows, columns] of a message.

    Raises:
        RuntimeError: it cannot be of such integers.
    """
    (num_contexts,) = map(int, reader.array("u1", 1))
    coder = reader.coder(2 + num_contexts, rows * columns)
    of_rows, of_columns = (
        _popped(reader, coder, (1, count), Place.alike(table, count), signed=False)[0]
        for table, count in enumerate((rows, columns))
    )
    classes = _Classes(of_rows[0].astype(np.uint8), of_columns[0].astype(np.uint8))
    if len(classes.occurring) != num_contexts:
        raise damaged(f"{num_contexts} tables for {len(classes.occurring)} contexts")
    q, num_signs, num_large = _popped(
        reader, coder, (rows, columns), classes.place(), signed=signed
    )
    coder.check_end()
    large = reader.array("<u2", num_large)
    reader.check_end(-(-num_signs // 8))
    if num_large:
        escaped = np.flatnonzero(np.abs(q) == ans.ESCAPE)
        magnitudes = np.minimum(large, np.iinfo(np.int16).max).astype(np.int16)
        q.reshape(-1)[escaped] = np.where(q.reshape(-1)[escaped] < 0, -magnitudes, magnitudes)
    return q


@dataclass(frozen=True)
class _Classes:
    """Classes of rows and columns.

    Attributes:
        rows: class of each row, uint8 [rows].
        columns: class of each column, uint8 [columns].
    """

    rows: NDArray[np.uint8]
    columns: NDArray[np.uint8]

    @classmethod
    def single(cls, num_rows: int, num_columns: int) -> _Classes:
        """Rows and columns that all are alike."""
        return cls(np.zeros(num_rows, np.uint8), np.zeros(num_columns, np.uint8))

    @classmethod
    def of(cls, by_row: NDArray[np.int64], by_column: NDArray[np.int64]) -> _Classes:
        """The classes of magnitudes, of which some are not zero, by their sums."""
        mean_of_row, mean_of_column = by_row / len(by_column), by_column / len(by_row)
        mean = mean_of_row.mean()
        # What is added keeps a row of zeros near one that has a single one.
        rows = _PER_OCTAVE * np.log2((mean_of_row + 0.25 / len(by_column)) / mean)
        columns = _PER_OCTAVE * np.log2((mean_of_column + 0.25 / len(by_row)) / mean)
        return cls(_from_zero(rows), _from_zero(columns))

    @cached_property
    def occurring(self) -> NDArray[np.intp]:
        """The contexts that have elements, ascending."""
        rows, columns = (np.flatnonzero(np.bincount(each)) for each in (self.rows, self.columns))
        return np.unique(np.minimum(np.add.outer(rows, columns), _CONTEXTS - 1))

    def place(self) -> Place:
        """Places of integers, whose tables come behind those of classes."""
        table_of = np.zeros(_CONTEXTS, np.int64)
        table_of[self.occurring] = 2 + np.arange(len(self.occurring))
        return Place(self.rows, self.columns[None], table_of)


def _from_zero(octaves: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Whole numbers from 0, the largest for the largest; what is far below counts as alike."""
    rounded = np.rint(octaves)
    largest = int(rounded.max())
    classes = np.maximum(rounded - (largest - _CLASSES + 1), 0)
    from_zero: NDArray[np.uint8] = (classes - classes.min()).astype(np.uint8)
    return from_zero


def _tables_of(classes: _Classes, counts: NDArray[np.int32]) -> list[Table]:
    """The table of a single context, those of classes of rows and columns, and of the contexts.

    Args:
        classes: of integers.
        counts: of each symbol in each context, [`_CONTEXTS`, symbols].
    """
    of_both = classes.rows, classes.columns
    largest = max(int(each.max()) for each in of_both)
    num_symbols = max(counts.shape[1], largest + 1)
    of_each = np.zeros((3 + len(classes.occurring), num_symbols), np.int64)
    of_each[0, : counts.shape[1]] = counts.sum(0)
    of_each[1:3] = [np.bincount(each, minlength=num_symbols) for each in of_both]
    of_each[3:, : counts.shape[1]] = counts[classes.occurring]
    return Table.of_each(of_each)


def _popped(
    reader: Reader, coder: Coder, shape: tuple[int, int], place: Place, *, signed: bool
) -> tuple[NDArray[np.int16], int, int]:
    """The next symbols, with their signs if there are any; see `ans.pop`."""
    symbols = np.empty(shape, np.int16)
    at, num_signs, num_large = ans.pop(reader.data, reader.at, signed, *place, *coder, symbols)
    reader.go_to(at)
    return symbols, num_signs, num_large
