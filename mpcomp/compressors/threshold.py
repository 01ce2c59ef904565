"""Finding the largest magnitudes of a large tensor faster: a threshold first, then few to sort.

The methods here differ in how they look for the threshold. As the layout of a message is known
without data, they do not send what happens to lie above it, as published, but exactly k elements:
the k largest of those, chosen as `TopK` does. Where at least k lie above, these are the k largest
of all, and where a search ends with fewer they are chosen from all. So both send what
``TopK(keep, scope="tensor")`` sends, bit for bit, whatever was drawn; only the time differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, SentPositions, check_keep, check_values
from mpcomp.compressors.bits import nonzero
from mpcomp.compressors.topk import kth_largest, largest_positions
from mpcomp.core.kernels import kernel

__all__ = ["RedSyncTopK", "SampledTopK"]

_SEARCHES = ("trimmed", "binary")
_CPU_BLOCK = 1 << 16  # elements compared at a time, so that temporaries stay in the cache
_ROUNDS = 10  # lowerings of a sampled threshold
_FEW = 1 << 12  # below so many elements there is nothing to gain


@dataclass(frozen=True)
class SampledTopK(SentPositions):
    """Top-k by a threshold from a sample. Spec ``sampledtopk:0.01``, ``sampledtopk:0.01+fp16``.

    Of a strided sample with a random start, the threshold is the magnitude that as many exceed as
    are to be kept; with fewer than k above, it is lowered to 0.8 of itself, up to ten times. Here
    the rank in the sample is two standard deviations deeper, so that the first threshold mostly
    serves.

    Published, what lies above the threshold is cut to k in the order of the indices (late ones
    are favoured least) unless it is more than 1.3 k, and fewer than k may be sent. Here always
    the k largest are sent, as `TopK` over the tensor sends, ties included.

    * Source: DGC (Lin et al., ICLR 2018) and its authors' code, for the sampled threshold.
    * Theory: that of `TopK` over the tensor, of which it sends the very elements.

    Args:
        keep: fraction of the elements to send, in (0, 1].
        sample: fraction of the elements to sample, in (0, 1]; at least 2 / keep of them are.
        values: compressor of the values sent.

    Raises:
        ValueError: keep or sample outside those, or a selecting value compressor.
        TypeError: values is not a compressor.
    """

    keep: float
    sample: float = 0.01
    values: Compressor | None = None
    spec: ClassVar[str] = "sampledtopk"
    spec_inner: ClassVar[str | None] = "values"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_values(self.values)
        if not 0 < self.sample <= 1:
            raise ValueError(
                f"sample={self.sample}: the fraction of elements to sample is in (0, 1]"
            )

    def choose(self, flat: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
        n = flat.numel()
        wanted = max(math.ceil(self.sample * n), math.ceil(2 * n / max(1, k)))
        stride = n // max(1, wanted)
        if k in (0, n) or n < _FEW or stride < 2:
            return largest_positions(flat.reshape(1, -1), k)
        start = 0 if generator is None else int(torch.randint(stride, (), generator=generator))
        threshold = self._threshold(flat[start::stride], k / n)
        for _ in range(1 + _ROUNDS):
            mask = at_least(flat, threshold)
            count = count_set(mask)
            if count >= k:
                return _largest_of(flat, mask, count, k)
            threshold *= 0.8
        return largest_positions(flat.reshape(1, -1), k)

    @staticmethod
    def _threshold(sample: Tensor, share: float) -> float:
        """The magnitude that a little more than ``share`` of the tensor should reach."""
        magnitudes = sample.abs()
        if magnitudes.dtype.itemsize < 4:
            magnitudes = magnitudes.to(torch.float32)
        expected = magnitudes.numel() * share
        rank = min(magnitudes.numel(), math.ceil(expected + 2 * math.sqrt(expected)))
        return float(kth_largest(magnitudes.reshape(1, -1), rank))


@dataclass(frozen=True)
class RedSyncTopK(SentPositions):
    """Top-k by a search between mean and maximum. Spec ``redsynctopk:0.01:search=binary``.

    With the mean m and the maximum M of the magnitudes, threshold(r) = m + r (M - m). "trimmed"
    lowers r from 0.9 by 0.1 until at least k elements reach it. "binary" halves the interval of r
    from [0, 1] until k to 2 k do, or the interval is 0.1 or shorter; as published it would stop at
    k / 2 already. Then the k largest of them are sent; where no threshold down to the mean is
    reached by k elements, as in tensors with heavy tails or many equal elements it may not be, the
    k largest of all. So this sends what `TopK` over the tensor sends, where the published search
    sends any number (2e-5 of a Student-t tensor for every keep).

    * Source: RedSync (Fang et al., J. Parallel Distrib. Comput. 2019), for the search.
    * Theory: that of `TopK` over the tensor, of which it sends the very elements.

    Args:
        keep: fraction of the elements to send, in (0, 1].
        search: "trimmed" (published for layers of medium size) or "binary" (for large ones).
        values: compressor of the values sent.

    Raises:
        ValueError: keep or search outside those, or a selecting value compressor.
        TypeError: values is not a compressor.
    """

    keep: float
    search: str = "trimmed"
    values: Compressor | None = None
    spec: ClassVar[str] = "redsynctopk"
    spec_inner: ClassVar[str | None] = "values"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_values(self.values)
        if self.search not in _SEARCHES:
            raise ValueError(f"search={self.search!r}: RedSyncTopK knows {', '.join(_SEARCHES)}")

    def choose(self, flat: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
        if k not in (0, flat.numel()):
            mean, largest = _mean_and_largest(flat)
            best: tuple[Tensor, int] | None = None
            counts = _Counts(flat, k, mean, largest)
            for mask, count in counts.trimmed() if self.search == "trimmed" else counts.binary():
                if count >= k and (best is None or count < best[1]):
                    best = mask, count
            if best is not None:
                return _largest_of(flat, *best, k)
        return largest_positions(flat.reshape(1, -1), k)


@dataclass(frozen=True)
class _Counts:
    """The elements that reach the thresholds of a search of RedSync: (mask, number)."""

    flat: Tensor
    k: int
    mean: float
    largest: float

    def _at(self, ratio: float) -> tuple[Tensor, int]:
        mask = at_least(self.flat, self.mean + ratio * (self.largest - self.mean))
        return mask, count_set(mask)

    def trimmed(self) -> Iterator[tuple[Tensor, int]]:
        for tenths in range(9, -1, -1):
            found = self._at(tenths / 10)
            yield found
            if found[1] >= self.k:
                return

    def binary(self) -> Iterator[tuple[Tensor, int]]:
        low, high = 0.0, 1.0
        while high - low > 0.1:
            middle = (low + high) / 2
            found = self._at(middle)
            yield found
            if self.k <= found[1] <= 2 * self.k:
                return
            low, high = (low, middle) if found[1] < self.k else (middle, high)
        if low == 0.0:  # none of them has been low enough
            yield self._at(0.0)


@kernel
def at_least(flat: Tensor, threshold: float) -> Tensor:
    """Mask of magnitudes that reach ``threshold``, or either is NaN, the largest: bool [n]."""
    return ~(flat.abs() < threshold)


@at_least.on("cpu")
def _at_least_on_cpu(flat: Tensor, threshold: float) -> Tensor:
    mask = torch.empty(flat.shape, dtype=torch.bool)
    magnitudes = torch.empty(min(_CPU_BLOCK, flat.numel()), dtype=flat.dtype)
    for start in range(0, flat.numel(), _CPU_BLOCK):
        block = flat[start : start + _CPU_BLOCK]
        here = magnitudes[: block.numel()]
        torch.abs(block, out=here)
        torch.lt(here, threshold, out=mask[start : start + _CPU_BLOCK]).logical_not_()
    return mask


@kernel
def count_set(mask: Tensor) -> int:
    """Number of elements of a bool tensor that are set."""
    return int(mask.sum())


@count_set.on("cpu")
def _count_set_on_cpu(mask: Tensor) -> int:
    # numpy counts bools many times as fast as torch
    return int(np.count_nonzero(mask.numpy()))


def _mean_and_largest(flat: Tensor) -> tuple[float, float]:
    """Mean and maximum of the magnitudes; one that overflows leads to thresholds of NaN."""
    magnitudes = flat.abs()
    return float(magnitudes.mean()), float(magnitudes.amax())


def _largest_of(flat: Tensor, mask: Tensor, count: int, k: int) -> Tensor:
    """Ascending positions of the ``k`` largest magnitudes of the ``count`` in ``mask``."""
    positions = nonzero(mask, count)
    among = largest_positions(flat.index_select(0, positions).reshape(1, -1), k)
    return positions.index_select(0, among)
