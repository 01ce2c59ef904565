"""Many integers in blocks of rows, each coded by 32 states: a GPU's warp can write and read it.

Tables, classes and contexts are as of `mpcomp.entropy.classes` and `mpcomp.entropy.dithered`. What
differs is how symbols become words. Of a block's symbols, row by row, number n is coded by state
n mod 32, and a state takes its words in the order of the symbols. So 32 lanes take a step together,
and the place of a lane's word is a count of the lanes before it that need one.

Frequencies of a table sum to 2^12, and a state's low 12 bits say symbol, frequency and offset in
one look at a table of slots. Signs are symbols of their own: a table of magnitudes sums to 2^11,
and k and -k have the frequency of k each, zero twice its own. A symbol too rare for a frequency, or
above 127, goes by itself with its place; in its stead the most frequent symbol is coded.

A message, all numbers little-endian:

    u8 kind, u8 flag (magnitudes, signed, dithered), u8 k, tables and classes as of
    `mpcomp.entropy.classes`, u32 number of symbols that go by themselves, u32 place of each,
    i16 integer of each, zeros up to a multiple of 4 bytes, u32 words of each block,
    u32 states of each block [blocks, 32], u16 words of all blocks

A block has the number of rows with which it is nearest to 2^k symbols, the last one what is left.
Words are so many that what a block costs beside them is nothing: about 100 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.core.compiled import compiled
from mpcomp.core.kernels import kernel
from mpcomp.core.threads import each
from mpcomp.core.transfer import to_device, to_host
from mpcomp.core.vectors import EIGHT, Memory, Values, vectorized
from mpcomp.entropy import ans, dithered
from mpcomp.entropy.ans import LOWEST, unfolded
from mpcomp.entropy.classes import CONTEXTS, Classes, head, read, with_tables
from mpcomp.entropy.frequencies import Tables, shares_of, starts_of
from mpcomp.entropy.message import Reader, damaged
from mpcomp.entropy.tallies import counts_of, sums_of

__all__ = [
    "LANES",
    "MANY",
    "Places",
    "Way",
    "best",
    "check_ends",
    "chosen",
    "codes_on",
    "decode",
    "encode",
    "joined",
    "pop",
    "popped",
    "push",
    "pushed",
    "ways",
]

#: States of a block.
LANES: Final = 32
#: Integers from which on their tables are worth making.
MANY: Final = 1 << 17
#: The most bytes that it may take, as a share of what other kinds take.
_MOST: Final = 1.008
_BITS: Final = 12
_TOTAL: Final = 1 << _BITS
_ALONE: Final = 1 << 2 * _BITS  # the bit of what goes by itself
_SYMBOLS: Final = 256  # of a table; the last one has no frequency
_MAGNITUDE: Final = 127  # the largest that has a symbol
# Symbols of the integers from -128 to 127, where there are negative ones and where not.
_INTEGERS = np.arange(-128, 128)
_FOLDED = np.abs(2 * _INTEGERS) - (_INTEGERS < 0)
_UNSIGNED = np.where(_INTEGERS < 0, _SYMBOLS - 1, _INTEGERS)
_MAGNITUDES, _SIGNED, _DITHERED = range(3)
_BY_ITSELF: Final = 6  # bytes
# Bytes of a block beside its words: of 32 bits of a state, its words have taken about 8.
_OF_BLOCK: Final = 100
_SHARE: Final = 400  # one byte of so many of a block may go for that
_LEAST, _LARGEST = 15, 20  # k that is chosen
_SMALLEST_BLOCK, _LARGEST_BLOCK = 10, 24  # k that is read
_uint64: Any = np.uint64  # for a type checker, which knows no bits of numpy's own numbers
_int64: Any = np.int64
_int32: Any = np.int32
#: Where integers are: class of each row, uint8 [rows]; table of each column in rows of a class,
#: int32 [classes, columns]; and the number of tables for offsets of one size.
Places: TypeAlias = tuple[Tensor, Tensor, int]


@dataclass(frozen=True)
class Way:
    """A way to say integers in lanes.

    Attributes:
        flag: of the message.
        classes: of integers.
        tables: as of `mpcomp.entropy.classes.with_tables`.
        counts: how often each symbol occurs by each table but the first two, [tables, symbols].
        others: bytes of signs and large magnitudes that other kinds take beside symbols.
    """

    flag: int
    classes: Classes
    tables: Tables
    counts: NDArray[np.int64]
    others: float

    @cached_property
    def frequencies(self) -> NDArray[np.int64]:
        """Of the symbols that tables have, [tables, symbols]."""
        return _frequencies(self._costs, self.flag)

    @cached_property
    def num_alone(self) -> int:
        """The number of symbols that go by themselves."""
        there = np.zeros(self.counts.shape, np.bool_)
        there[:, : self.frequencies.shape[1]] = self.frequencies > 0
        return int(self.counts[~there].sum())

    @property
    def otherwise(self) -> float:
        """Bytes of the kind that has the same tables, nearly."""
        bits = _bits(self.counts, np.diff(starts_of(self._costs)), ans.TOTAL)
        return self._of_tables + bits / 8 + self.others

    @cached_property
    def num_bytes(self) -> float:
        """Bytes but for what blocks take beside their words, nearly."""
        bits = _bits(self.counts, self.frequencies, _total(self.flag))
        if self.flag == _SIGNED:
            bits += float(self.counts[:, 1:].sum())
        return self._of_tables + bits / 8 + _BY_ITSELF * self.num_alone

    @property
    def _costs(self) -> NDArray[np.uint8]:
        """Of the symbols of integers."""
        return self.tables[2:].costs[:, : self.counts.shape[1]]

    @cached_property
    def _of_tables(self) -> float:
        return self.tables[:2].num_bytes + len(self.tables[2:].to_bytes())

    def block(self, size: int) -> int:
        """k of so many integers: a block is as small as the share of what it costs allows."""
        symbols = _OF_BLOCK * _SHARE * size / max(self.num_bytes, 1.0)
        return int(np.clip(np.rint(np.log2(symbols)), _LEAST, _LARGEST))

    def all_bytes(self, rows: int, columns: int) -> float:
        """Bytes of a message of integers [rows, columns], nearly."""
        blocks = -(-rows // _rows_of_block(columns, self.block(rows * columns)))
        return self.num_bytes + _OF_BLOCK * blocks


def _bits(counts: NDArray[np.int64], frequencies: NDArray[np.int64], total: int) -> float:
    """Bits of the symbols that have a frequency."""
    counts = counts[:, : frequencies.shape[1]]
    there = frequencies > 0
    return float(counts[there] @ np.log2(total / frequencies[there]))


def ways(
    classes: Classes, counts: NDArray[np.signedinteger[Any]], sums: ans.Sums, *, dithers: bool
) -> list[Way]:
    """The ways to say integers.

    Args:
        classes: theirs, by their sums.
        counts: of each symbol in each context [`CONTEXTS`, symbols]; with ``dithers`` of the
            symbols of `mpcomp.entropy.dithered` in its contexts, which are so many more.
        sums: of the integers.
        dithers: whether they were rounded under a dither that may tell of them.
    """
    found = []
    if dithers:
        of_sizes = counts.reshape(dithered.SIZES, CONTEXTS, -1)
        found.append(_way(_DITHERED, classes, of_sizes, 0.0))
        counts = dithered.magnitudes_of(of_sizes)
    others = 2.0 * counts[:, ans.ESCAPE :].sum() + (sums.nonzero / 8 if sums.negative else 0)
    flag = _SIGNED if sums.negative else _MAGNITUDES
    found.append(_way(flag, classes, counts[None], others))
    return found


def _way(flag: int, classes: Classes, counts: NDArray[np.signedinteger[Any]], others: float) -> Way:
    """A way, with one class where several would cost more than they tell."""
    chosen, tables = with_tables(classes, counts)
    of_tables = counts[:, classes.occurring] if chosen is classes else counts.sum(1)
    return Way(flag, chosen, tables, of_tables.reshape(-1, counts.shape[-1]), others)


def best(found: Sequence[Way], rows: int, columns: int) -> Way | None:
    """The shortest way to say integers [rows, columns]; None where another kind is shorter yet."""
    way = min(found, key=lambda each: each.num_bytes)
    least = min(each.otherwise for each in found)
    return way if way.all_bytes(rows, columns) <= _MOST * least else None


def codes_on(device: torch.device) -> bool:
    """Whether a device other than the host codes blocks itself."""
    return device.type != "cpu" and pushed.own(device) is not None


def encode(q: Tensor, offsets: Tensor | None) -> list[bytes] | None:
    """The message of integers but for its kind; None where another kind takes less.

    Args:
        q: integers, int16 [rows, columns], contiguous, on the host or a device that codes.
        offsets: as of `mpcomp.entropy.encode`, int8 [rows, columns], contiguous, there too.
    """
    way = chosen(q, offsets, sums_of(q))
    return None if way is None else _written(q, offsets if way.flag == _DITHERED else None, way)


def chosen(q: Tensor, offsets: Tensor | None, sums: ans.Sums) -> Way | None:
    """The shortest way to say integers; None of zeros, and where another kind takes less.

    Args:
        q: as of `encode`.
        offsets: likewise.
        sums: of the integers.
    """
    if not sums.largest:
        return None
    classes = Classes.of(sums)
    if offsets is not None and not dithered.may_tell(q.numel(), sums):
        offsets = None
    counts = counts_of(q, offsets, classes, sums)
    found = ways(classes, counts, sums, dithers=offsets is not None)
    return best(found, q.shape[0], q.shape[1])


def _written(q: Tensor, offsets: Tensor | None, way: Way) -> list[bytes]:
    """The message of a way, but for its kind."""
    k = way.block(q.numel())
    ahead = [bytes([way.flag, k]), *head(way.classes, way.tables).parts()]
    symbols = _UNSIGNED if way.flag == _MAGNITUDES else _FOLDED
    entries = entries_of(_of_symbols(way.frequencies, way.flag), symbols)
    coded = pushed(
        q,
        _offsets(offsets, q.device),
        _places(way.classes, q.device),
        _tensor(entries.view(np.int32), q.device),
        _rows_of_block(q.shape[1], k),
        1 + sum(map(len, ahead)),  # behind the kind
    )
    return [*ahead, to_host(coded).numpy().tobytes()]


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.require(array, None, ["C", "W"])), device)


def _offsets(offsets: Tensor | None, device: torch.device) -> Tensor:
    """As kernels take them, of none a tensor without rows."""
    return torch.empty((0, 0), dtype=torch.int8, device=device) if offsets is None else offsets


@kernel
def pushed(
    q: Tensor,
    offsets: Tensor,
    where: Places,
    entries: Tensor,
    rows_each: int,
    behind: int,
) -> Tensor:
    """A message from the number of symbols that go by themselves on: uint8 [n].

    Args:
        q: integers, int16 [rows, columns].
        offsets: as of `push`.
        where: the integers are.
        entries: as of `push`, their bits as int32.
        rows_each: rows of a block.
        behind: number of bytes ahead of it.
    """
    by, of_entries, columns = offsets.numpy(), entries.numpy().view(np.uint32), q.shape[1]
    of_rows, tables, apart = where[0].numpy(), where[1].numpy(), where[2]

    def coded(rows: slice) -> tuple[NDArray[np.uint16], NDArray[np.uint32], NDArray[np.int64]]:
        of_block = q.numpy()[rows]
        words = np.empty(of_block.size + EIGHT, np.uint16)
        alone = np.empty(of_block.size + EIGHT, np.uint32)
        states = np.full(LANES, LOWEST, np.uint32)
        own = by[rows], of_rows[rows], tables, apart
        word_at, alone_at = push(of_block, *own, of_entries, states, words, alone)
        return words[word_at:], states, alone[alone_at:] + np.int64(rows.start * columns)

    words, states, alone = zip(*each(coded, _blocks(len(q), rows_each)), strict=True)
    return joined(
        q,
        behind,
        torch.from_numpy(np.concatenate(alone)),
        torch.tensor([len(of_block) for of_block in words]),
        torch.from_numpy(np.stack(states).view(np.int32)),
        torch.from_numpy(np.concatenate(words).view(np.int16)),
    )


def joined(
    q: Tensor, behind: int, places: Tensor, lengths: Tensor, states: Tensor, words: Tensor
) -> Tensor:
    """The end of a message, uint8 [n].

    Args:
        q: integers, int16 [rows, columns].
        behind: number of bytes ahead of it.
        places: of integers that go by themselves, int64, ascending.
        lengths: words of each block, int64.
        states: bits of uint32, int32 [blocks, `LANES`].
        words: bits of uint16 of all blocks, int16.
    """
    count = torch.tensor([len(places)], dtype=torch.int32, device=q.device)
    zeros = q.new_zeros(-(behind + 4 + _BY_ITSELF * len(places)) % 4, dtype=torch.uint8)
    values = q.reshape(-1)[places]
    parts = count, places.int(), values, zeros, lengths.int(), states, words
    there = (part.reshape(-1) for part in parts if part.numel())  # what is empty has any strides
    return torch.cat([part.view(torch.uint8) for part in there])


def decode(
    reader: Reader, rows: int, columns: int, offsets: Tensor | None, device: torch.device
) -> Tensor:
    """The integers of a message, int16 [rows, columns].

    Args:
        reader: of the message.
        rows: of its integers.
        columns: likewise.
        offsets: as of `encode`, on the device.
        device: where they go, the host or one that codes.

    Raises:
        RuntimeError: it cannot be of such integers.
    """
    flag, k = map(int, reader.array("u1", 2))
    if flag > (_SIGNED if offsets is None else _DITHERED):
        raise damaged(f"lanes of flag {flag}")
    if not _SMALLEST_BLOCK <= k <= _LARGEST_BLOCK or not rows * columns:
        raise damaged(f"blocks of 2^{k} for {rows * columns} integers")
    dithers = flag == _DITHERED
    tables_each = dithered.SIZES if dithers else 1
    classes, costs, coder = read(reader, rows, columns, tables_each, in_lanes=True)
    coder.check_end()
    (count,) = map(int, reader.array("<u4", 1))
    places, values = reader.array("<u4", count), reader.array("<i2", count)
    if count and int(places.max()) >= rows * columns:
        raise damaged("an integer behind the last one")
    if reader.array("u1", -reader.at % 4).any():
        raise damaged("bytes where there are zeros")
    rows_each = _rows_of_block(columns, k)
    num_blocks = -(-rows // rows_each)
    lengths = reader.array("<u4", num_blocks).astype(np.int64)
    states = reader.array("<u4", LANES * num_blocks).astype(np.uint32).reshape(-1, LANES)
    if (states < LOWEST).any():
        raise damaged("an impossible state")
    reader.check_end(2 * int(lengths.sum()))
    words = np.zeros(int(lengths.sum()) + LANES, np.uint16)
    words[:-LANES] = reader.array("<u2", len(words) - LANES)
    frequencies = _of_symbols(_frequencies(costs[2:], flag), flag)
    q = popped(
        _tensor(words.view(np.int16), device),
        _tensor(lengths, device),
        _tensor(states.view(np.int32), device),
        _offsets(offsets if dithers else None, device),
        _places(classes, device),
        _tensor(slots_of(frequencies, flag != _MAGNITUDES).view(np.int32), device),
        (rows, columns, rows_each),
    )
    if count:
        alone = _tensor(np.maximum(values, -np.iinfo(np.int16).max), device)
        q.view(-1)[_tensor(places.astype(np.int64), device)] = alone
    return q


@kernel
def popped(
    words: Tensor,
    lengths: Tensor,
    states: Tensor,
    offsets: Tensor,
    where: Places,
    slots: Tensor,
    shape: tuple[int, int, int],
) -> Tensor:
    """The inverse of `pushed`, but for what goes by itself: integers, int16 [rows, columns].

    Args:
        words: bits of uint16 of all blocks, and `LANES` zeros, int16.
        lengths: words of each block, int64.
        states: bits of uint32, 65536 or more, int32 [blocks, `LANES`].
        offsets: as of `push`.
        where: the integers are.
        slots: as of `slots_of`, their bits as int32.
        shape: rows, columns, and rows of a block.

    Raises:
        RuntimeError: a block does not end with its words, or in other states than encoding began.
    """
    rows, columns, rows_each = shape
    q, by = np.empty((rows, columns), np.int16), offsets.numpy()
    of_rows, tables, apart = where[0].numpy(), where[1].numpy(), where[2]
    blocks, ends = _blocks(rows, rows_each), lengths.cumsum(0).tolist()
    of_words, of_slots = words.numpy().view(np.uint16), slots.numpy().view(np.uint32)
    left = states.numpy().view(np.uint32).copy()

    def read_block(number: int) -> None:
        of_block, start = blocks[number], ends[number] - int(lengths[number])
        own = by[of_block], of_rows[of_block], tables, apart
        at = pop(of_words, start, *own, of_slots, left[number], q[of_block])
        check_ends(at == ends[number] and (left[number] == LOWEST).all())

    each(read_block, range(len(blocks)))
    return torch.from_numpy(q)


def check_ends(well: bool | np.bool_) -> None:
    """Raises RuntimeError unless blocks end as encoding began."""
    if not well:
        raise damaged("a block that does not end where it does")


def _places(classes: Classes, device: torch.device) -> Places:
    """Places of integers among tables, without the two tables of classes."""
    contexts = np.add.outer(np.arange(int(classes.rows.max()) + 1), classes.columns)
    tables = (classes.table_of - 2).astype(np.int32).take(contexts, mode="clip")
    return _tensor(classes.rows, device), _tensor(tables, device), len(classes.occurring)


def _rows_of_block(columns: int, k: int) -> int:
    return max(1, round((1 << k) / columns))


def _blocks(rows: int, rows_each: int) -> list[slice]:
    """Rows of each block."""
    return [slice(start, min(start + rows_each, rows)) for start in range(0, rows, rows_each)]


def _total(flag: int) -> int:
    """The sum of a table's frequencies: of magnitudes with signs, half of what states have."""
    return _TOTAL // 2 if flag == _SIGNED else _TOTAL


def _frequencies(costs: NDArray[np.uint8], flag: int) -> NDArray[np.int64]:
    """Of the symbols of tables with these costs, [tables, symbols]."""
    largest = 2 * _MAGNITUDE if flag == _DITHERED else _MAGNITUDE
    return shares_of(costs, _total(flag), largest)


def _of_symbols(frequencies: NDArray[np.int64], flag: int) -> NDArray[np.int64]:
    """Frequencies as states have them, of integers with signs: [tables, `_SYMBOLS`]."""
    if flag == _SIGNED:
        twice = frequencies.repeat(2, 1)  # k and -k by turns, and zero twice
        frequencies = np.concatenate([twice[:, :1] + twice[:, 1:2], twice[:, 2:]], 1)
    width = min(frequencies.shape[1], _SYMBOLS)
    of_symbols = np.zeros((len(frequencies), _SYMBOLS), np.int64)
    of_symbols[:, :width] = frequencies[:, :width]
    return of_symbols


@compiled
def entries_of(frequencies: NDArray[Any], symbols: NDArray[Any]) -> NDArray[Any]:
    """Entries that code each integer from -128 to 127 by each table: uint32 [tables * 256 + 1].

    An entry is the table's total less the frequency, 12 bits; the sum of frequencies before, 12
    bits; and whether the integer goes by itself, a bit. Such a one has the most frequent one's
    entry. The last entry is zero, which changes no state.

    Args:
        frequencies: of symbols, int64 [tables, symbols].
        symbols: of those integers, int64 [256].
    """
    num_tables, num_symbols = frequencies.shape
    entries = np.zeros(num_tables * len(symbols) + 1, np.uint32)
    of_symbols = np.zeros(num_symbols, np.int64)
    for table in range(num_tables):
        before = most = 0
        for symbol in range(num_symbols):
            frequency = frequencies[table, symbol]
            of_symbols[symbol] = _TOTAL - frequency | before << _BITS
            before += frequency
            if frequency > frequencies[table, most]:
                most = symbol
        for place, symbol in enumerate(symbols):
            there = frequencies[table, symbol] > 0
            entry = of_symbols[symbol] if there else of_symbols[most] | _ALONE
            entries[table * len(symbols) + place] = entry
    return entries


@compiled
def slots_of(frequencies: NDArray[Any], signed: bool) -> NDArray[Any]:
    """Symbols of all slots of each table: uint32 [(tables + 1) * slots].

    An entry is the symbol's integer, 8 bits; the place among its slots, 12 bits; and its frequency
    less one, 12 bits. The last table has zeros alone, which change no state.

    Args:
        frequencies: of symbols, int64 [tables, symbols].
        signed: whether symbols are folded integers.
    """
    num_tables, num_symbols = frequencies.shape
    slots = np.empty((num_tables + 1) * _TOTAL, np.uint32)
    at = 0
    for table in range(num_tables):
        for symbol in range(num_symbols):
            frequency = frequencies[table, symbol]
            value = unfolded(symbol) if signed else symbol
            entry, own = (frequency - 1) << 20 | value & 255, slots[at : at + frequency]
            for place in range(frequency):
                own[place] = entry | place << 8
            at += frequency
    last = slots[num_tables * _TOTAL :]
    for place in range(_TOTAL):
        last[place] = (_TOTAL - 1) << 20 | place << 8
    return slots


@compiled
def find_tables(
    tables: NDArray[Any],
    rows: NDArray[Any],
    offsets: NDArray[Any],
    apart: int,
    first: int,
    out: NDArray[Any],
) -> int:
    """The table of each integer of some rows; arguments are as of `push`.

    Args:
        tables: of columns.
        rows: classes.
        offsets: of integers.
        apart: tables of offsets of a size.
        first: of the rows.
        out: takes tables, uint32. Its length says how many rows; there may be fewer.

    Returns:
        The number of tables.
    """
    num_columns, n = tables.shape[1], 0
    for i in range(first, min(first + len(out) // num_columns, len(rows))):
        of_row, own = tables[rows[i]], out[n:]
        for j in range(num_columns):
            table = of_row[j]
            if len(offsets) > 0:
                offset = _int32(offsets[i, j])
                table += (offset ^ (offset >> 7)) * _int32(apart)
            own[j] = table
        n += num_columns
    return n


@compiled
def push(
    q: NDArray[Any],
    offsets: NDArray[Any],
    rows: NDArray[Any],
    tables: NDArray[Any],
    apart: int,
    entries: NDArray[Any],
    states: NDArray[Any],
    words: NDArray[Any],
    alone: NDArray[Any],
) -> tuple[int, int]:
    """Codes a block's integers, from the last to the first.

    Args:
        q: integers, int16 [rows, columns].
        offsets: theirs, int8 [rows, columns], where they are coded by these; else [0, 0].
        rows: classes, uint8 [rows].
        tables: the table of each column in rows of a class, int32 [classes, columns].
        apart: number of tables for offsets of one size.
        entries: of integers from -128 to 127, by table, and one that changes no state, uint32.
        states: `LANES`, uint32; they change.
        words: takes them from its end on, uint16; `EIGHT` more than there may be.
        alone: takes places of what goes by itself from its end on, uint32; as many.

    Returns:
        Where the words begin, and where those places do.
    """
    num_rows, num_columns = q.shape
    at_once = LANES // math.gcd(num_columns, LANES)  # then it is the first state's turn again
    places = np.full(at_once * num_columns, len(entries) - 1, np.uint32)
    word_at, alone_at = _uint64(len(words)), _uint64(len(alone))
    for first in range((num_rows - 1) // at_once * at_once, -1, -at_once):
        count = find_tables(tables, rows, offsets, apart, first, places)
        for i in range(first, min(first + at_once, num_rows)):
            own = places[(i - first) * num_columns :]
            for j in range(num_columns):
                value = _int32(q[i, j])
                if len(offsets) > 0 and offsets[i, j] >= 0:
                    value = -value
                own[j] = own[j] * _SYMBOLS + (value + 128 if -128 < value < 128 else 0)
        for start in range((count - 1) // LANES * LANES, -1, -LANES):
            number = first * num_columns + start
            word_at, alone_at = _push_lanes(
                places, start, number, entries, states, words, word_at, alone, alone_at
            )
    return _int64(word_at), _int64(alone_at)


@vectorized(results=2)
def _push_lanes(
    places: Memory,
    start: Values,
    number: Values,
    entries: Memory,
    states: Memory,
    words: Memory,
    word_at: Values,
    alone: Memory,
    alone_at: Values,
) -> tuple[Values, Values]:
    """Codes an integer by each state."""
    for lane in reversed(range(0, LANES, EIGHT)):
        x, entry = states.load(lane), entries.gather(places.load(start + lane))
        others = entry & _TOTAL - 1
        frequency = _TOTAL - others
        full = x > (frequency << 32 - _BITS) - 1
        words.store(word_at - EIGHT, full.compress(x.to(16)))
        word_at -= full.count()
        x = full.choose(x >> 16, x)
        states.store(lane, x + x // frequency * others + (entry >> _BITS & _TOTAL - 1))
        by_itself = entry > _ALONE - 1
        alone.store(alone_at - EIGHT, by_itself.compress((number + lane).onwards()))
        alone_at -= by_itself.count()
    return word_at, alone_at


@compiled
def pop(
    words: NDArray[Any],
    at: int,
    offsets: NDArray[Any],
    rows: NDArray[Any],
    tables: NDArray[Any],
    apart: int,
    slots: NDArray[Any],
    states: NDArray[Any],
    out: NDArray[Any],
) -> int:
    """The inverse of `push`, of any words.

    Args:
        words: of all blocks, uint16, and behind them `LANES` that are never needed.
        at: where the block's words begin.
        offsets: as of `push`, and so are those that follow.
        rows: classes.
        tables: the table of each column in rows of a class.
        apart: tables of offsets of a size.
        slots: of the tables, as of `slots_of`.
        states: as they were after `push`, uint32; they change.
        out: takes the integers, int16 [rows, columns].

    Returns:
        Where the block's words end; of damaged ones anywhere.
    """
    num_rows, num_columns = out.shape
    at_once, none = LANES // math.gcd(num_columns, LANES), len(slots) // _TOTAL - 1
    own = np.empty(at_once * num_columns, np.uint32)
    found = np.empty(len(own), np.int16)
    word_at, end = _uint64(at), _uint64(len(words) - LANES)
    for first in range(0, num_rows, at_once):
        count = find_tables(tables, rows, offsets, apart, first, own)
        own[count:] = none
        for start in range(0, count, LANES):
            read_at = min(word_at, end)
            word_at += _pop_lanes(words, read_at, slots, own, start, states, found)
        for i in range(first, min(first + at_once, num_rows)):
            of_row = found[(i - first) * num_columns :]
            for j in range(num_columns):
                minus = len(offsets) > 0 and offsets[i, j] >= 0
                out[i, j] = -of_row[j] if minus else of_row[j]
    behind: int = _int64(word_at)
    return behind


@vectorized(results=1)
def _pop_lanes(
    words: Memory,
    at: Values,
    slots: Memory,
    tables: Memory,
    start: Values,
    states: Memory,
    found: Memory,
) -> Values:
    """The integers that all states say, and how many words they take."""
    word_at = at
    for lane in range(0, LANES, EIGHT):
        x = states.load(lane)
        entry = slots.gather((tables.load(start + lane) << _BITS) + (x & _TOTAL - 1))
        high = x >> _BITS
        x = (entry >> 20) * high + high + (entry >> 8 & _TOTAL - 1)
        found.store(start + lane, ((entry & 255 ^ 128) - 128).to(16))
        needs = x < LOWEST
        given = x << 16 | needs.expand(words.load(word_at).to(32))
        states.store(lane, needs.choose(given, x))
        word_at += needs.count()
    return word_at - at
