"""Bytes that integers would take, counted on the tensor's own device: nothing is coded.

Tables (`mpcomp.entropy.frequencies`) say what a symbol costs, and they follow from how
often each symbol occurs in each context. These counts are sums that any device can make at once,
where the coder itself goes from symbol to symbol. So a study on an accelerator can say what its
messages would have taken, within a thousandth or so, without waiting for a processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.entropy import ans, dithered, lanes, neighbours
from mpcomp.entropy.classes import CONTEXTS, Classes, with_tables
from mpcomp.entropy.coding import in_lines, max_bytes, slices
from mpcomp.entropy.frequencies import Tables, starts_of
from mpcomp.entropy.message import FEW
from mpcomp.entropy.tallies import counts_of, folded, sums_of

__all__ = ["count_bytes"]

# Bytes of the coder's states, of few integers and of many. Each has four, and one says symbols.
_STATE, _STATES = 3, 12
_SLICE = 4  # bytes of a slice's length


def count_bytes(
    q: Tensor,
    image: tuple[int, int] | None = None,
    offsets: Tensor | None = None,
    *,
    in_lanes: bool = False,
) -> int:
    """Bytes that `mpcomp.entropy.encode` takes for integers, nearly; at most `max_bytes`.

    Args:
        q: int16 [rows, columns], on any device, which is waited for.
        image: height and width of images, whose pixels the rows are, line by line.
        offsets: floor(`PARTS` v) of the dither of each, int8 [rows, columns], on that device.
        in_lanes: whether many may go in lanes; on a device that codes them they may anyway.
    """
    most = max_bytes(*q.shape)
    if q.numel() <= 1:
        return most
    if image is None:
        q = in_lines(q)
        offsets = None if offsets is None else in_lines(offsets)
    q = q.contiguous()
    if (in_lanes or lanes.codes_on(q.device)) and q.numel() >= lanes.MANY:
        of_lanes = _lanes_bytes(q, image, offsets)
        if of_lanes is not None:
            return min(most, math.ceil(of_lanes))
    parts = slices((q.shape[0], q.shape[1]), image)
    total = sum(_slice_bytes(q[s], image, None if offsets is None else offsets[s]) for s in parts)
    if len(parts) > 1:
        total += 1 + _SLICE * len(parts)
    return min(most, math.ceil(total))


@dataclass(frozen=True)
class _Way:
    """A way to say integers, as `mpcomp.entropy.message.Message` is, but for its symbols.

    Attributes:
        tables: of symbols.
        counts: how often each symbol is said by each of the last tables.
        others: bytes of all but tables and symbols.
    """

    tables: Tables
    counts: Sequence[NDArray[np.int64]]
    others: int

    @property
    def estimate(self) -> float:
        """Bytes by which the coder chooses a way."""
        return self.others + self.tables.num_bytes

    @property
    def num_bytes(self) -> float:
        """Bytes by the frequencies that the coder makes of the tables."""
        frequencies = np.diff(starts_of(self.tables.costs))
        bits = 0.0
        for counts, own in zip(self.counts, frequencies[-len(self.counts) :], strict=True):
            there = np.flatnonzero(counts)
            bits += float(counts[there] @ np.log2(ans.TOTAL / own[there]))
        return self.others + len(self.tables.to_bytes()) + bits / 8


def _slice_bytes(q: Tensor, image: tuple[int, int] | None, offsets: Tensor | None) -> float:
    """Bytes of the shortest way to say a slice, with its kind and the coder's states."""
    sums = sums_of(q)
    ways = [_by_classes(q, sums)]
    many = q.numel() >= FEW and sums.largest > 0
    if image is not None and many:
        ways += _by_neighbours(q, image, signed=sums.negative > 0)
    if offsets is not None and dithered.may_tell(q.numel(), sums):
        ways.append(_by_dither(q, offsets, sums))
    return 1 + min(ways, key=lambda way: way.estimate).num_bytes + (_STATES if many else _STATE)


def _lanes_bytes(q: Tensor, image: tuple[int, int] | None, offsets: Tensor | None) -> float | None:
    """Bytes in lanes, with the kind; None where they are not taken."""
    sums = sums_of(q)
    signed = sums.negative > 0
    if image is not None and sums.largest and _by_neighbours(q, image, signed=signed):
        return None
    way = lanes.chosen(q, offsets, sums)
    return None if way is None else 1 + way.all_bytes(q.shape[0], q.shape[1])


def _tally(contexts: Tensor, symbols: Tensor, num_contexts: int) -> NDArray[np.int64]:
    """Occurrences of each symbol in each context: int64 [contexts, symbols]."""
    width = int(symbols.max()) + 1
    places = (contexts * width + symbols).reshape(-1)
    counts = torch.bincount(places, minlength=num_contexts * width)
    return counts.cpu().numpy().reshape(num_contexts, width)


def _by_classes(q: Tensor, sums: ans.Sums) -> _Way:
    """See `mpcomp.entropy.classes`."""
    classes = Classes.of(sums)
    counts = counts_of(q, None, classes, sums)
    large = int(counts[:, ans.ESCAPE].sum()) if sums.largest == ans.ESCAPE else 0
    signs = -(-sums.nonzero // 8) if sums.negative else 0
    return _in_classes(classes, counts[None], 2 * large + signs)


def _by_dither(q: Tensor, offsets: Tensor, sums: ans.Sums) -> _Way:
    """See `mpcomp.entropy.dithered`."""
    classes = Classes.of(sums)
    counts = counts_of(q, offsets, classes, sums)
    return _in_classes(classes, counts.reshape(dithered.SIZES, CONTEXTS, -1))


def _in_classes(classes: Classes, counts: NDArray[np.int64], behind: int = 0) -> _Way:
    """The way of `mpcomp.entropy.classes.message`.

    Args:
        classes: of integers.
        counts: as of `with_tables`.
        behind: bytes behind the symbols.
    """
    chosen, tables = with_tables(classes, counts)
    if chosen is classes:
        of_classes = [np.bincount(each) for each in (classes.rows, classes.columns)]
        said = [*of_classes, *counts[:, classes.occurring].reshape(-1, counts.shape[-1])]
    else:
        said = list(counts.sum(1))
    return _Way(tables, said, 1 + behind)


def _by_neighbours(q: Tensor, image: tuple[int, int], *, signed: bool) -> list[_Way]:
    """See `mpcomp.entropy.neighbours`; nothing where they are not asked."""
    height, width = image
    if int(q.abs().max()) > neighbours.LARGEST:
        return []
    images = q.to(torch.int64).reshape(-1, height, width, q.shape[1])
    expected, contexts = neighbours.expect_all(images)
    d = images - expected
    symbols = folded(d) if signed else torch.where(d.abs() <= expected, folded(d), images)
    if signed:
        some = max(1, len(images) // neighbours.ONE_OF)
        if not bool(symbols[:some].sum() < 2 * images[:some].abs().sum()):
            return []
    counts = _tally(contexts, symbols.clamp(max=ans.ESCAPE), neighbours.CONTEXTS)
    large = int(counts[:, ans.ESCAPE].sum()) if counts.shape[1] > ans.ESCAPE else 0
    said = counts[counts.any(1)]
    return [_Way(Tables.of(said), list(said), -(-neighbours.CONTEXTS // 8) + 2 * large)]
