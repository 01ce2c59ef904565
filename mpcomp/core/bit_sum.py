"""A sum over the raw bits of tensors: 64 bits that change when one of theirs does.

Words of 64 bits are multiplied by odd numbers, which differ by position, and added up::

    sum_i  x_i a_i + (x_i >> 32) b_i  mod 2^64,     a_i, b_i odd

An odd factor takes no bit of a difference away, so a change within 32 bits always shows. The upper
halves count twice, as of the highest bits the product keeps few: without that, two of them would
cancel. Any other change goes unseen in about 1 of 2^32 cases. Integers add up alike in any order,
so all devices come to the same number, and an accelerator need not be waited for. It finds
accidents: whoever means to can make another tensor of the same sum.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["bit_sum"]

_WORD: Final = 8  # bytes
#: Words that are multiplied at a time on the CPU, so that temporaries stay in the cache.
_BLOCK: Final = 1 << 14
#: Of a linear congruential generator (Knuth, The Art of Computer Programming, 3.3.4).
_FACTOR: Final = 6364136223846793005
_STEP: Final = 1442695040888963407
#: Factors of the bytes behind the last whole word, and of the number of all.
_LAST, _LENGTH = 3935559000370003845, 666358933


def bit_sum(x: Tensor) -> Tensor:
    """The sum over the bits of ``x``, int64 [] on its device; equal tensors have equal ones.

    Elements count in the usual order, whatever their order in memory; shape and dtype do not.

    Args:
        x: of any dtype.
    """
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // _WORD * _WORD
    total = _sum(_words(raw[:whole]))
    if whole < raw.numel():
        last = torch.zeros(_WORD, dtype=torch.uint8, device=x.device)
        last[: raw.numel() - whole] = raw[whole:]
        total += _sum(last.view(torch.int64)) * _LAST
    return total + raw.numel() * _LENGTH  # as zeros at the end would not show


def _words(raw: Tensor) -> Tensor:
    """Bytes as int64; a copy where they do not begin at a whole word."""
    return (raw.clone() if raw.storage_offset() % _WORD else raw).view(torch.int64)


def _sum(words: Tensor) -> Tensor:
    """Sum of int64 [n] times their factors: those within a block times that of the block."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    factors = _factors(words.device)
    # An accelerator has many blocks at a time: each launch costs more than its memory.
    at_once = _BLOCK if words.device.type == "cpu" else _BLOCK << 10
    for start in range(0, words.numel(), at_once):
        part = words[start : start + at_once]
        full = part.numel() // _BLOCK
        of_blocks = _of_blocks(start // _BLOCK, full + 1, words.device)
        if full:
            blocks = part[: full * _BLOCK].view(full, _BLOCK)
            total += (_products(blocks, factors).sum(1) * of_blocks[:full]).sum()
        rest = part[full * _BLOCK :]
        total += _products(rest, factors[:, : rest.numel()]).sum() * of_blocks[full]
    return total


def _products(words: Tensor, factors: Tensor) -> Tensor:
    """Each word's part of the sum, int64 like ``words`` [..., n], of factors [2, n]."""
    return (words * factors[0]).add_((words >> 32).mul_(factors[1]))


@functools.lru_cache(8)
def _factors(device: torch.device) -> Tensor:
    """Odd numbers, int64 [2, words of a block]."""
    numbers = _mixed(np.arange(2 * _BLOCK, dtype=np.uint64)).reshape(2, -1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


def _of_blocks(first: int, count: int, device: torch.device) -> Tensor:
    """A factor for each block from ``first`` on, int64 [count]."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    return torch.from_numpy(_mixed(numbers + np.uint64(1 << 40)).view(np.int64)).to(device)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """An odd number of 64 bits for each."""
    mixed = numbers * np.uint64(_FACTOR) + np.uint64(_STEP)  # arrays wrap round
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_FACTOR)
    mixed ^= mixed >> np.uint64(29)
    return mixed | np.uint64(1)
