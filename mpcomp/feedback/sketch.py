"""Count sketches: a vector held as sums of few of its elements, with random signs.

Element i of a row falls into cell h(i) with sign s(i)::

    S[c] = sum of s(i) x[i] over all i with h(i) = c          estimate of x[i] = s(i) S[h(i)]

The estimate is unbiased over the signs, and the sketch is linear: that of a sum is the sum of
sketches, so a change is added without decoding what is held. Every row has cells of its own, and
all rows, tensors and replicas share h and s, which are never drawn anew.

Two hashes are here. ``balanced``: each consecutive ``width`` elements fall into different cells, in
their order, turned by a random amount. So no cell holds more than its share, ``load`` elements,
a whole row collides nowhere if there is a cell for each element, and both ways are a few contiguous
passes that give the same bits on all devices. ``murmur``: that of the authors' code, whose fullest
cells hold two to three times as many, for comparisons.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from mpcomp.core.randomness import generator_for

__all__ = ["HASHES", "CountSketch", "VectorSketch", "num_cells"]

HASHES: Final = ("balanced", "murmur")
#: Longest row that is sketched as one: h and s take memory too.
LONGEST_ROW: Final = 1 << 16


def num_cells(columns: int, fraction: float) -> int:
    """Cells for a row of so many elements: ceil(fraction columns), 1 or more.

    Rounded up, so that no cell of a balanced hash holds more than ceil(1 / fraction) elements.
    """
    return min(columns, max(1, math.ceil(fraction * columns - 1e-9)))


class CountSketch:
    """Sketches of rows.

    Args:
        columns: elements of a row.
        fraction: cells per element, in (0, 1].
        hash: "balanced" or "murmur".

    Attributes:
        width: cells of a row.
        load: elements of the fullest cell.
    """

    def __init__(self, columns: int, fraction: float, hash: str = "balanced") -> None:
        assert columns >= 1 and 0 < fraction <= 1 and hash in HASHES
        self.columns = columns
        self.width = num_cells(columns, fraction)
        self._balanced = hash == "balanced"
        if self._balanced:
            self.load = -(-columns // self.width)
        else:
            self.load = int(_murmur(columns, self.width)[0].bincount().max())

    def sketch(self, x: Tensor) -> Tensor:
        """The sketch [n, width] of rows ``x`` fp32 [n, columns]."""
        if not self._balanced:
            cells, signs = _on(_murmur(self.columns, self.width), x.device)
            return x.new_zeros(x.shape[0], self.width).index_add_(1, cells, x * signs)
        turns, signs = _turned(self.columns, self.width)
        signed = x * signs.to(x.device)
        total = x.new_zeros(x.shape[0], self.width)
        for layer, turn in enumerate(turns):
            part = signed[:, layer * self.width : (layer + 1) * self.width]
            count = part.shape[1]
            first = min(count, self.width - turn)  # element j of a layer is in cell j + turn
            total[:, turn : turn + first] += part[:, :first]
            if first < count:
                total[:, : count - first] += part[:, first:]
        return total

    def estimate(self, held: Tensor) -> Tensor:
        """Decoded rows [n, columns] of a sketch [n, width]."""
        if not self._balanced:
            cells, signs = _on(_murmur(self.columns, self.width), held.device)
            return held.index_select(1, cells) * signs
        turns, signs = _turned(self.columns, self.width)
        x = held.new_empty(held.shape[0], self.columns)
        for layer, turn in enumerate(turns):
            part = x[:, layer * self.width : (layer + 1) * self.width]
            count = part.shape[1]
            first = min(count, self.width - turn)
            part[:, :first] = held[:, turn : turn + first]
            if first < count:
                part[:, first:] = held[:, : count - first]
        return x.mul_(signs.to(x.device))


class VectorSketch:
    """Sketches of vectors, cut into rows of ``columns`` elements; the last row may be shorter.

    Args:
        numel: elements of a vector.
        columns: of a row; by default nearly equal rows of at most 65,536 elements.
        fraction: cells per element, in (0, 1].
        hash: as for `CountSketch`.

    Attributes:
        numel: as given.
        cells: of a vector.
    """

    def __init__(
        self,
        numel: int,
        fraction: float,
        *,
        columns: int | None = None,
        hash: str = "balanced",
    ) -> None:
        self.numel = numel
        self._rows = -(-numel // (columns or LONGEST_ROW))
        self._row = CountSketch(columns or -(-numel // self._rows), fraction, hash)
        self.cells = self._rows * self._row.width

    def sketch(self, x: Tensor) -> Tensor:
        """The sketches [n, cells] of vectors [n, numel]."""
        x = F.pad(x, (0, self._rows * self._row.columns - self.numel))
        return self._row.sketch(x.reshape(-1, self._row.columns)).reshape(x.shape[0], self.cells)

    def estimate(self, held: Tensor) -> Tensor:
        """Decoded vectors [n, numel] of sketches [n, cells]."""
        rows = self._row.estimate(held.reshape(-1, self._row.width))
        return rows.reshape(held.shape[0], -1)[:, : self.numel]


@lru_cache(maxsize=256)
def _turned(columns: int, width: int) -> tuple[list[int], Tensor]:
    """The turn of each layer of ``width`` elements, and all signs fp32 [columns]."""
    generator = generator_for("count sketch", columns, width)
    layers = -(-columns // width)
    turns: list[int] = torch.randint(width, (layers,), generator=generator).tolist()
    if layers == 1:
        turns = [0]  # nothing collides, so nothing has to be turned
    signs = torch.randint(2, (columns,), generator=generator) * 2 - 1
    return turns, signs.to(torch.float32)


@lru_cache(maxsize=256)
def _murmur(columns: int, width: int) -> tuple[Tensor, Tensor]:
    """Cells int64 and signs fp32, both [columns], as in the authors' code."""
    cells = _mixed(columns, 994443, 609478) % width
    # The sign is the parity of the other hash after its reduction to a cell.
    signs = _mixed(columns, 994445, 609481) % width % 2 * 2 - 1
    return cells, signs.to(torch.float32)


def _mixed(columns: int, a: int, b: int) -> Tensor:
    """MurmurHash3's last step of a i + b, in signed 32 bits; int64 [columns], 0 or more."""
    h = torch.arange(columns, dtype=torch.int32) * a + b
    h ^= h >> 16
    h *= 0x85EBCA6B - (1 << 32)
    h ^= h >> 13
    h *= 0xC2B2AE35 - (1 << 32)
    h ^= h >> 16  # whose sign is copied down on the way: no number is negative after it
    return h.to(torch.int64)


def _on(pair: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    return pair[0].to(device), pair[1].to(device)
