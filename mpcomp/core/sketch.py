"""A few numbers of floating-point tensors, nearly equal for tensors that are.

Elements are multiplied by fixed random numbers of mean 0 and variance 1, added up, and divided by
the tensor's norm: a random projection (Johnson and Lindenstrauss, 1984). Rounding changes such a
number by about its own relative size, other data by about one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = ["NUM_SKETCHED", "sketch", "sketches_agree"]

_BLOCK: Final = 1 << 14
_PROJECTIONS: Final = 2
#: Numbers of a sketch: projections, and the logarithm of the norm.
NUM_SKETCHED: Final = _PROJECTIONS + 1
#: The largest difference that counts as rounding.
_TOLERANCE: Final = 1e-4


def sketch(tensors: Sequence[Tensor]) -> list[float]:
    """The sketch of floating-point tensors, together; NaN if one of them has NaN or Inf."""
    total = torch.zeros(NUM_SKETCHED, dtype=torch.float64)
    for number, x in enumerate(tensors, start=1):
        # Of several tensors each counts alike, whatever its norm, and in its place.
        total += math.sqrt(number) * _sketch(x.detach().reshape(-1)).cpu()
    found: list[float] = total.tolist()
    return found


def sketches_agree(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two sketches are those of tensors that differ by rounding, or both of NaN or Inf."""
    return all(
        abs(one - two) <= _TOLERANCE * (1 + abs(one))
        or (not math.isfinite(one) and not math.isfinite(two))
        for one, two in zip(a, b, strict=True)
    )


def _sketch(flat: Tensor) -> Tensor:
    signs = _random(flat.device)
    sums = torch.zeros(_PROJECTIONS, dtype=torch.float64, device=flat.device)
    squares = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK].to(torch.float64)
        # Blocks must not be exchangeable: each has its own place among the random numbers.
        place = math.sqrt(2) * math.cos(1 + start // _BLOCK)
        sums += (signs[:, : block.numel()] @ block) * place
        squares += block @ block
    norm = squares.sqrt()
    known = torch.where(norm > 0, norm, 1.0)
    return torch.cat([sums / known, known.log().reshape(1)])


@functools.lru_cache(8)
def _random(device: torch.device) -> Tensor:
    """Numbers of mean 0 and variance 1, fp64 [projections, n]."""
    # sqrt(3) (2 u - 1), where u are the fractional parts of squares times irrational numbers.
    n = torch.arange(1, _BLOCK + 1, dtype=torch.float64)
    u = torch.stack([(n * n * (root**0.5)).frac() for root in (2, 3)])
    return (math.sqrt(3) * (2 * u - 1)).to(device)
