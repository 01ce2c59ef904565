"""Blocks of `mpcomp.entropy.lanes`, each coded by a warp, whose lanes have a state each."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpcomp.entropy import lanes
from mpcomp.entropy.ans import LOWEST
from mpcomp.gpu.launch import launch

__all__ = ["move_words", "pop_block", "popped", "push_block", "pushed"]

_CHUNK: Final = 1024  # words that a program moves
_BITS: Final = tl.constexpr(lanes._BITS)
_UPPER: Final = tl.constexpr(32 - lanes._BITS)
_TOTAL: Final = tl.constexpr(lanes._TOTAL)
_SLOT: Final = tl.constexpr(lanes._TOTAL - 1)
_ALONE: Final = tl.constexpr(lanes._ALONE)
_LOWEST: Final = tl.constexpr(LOWEST)
_LANES: Final = tl.constexpr(lanes.LANES)


@lanes.popped.on("cuda")
def popped(
    words: Tensor,
    lengths: Tensor,
    states: Tensor,
    offsets: Tensor,
    where: lanes.Places,
    slots: Tensor,
    shape: tuple[int, int, int],
) -> Tensor:
    """See `mpcomp.entropy.lanes.popped`."""
    q = torch.empty(shape[:2], dtype=torch.int16, device=words.device)
    well = torch.empty(len(lengths), dtype=torch.uint8, device=words.device)
    launch(
        pop_block,
        len(lengths),
        words,
        words,
        lengths.cumsum(0),
        lengths,
        states,
        slots,
        *_arguments(where, offsets),
        q,
        well,
        len(words) - lanes.LANES,
        *shape,
        num_warps=1,
    )
    lanes.check_ends(bool(well.all()))
    return q


@lanes.pushed.on("cuda")
def pushed(
    q: Tensor,
    offsets: Tensor,
    where: lanes.Places,
    entries: Tensor,
    rows_each: int,
    behind: int,
) -> Tensor:
    """See `mpcomp.entropy.lanes.pushed`."""
    rows, columns = q.shape
    blocks, most = triton.cdiv(rows, rows_each), min(rows, rows_each) * columns
    apart = torch.empty((blocks, most), dtype=torch.int16, device=q.device)
    states = torch.empty((blocks, lanes.LANES), dtype=torch.int32, device=q.device)
    lengths = torch.empty(blocks, dtype=torch.int64, device=q.device)
    alone = torch.empty(q.numel(), dtype=torch.uint8, device=q.device)
    launch(
        push_block,
        blocks,
        q,
        q,
        entries,
        *_arguments(where, offsets),
        apart,
        lengths,
        states,
        alone,
        most,
        rows,
        columns,
        rows_each,
        num_warps=1,
    )
    ends = lengths.cumsum(0)
    words = torch.empty(int(ends[-1]), dtype=torch.int16, device=q.device)
    programs = blocks * triton.cdiv(most, _CHUNK)
    launch(move_words, programs, q, apart, ends, lengths, words, most, CHUNK=_CHUNK)
    return lanes.joined(q, behind, alone.nonzero()[:, 0], lengths, states, words)


def _arguments(where: lanes.Places, offsets: Tensor) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Arguments of kernels that tell the table of each integer."""
    return *where, offsets if len(offsets) else None


@triton.jit
def _table(row, column, num_columns, inside, of_rows, tables):
    """Tables of integers, but for what their offsets say."""
    of_row = tl.load(of_rows + row, mask=inside, other=0).to(tl.int32)
    return tl.load(tables + of_row * num_columns + column, mask=inside, other=0).to(tl.int64)


@triton.jit
def pop_block(
    words,
    ends,
    lengths,
    states,
    slots,
    of_rows,
    tables,
    num_tables,
    offsets,
    q,
    well,
    end,
    num_rows,
    num_columns,
    rows_each,
):
    """The integers of a block, and whether it ends as it should."""
    block, lane = tl.program_id(0).to(tl.int64), tl.arange(0, _LANES)
    first_row = block * rows_each
    size = (tl.minimum(num_rows - first_row, rows_each) * num_columns).to(tl.int32)
    behind = tl.load(ends + block)
    at = behind - tl.load(lengths + block)
    x = tl.load(states + block * _LANES + lane).to(tl.uint32, bitcast=True)
    start = size * 0  # of its type; the interpreter has no ranges that it computes
    while start < size:
        n = start + lane
        inside = n < size
        row, column = first_row + n // num_columns, n % num_columns
        place = first_row * num_columns + n
        table = _table(row, column, num_columns, inside, of_rows, tables)
        if offsets is not None:
            offset = tl.load(offsets + place, mask=inside, other=0).to(tl.int32)
            table += (offset ^ (offset >> 7)) * num_tables
        slot = (table << _BITS) + (x & _SLOT).to(tl.int64)
        entry = tl.load(slots + slot, mask=inside, other=0).to(tl.uint32, bitcast=True)
        high = x >> _BITS
        y = (entry >> _UPPER) * high + high + (entry >> 8 & _SLOT)
        needs = inside & (y < _LOWEST)
        need = needs.to(tl.int32)
        word = tl.load(words + tl.minimum(at + tl.cumsum(need, 0) - need, end), mask=needs, other=0)
        given = y << 16 | word.to(tl.uint16, bitcast=True).to(tl.uint32)
        x = tl.where(inside, tl.where(needs, given, y), x)
        at += tl.sum(need, 0)
        value = ((entry & 255) ^ 128).to(tl.int32) - 128
        if offsets is not None:
            value = tl.where(offset < 0, value, -value)
        tl.store(q + place, value.to(tl.int16), mask=inside)
        start += _LANES
    others = tl.sum((x != _LOWEST).to(tl.int32), 0)
    tl.store(well + block, ((at == behind) & (others == 0)).to(tl.uint8))


@triton.jit(do_not_specialize=["most"])
def push_block(
    q,
    entries,
    of_rows,
    tables,
    num_tables,
    offsets,
    apart,
    lengths,
    states,
    alone,
    most,
    num_rows,
    num_columns,
    rows_each,
):
    """The words of a block, at the end of its room, and its states."""
    block, lane = tl.program_id(0).to(tl.int64), tl.arange(0, _LANES)
    first_row = block * rows_each
    size = (tl.minimum(num_rows - first_row, rows_each) * num_columns).to(tl.int32)
    room, at = apart + block * most, most.to(tl.int32)
    x = tl.full([_LANES], _LOWEST, tl.uint32)
    start = (size - 1) // _LANES * _LANES
    while start >= 0:
        n = start + lane
        inside = n < size
        row, column = first_row + n // num_columns, n % num_columns
        place = first_row * num_columns + n
        table = _table(row, column, num_columns, inside, of_rows, tables)
        value = tl.load(q + place, mask=inside, other=0).to(tl.int32)
        if offsets is not None:
            offset = tl.load(offsets + place, mask=inside, other=0).to(tl.int32)
            table += (offset ^ (offset >> 7)) * num_tables
            value = tl.where(offset < 0, value, -value)
        symbol = tl.where((value > -128) & (value < 128), value + 128, 0)
        entry = tl.load(entries + (table << 8) + symbol, mask=inside, other=0).to(tl.uint32)
        less = entry & _SLOT
        frequency = _TOTAL - less
        full = inside & (x > (frequency << _UPPER) - 1)
        gives = full.to(tl.int32)
        at -= tl.sum(gives, 0)
        word = (x & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
        tl.store(room + at + tl.cumsum(gives, 0) - gives, word, mask=full)
        y = tl.where(full, x >> 16, x)
        y += y // frequency * less + (entry >> _BITS & _SLOT)
        x = tl.where(inside, y, x)
        tl.store(alone + place, ((entry & _ALONE) != 0).to(tl.uint8), mask=inside)
        start -= _LANES
    tl.store(states + block * _LANES + lane, x.to(tl.int32, bitcast=True))
    tl.store(lengths + block, (most - at).to(tl.int64))


@triton.jit
def move_words(apart, ends, lengths, words, most, CHUNK: tl.constexpr):
    """Moves the words of a block behind the words of earlier blocks."""
    program, chunks = tl.program_id(0).to(tl.int64), tl.cdiv(most, CHUNK)
    block, n = program // chunks, program % chunks * CHUNK + tl.arange(0, CHUNK)
    length = tl.load(lengths + block)
    word = tl.load(apart + block * most + most - length + n, mask=n < length, other=0)
    tl.store(words + tl.load(ends + block) - length + n, word, mask=n < length)
