"""Entropy coding of small integers [rows, columns], of which most are zero or near it.

Magnitudes go through an asymmetric numeral system (`mpcomp.compressors.ans`), signs as a bit each.
How often which magnitude comes differs by row (a token) and by column (a channel), so each has a
class, and an element is coded by the table of its context:

    log2 E|q_ij|  ~  r_i + c_j,         context_ij = clip(r_i + c_j),    r, c in halves of an octave

Classes and tables (`mpcomp.compressors.frequencies`) are sent: some hundred bytes for a message of
any size, which is why a small one has a single context. All arithmetic of what both ends make is in
whole numbers, so that nothing depends on how a machine rounds.

    byte     0       1           2         then
             kind    contexts    tables    ANS states, ANS words, large magnitudes, signs

Where no integer is below zero, as behind a ReLU, the kind says so, and no signs are sent. Where
coding would gain nothing (noise of many bits) the integers are sent as int16.

Of images rows are pixels, and neighbours tell more of an integer than its channel does: where that
takes less, how far it is from what they let expect is coded, in contexts of theirs
(`mpcomp.compressors.neighbours`). No classes and no signs are sent then, but which contexts occur:

    byte     0       1 to 26             then
             kind    contexts, by bit    tables, ANS states, ANS words, large symbols
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpcomp.compressors import ans, neighbours
from mpcomp.compressors.ans import ESCAPE
from mpcomp.compressors.frequencies import ALIKE, Table, starts_of

__all__ = ["LARGEST", "decode", "encode", "max_bytes"]

#: Magnitudes are at most this.
LARGEST = 2**15 - 1

# 1 to 3 were by coders of before, which no longer are understood.
_PLAIN, _SIGNED, _UNSIGNED, _SIGNED_IMAGES, _UNSIGNED_IMAGES = 0, 4, 5, 6, 7
_PER_OCTAVE = 2  # classes
_CONTEXTS = 24
# Of rows, and of columns. Were there as many as contexts, one row of zeros would move all others to
# the last context.
_CLASSES = 16
_FEW = 4096  # elements for which tables of several contexts would cost more than they save
_ONE_OF = 8  # images is looked at first, where integers may be negative
_STATES = 4  # of more elements; as many bytes are lost


def max_bytes(rows: int, columns: int) -> int:
    """The most that `encode` takes for integers [rows, columns]."""
    return 1 + 2 * rows * columns


def encode(q: NDArray[np.int16], image: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """The coded form of integers [rows, columns], uint8 [n], n <= `max_bytes`.

    Args:
        q: magnitudes up to `LARGEST`.
        image: height and width of images, of which the rows are pixels.
    """
    q = np.require(q, np.int16, ["C", "W"])  # else there would be machine code for each kind
    parts = _encoded(q, image) if q.size > 1 else []  # of one, nothing is shorter than itself
    if not parts or sum(map(len, parts)) > max_bytes(*q.shape):
        parts = [bytes([_PLAIN]), q.astype("<i2").tobytes()]
    coded = bytearray().join(parts)  # no bytes, of which an array could not be changed
    return np.frombuffer(coded, np.uint8)


def decode(
    data: NDArray[np.uint8], rows: int, columns: int, image: tuple[int, int] | None = None
) -> NDArray[np.int16]:
    """Inverse of `encode`.

    Raises:
        RuntimeError: the data cannot be of such integers. (Of damaged data many are.)
    """
    if not len(data):
        raise RuntimeError("an empty message where coded integers were expected")
    data = np.require(data, np.uint8, ["C", "W"])
    kind = int(data[0])
    if kind == _PLAIN:
        if len(data) != max_bytes(rows, columns):
            raise _damaged(f"{len(data)} bytes, expected {max_bytes(rows, columns)}")
        plain = np.frombuffer(data, "<i2", offset=1).astype(np.int16)
        return np.maximum(plain, -LARGEST).reshape(rows, columns)
    if kind in (_SIGNED, _UNSIGNED):
        return _decoded(_Reader(data), rows, columns, signed=kind == _SIGNED)
    if kind in (_SIGNED_IMAGES, _UNSIGNED_IMAGES) and image is not None:
        signed = kind == _SIGNED_IMAGES
        return _decoded_images(_Reader(data), rows, columns, image, signed=signed)
    raise _damaged(f"kind {kind}")


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
    def sent(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Classes that go with the message."""
        return self.rows, self.columns

    @cached_property
    def occurring(self) -> NDArray[np.intp]:
        """The contexts that have elements, ascending."""
        rows, columns = (np.flatnonzero(np.bincount(each)) for each in (self.rows, self.columns))
        return np.unique(np.minimum(np.add.outer(rows, columns), _CONTEXTS - 1))

    def place(self) -> _Place:
        """Elements, whose tables come behind those of classes."""
        table_of = np.zeros(_CONTEXTS, np.int64)
        table_of[self.occurring] = 2 + np.arange(len(self.occurring))
        return _Place(self.rows, self.columns[None], table_of)


class _Place(NamedTuple):
    """Places of symbols among contexts and tables, as `ans.push` and `ans.pop` take them."""

    rows: NDArray[np.uint8]
    columns: NDArray[np.uint8]
    table_of: NDArray[np.int64]

    @classmethod
    def of_classes(cls, table: int, count: int) -> _Place:
        """A row of classes, which all are coded by one table."""
        columns = np.zeros((1, count), np.uint8)
        return cls(np.zeros(1, np.uint8), columns, np.full(1, table, np.int64))


@dataclass(frozen=True)
class _PixelContexts:
    """Contexts of integers of images, by what is around them.

    Attributes:
        pixels: class of each pixel, uint8 [pixels].
        integers: class of each integer, uint8 [pixels, channels].
        occurring: the contexts that have elements, ascending.
    """

    pixels: NDArray[np.uint8]
    integers: NDArray[np.uint8]
    occurring: NDArray[np.intp]

    #: Classes that go with the message.
    sent: ClassVar[tuple[()]] = ()

    def place(self) -> _Place:
        """Integers, whose tables are all there are."""
        return _Place(self.pixels, self.integers, _tables_of_pixels(self.occurring))


def _tables_of_pixels(occurring: NDArray[np.intp]) -> NDArray[np.int64]:
    """The table of each context of pixels; of one that does not occur, any."""
    table_of = np.zeros(neighbours.CONTEXTS, np.int64)
    table_of[occurring] = np.arange(len(occurring))
    return table_of


def _classes(octaves: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Whole numbers from 0, the largest for the largest; what is far below counts as alike."""
    rounded = np.rint(octaves)
    largest = int(rounded.max())
    classes = np.maximum(rounded - (largest - _CLASSES + 1), 0)
    from_zero: NDArray[np.uint8] = (classes - classes.min()).astype(np.uint8)
    return from_zero


# -- encoding --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Message:
    """A way to code integers.

    Attributes:
        head: the first bytes.
        symbols: what is coded, int16 [rows, columns].
        contexts: of these.
        tables: by which these and classes that are sent are coded.
        tail: the last bytes.
    """

    head: bytes
    symbols: NDArray[np.int16]
    contexts: _Contexts | _PixelContexts
    tables: list[Table]
    tail: bytes

    @property
    def num_bytes(self) -> float:
        """Its length, nearly."""
        return len(self.head) + sum(table.num_bytes for table in self.tables) + len(self.tail)

    def parts(self) -> list[bytes]:
        """The whole of it."""
        states, words = _states_and_words(self.symbols, self.contexts, starts_of(self.tables))
        tables = (table.to_bytes() for table in self.tables)
        return [self.head, *tables, states.astype("<u4").tobytes(), words.tobytes(), self.tail]


def _encoded(q: NDArray[np.int16], image: tuple[int, int] | None) -> list[bytes]:
    sums = ans.sums(q)
    message = _by_classes(q, *sums)
    _, _, largest, _, num_negative = sums
    signed = num_negative > 0
    if image is not None and q.size >= _FEW and largest and _may_be_alike(q, *image, signed):
        by_neighbours = _by_neighbours(q, *image, signed)
        message = min(message, by_neighbours, key=lambda each: each.num_bytes)
    return message.parts()


def _may_be_alike(q: NDArray[np.int16], height: int, width: int, signed: bool) -> bool:
    """Whether neighbours may tell of integers; where these have signs, by some of the images.

    Noise, as gradients are, would cost the time of looking for what is not there.
    """
    if max(int(q.max()), -int(q.min())) > neighbours.LARGEST:
        return False
    if not signed:
        return True
    some = q[: height * width * max(1, len(q) // (_ONE_OF * height * width))]
    symbols, _, _ = neighbours.symbols_of(some, height, width, signed)
    # A symbol is about twice as large as what it is off.
    return bool(symbols.sum(dtype=np.int64) < 2 * np.abs(some).sum(dtype=np.int64))


def _by_classes(
    q: NDArray[np.int16],
    by_row: NDArray[np.int64],
    by_column: NDArray[np.int64],
    largest: int,
    num_signs: int,
    num_negative: int,
) -> _Message:
    """Magnitudes by classes of rows and columns.

    Args:
        q: integers.
        by_row: this, and what follows, as of `ans.sums`.
    """
    signs = np.zeros(num_signs // 8 + 1, np.uint8)
    large = np.empty(num_signs if largest == ESCAPE else 0, np.uint16)
    if q.size < _FEW or not largest:
        contexts = _Contexts.single(*q.shape)
        place = contexts.place()
        counts, num_large = ans.tally(q, place.rows, place.columns, 1, largest, signs, large)
        tables = [ALIKE, ALIKE, *Table.of_each(counts.astype(np.int64))]
    else:
        contexts = _Contexts.of(by_row, by_column)
        place = contexts.place()
        counts, num_large = ans.tally(
            q, place.rows, place.columns, _CONTEXTS, largest, signs, large
        )
        one, *tables = _tables_of(contexts, counts)
        # Where little is not zero, its classes may cost more than they tell.
        if one.num_bytes + 2 * ALIKE.num_bytes <= sum(table.num_bytes for table in tables):
            contexts, tables = _Contexts.single(*q.shape), [ALIKE, ALIKE, one]
    signs = signs[: -(-num_signs // 8) if num_negative else 0]
    return _Message(
        bytes([_SIGNED if num_negative else _UNSIGNED, len(tables) - 2]),
        q,
        contexts,
        tables,
        large[:num_large].astype("<u2").tobytes() + signs[::-1].tobytes(),
    )


def _by_neighbours(q: NDArray[np.int16], height: int, width: int, signed: bool) -> _Message:
    """Distances of integers of images from what their neighbours let expect."""
    symbols, pixels, integers = neighbours.symbols_of(q, height, width, signed)
    largest = min(int(symbols.max()), ESCAPE)
    no_signs = np.zeros(q.size // 8 + 1, np.uint8)
    large = np.empty(q.size if largest == ESCAPE else 0, np.uint16)
    counts, num_large = ans.tally(
        symbols, pixels, integers, neighbours.CONTEXTS, largest, no_signs, large
    )
    occurs = counts.any(1)
    kind = _SIGNED_IMAGES if signed else _UNSIGNED_IMAGES
    return _Message(
        bytes([kind]) + np.packbits(occurs).tobytes(),
        symbols,
        _PixelContexts(pixels, integers, np.flatnonzero(occurs)),
        Table.of_each(counts[occurs].astype(np.int64)),
        large[:num_large][::-1].astype("<u2").tobytes(),
    )


def _num_states(num_elements: int, starts: NDArray[np.int64]) -> int:
    """States for so many elements, one if the tables say all of them."""
    alike = starts[:, 1:] - starts[:, :-1] == ans.TOTAL
    return 1 if num_elements < _FEW or alike.any(1).all() else _STATES


def _tables_of(contexts: _Contexts, counts: NDArray[np.int32]) -> list[Table]:
    """The table of a single context, those of classes of rows and columns, and of the contexts.

    Args:
        contexts: of integers.
        counts: of each symbol in each context, [`_CONTEXTS`, symbols].
    """
    largest = max(int(each.max()) for each in contexts.sent)
    num_symbols = max(counts.shape[1], largest + 1)
    of_each = np.zeros((3 + len(contexts.occurring), num_symbols), np.int64)
    of_each[0, : counts.shape[1]] = counts.sum(0)
    of_each[1:3] = [np.bincount(each, minlength=num_symbols) for each in contexts.sent]
    of_each[3:, : counts.shape[1]] = counts[contexts.occurring]
    return Table.of_each(of_each)


def _states_and_words(
    symbols: NDArray[np.int16], contexts: _Contexts | _PixelContexts, starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """ANS states that say classes and symbols, with the words that follow them."""
    coded = [
        *(
            (classes[None].astype(np.int16), _Place.of_classes(table, len(classes)))
            for table, classes in enumerate(contexts.sent)
        ),
        (symbols, contexts.place()),
    ]
    out = np.empty(2 * sum(each.size for each, _ in coded), np.uint8)  # a word each at most
    at = len(out)
    states = np.full(_num_states(symbols.size, starts), ans.LOWEST, np.int64)
    for each, place in reversed(coded):
        at = ans.push(each, place.rows, place.columns, place.table_of, starts, states, out, at)
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

    def table(self) -> Table:
        """The next table."""
        try:
            return Table.read(lambda num_bytes: self.array("u1", num_bytes))
        except ValueError as error:
            raise _damaged(str(error)) from error

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

    def images(
        self,
        image: tuple[int, int],
        occurring: NDArray[np.intp],
        starts: NDArray[np.int64],
        states: NDArray[np.int64],
        out: NDArray[np.int16],
        *,
        signed: bool,
    ) -> int:
        """The next integers, of images, and how many symbols are large; see `ans.pop_images`."""
        first, table_of = ans.buckets(starts), _tables_of_pixels(occurring)
        self._at, num_large = ans.pop_images(
            self._data, self._at, signed, *image, table_of, starts, first, states, out
        )
        if self._at < 0:
            raise _damaged("it ends too early")
        return num_large

    def check_end(self, num_bytes: int) -> None:
        """Whether so many bytes are left."""
        if len(self._data) - self._at != num_bytes:
            raise _damaged(f"{len(self._data) - self._at} bytes left, expected {num_bytes}")


def _decoded(reader: _Reader, rows: int, columns: int, *, signed: bool) -> NDArray[np.int16]:
    (num_contexts,) = map(int, reader.array("u1", 1))
    starts = starts_of([reader.table() for _ in range(2 + num_contexts)])
    first = ans.buckets(starts)
    states = reader.states(_num_states(rows * columns, starts))
    classes = [
        reader.symbols(
            (1, count), _Place.of_classes(table, count), starts, first, states, signed=False
        )[0][0]
        for table, count in enumerate((rows, columns))
    ]
    contexts = _Contexts(*(each.astype(np.uint8) for each in classes))
    if len(contexts.occurring) != num_contexts:
        raise _damaged(f"{num_contexts} tables for {len(contexts.occurring)} contexts")
    q, num_signs, num_large = reader.symbols(
        (rows, columns), contexts.place(), starts, first, states, signed=signed
    )
    _check_first(states)
    large = reader.array("<u2", num_large)
    reader.check_end(-(-num_signs // 8))
    if num_large:
        escaped = np.flatnonzero(np.abs(q) == ESCAPE)
        magnitudes = np.minimum(large, LARGEST).astype(np.int16)
        q.reshape(-1)[escaped] = np.where(q.reshape(-1)[escaped] < 0, -magnitudes, magnitudes)
    return q


def _decoded_images(
    reader: _Reader, rows: int, columns: int, image: tuple[int, int], *, signed: bool
) -> NDArray[np.int16]:
    bits = np.unpackbits(reader.array("u1", -(-neighbours.CONTEXTS // 8)))
    occurring = np.flatnonzero(bits[: neighbours.CONTEXTS])
    if not len(occurring):
        raise _damaged("no contexts")
    starts = starts_of([reader.table() for _ in occurring])
    states = reader.states(_num_states(rows * columns, starts))
    q = np.empty((rows, columns), np.int16)
    num_large = reader.images(image, occurring, starts, states, q, signed=signed)
    _check_first(states)
    reader.check_end(2 * num_large)
    return q


def _check_first(states: NDArray[np.int64]) -> None:
    """Whether all is said: states are as encoding began with them."""
    if (states != ans.LOWEST).any():
        raise _damaged("a state that no encoder begins with")


def _damaged(what: str) -> RuntimeError:
    return RuntimeError(
        f"a coded message that says nothing ({what}): it is damaged, or the two ends have "
        "different methods"
    )
