"""Numbers of `mpcomp.core.randomness`, of which each is computed by itself."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpcomp.core import randomness
from mpcomp.gpu.launch import launch

__all__ = ["hashed"]

_BLOCK: Final = 1024  # numbers of a program


@randomness.hashed.on("cuda")
def hashed(device: torch.device, numel: int, first: int, second: int) -> Tensor:
    """See `mpcomp.core.randomness.hashed`."""
    numbers = torch.empty(numel, dtype=torch.float32, device=device)
    programs = triton.cdiv(numel, _BLOCK)
    launch(hash_places, programs, numbers, numbers, numel, first, second, BLOCK=_BLOCK)
    return numbers


@triton.jit(do_not_specialize=["first", "second"])
def hash_places(out, numel, first, second, BLOCK: tl.constexpr):
    """The numbers of a block of places, by a hash of 32 bits."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = (place + first).to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= second.to(tl.uint32, bitcast=True)
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    mantissa = (x >> 8).to(tl.int32).to(tl.float32)
    tl.store(out + place, mantissa * (1.0 / (1 << 24)), mask=place < numel)
