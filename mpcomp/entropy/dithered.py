"""Integers that were rounded under a dither, coded by what it lets expect.

Of q = round(z + v) with a small z, and v in [-1/2, 1/2) that both ends draw, the sign is that of v
if there is one, and the nearer v is to a half the likelier there is. So a symbol says how far an
integer is to the side of its dither,

    t = q if v >= 0, else -q,       s = 2 t - 1 if t > 0, else -2 t

and a context has four tables, by |v|. Symbols are coded in classes as magnitudes are
(`mpcomp.entropy.classes`), without signs. That takes a tenth to a fifth less than magnitudes and
signs by themselves where most of z is within a step.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpcomp.core.compiled import compiled
from mpcomp.entropy import ans
from mpcomp.entropy.ans import folded, unfolded
from mpcomp.entropy.classes import CONTEXTS, Classes, message, popped, read, with_tables
from mpcomp.entropy.message import FEW, Message, Place, Reader

__all__ = [
    "LARGEST",
    "PARTS",
    "SIZES",
    "contexts_of",
    "decode",
    "encode",
    "integers_of",
    "magnitudes_of",
    "may_tell",
    "symbols_of",
]

#: Of a step, by which offsets are told apart.
PARTS: Final = 8
#: Sizes of an offset, without its sign.
SIZES: Final = PARTS // 2
#: Magnitude of integers that all have a symbol.
LARGEST: Final = (ans.ESCAPE - 1) // 2
_int64: Any = np.int64  # for a type checker, which knows no bits of numpy's own numbers


def may_tell(num: int, sums: ans.Sums) -> bool:
    """Whether so many integers are enough for the tables, and none too large for a symbol."""
    return num >= FEW and 0 < sums.largest <= LARGEST


def encode(
    q: NDArray[np.int16], offsets: NDArray[np.int8], classes: Classes
) -> tuple[Message, NDArray[np.int64]]:
    """The message of integers [rows, columns] under a dither that `may_tell`, and their counts.

    Args:
        q: integers.
        offsets: floor(`PARTS` v) of each, [rows, columns].
        classes: theirs.

    Returns:
        The message, and how often each magnitude occurs in each context, [`CONTEXTS`, symbols].
    """
    symbols = symbols_of(q, offsets)
    place = _place(classes, offsets)
    of_all = ans.tally(symbols, place.rows, place.columns, SIZES * CONTEXTS, int(symbols.max()))
    counts = of_all.reshape(SIZES, CONTEXTS, -1)
    chosen, tables = with_tables(classes, counts)
    if chosen is not classes:
        place = _place(chosen, offsets)
    return message(chosen, tables, symbols, place), magnitudes_of(counts)


def magnitudes_of(counts: NDArray[np.signedinteger[Any]]) -> NDArray[np.int64]:
    """Counts of magnitudes in each context, [`CONTEXTS`, magnitudes].

    Args:
        counts: of symbols by size of the offset, [`SIZES`, `CONTEXTS`, symbols].
    """
    of_symbols = counts.sum(0)
    num_contexts, num_symbols = of_symbols.shape
    magnitudes = np.zeros((num_contexts, num_symbols // 2 + 1), np.int64)
    magnitudes[:, : -(-num_symbols // 2)] = of_symbols[:, ::2]
    magnitudes[:, 1 : num_symbols // 2 + 1] += of_symbols[:, 1::2]
    return magnitudes


def decode(reader: Reader, rows: int, columns: int, offsets: NDArray[np.int8]) -> NDArray[np.int16]:
    """The integers [rows, columns] of a message.

    Raises:
        RuntimeError: it cannot be of such integers.
    """
    classes, _, coder = read(reader, rows, columns, SIZES)
    symbols, _, _ = popped(reader, coder, (rows, columns), _place(classes, offsets), signed=False)
    coder.check_end()
    reader.check_end(0)
    return integers_of(symbols, offsets)


def _place(classes: Classes, offsets: NDArray[np.int8]) -> Place:
    """Places of integers: that of their classes, and the size of their offset."""
    num_occurring = len(classes.occurring)
    table_of = np.add.outer(num_occurring * np.arange(SIZES), classes.table_of).reshape(-1)
    contexts = contexts_of(classes.rows, classes.columns, offsets, CONTEXTS)
    return Place(np.zeros(len(offsets), np.uint8), contexts, table_of)


@compiled
def contexts_of(
    rows: NDArray[Any], columns: NDArray[Any], offsets: NDArray[Any], num_each: int
) -> NDArray[Any]:
    """Contexts of integers, uint8 [rows, columns]: of a size of offsets behind those of another.

    Args:
        rows: classes, uint8 [rows].
        columns: classes, uint8 [columns].
        offsets: of the integers, int8 [rows, columns].
        num_each: contexts of offsets of a size.
    """
    contexts = np.empty(offsets.shape, np.uint8)
    for i in range(len(rows)):
        of_row = _int64(rows[i])
        for j in range(len(columns)):
            offset = _int64(offsets[i, j])
            size = offset ^ (offset >> 63)
            contexts[i, j] = size * num_each + min(of_row + _int64(columns[j]), num_each - 1)
    return contexts


@compiled
def symbols_of(q: NDArray[Any], offsets: NDArray[Any]) -> NDArray[Any]:
    """s of integers, int16 [rows, columns]; offsets as of `contexts_of`."""
    num_rows, num_columns = q.shape
    symbols = np.empty((num_rows, num_columns), np.int16)
    for i in range(num_rows):
        for j in range(num_columns):
            value = _int64(q[i, j])
            symbols[i, j] = folded(-value if offsets[i, j] >= 0 else value)
    return symbols


@compiled
def integers_of(symbols: NDArray[Any], offsets: NDArray[Any]) -> NDArray[Any]:
    """The inverse of `symbols_of`."""
    num_rows, num_columns = symbols.shape
    q = np.empty((num_rows, num_columns), np.int16)
    for i in range(num_rows):
        for j in range(num_columns):
            away = unfolded(_int64(symbols[i, j]))
            q[i, j] = -away if offsets[i, j] >= 0 else away
    return q
