"""The look for NaN and infinities of `mpcomp.core.checks`, in one pass over memory."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpcomp.core import checks
from mpcomp.core.context import TensorMeta
from mpcomp.gpu.launch import as_fp32, launch

__all__ = ["find_nonfinite", "has_nonfinite"]

_BLOCK: Final = 4096  # elements of a program
_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@checks.has_nonfinite.on("cuda")
def has_nonfinite(x: Tensor) -> Tensor:
    """See `mpcomp.core.checks.has_nonfinite`."""
    if x.dtype not in _TYPES:
        return checks.has_nonfinite.anywhere(x)
    flat = TensorMeta.of(x).flatten(x)
    found = torch.zeros((), dtype=torch.uint8, device=x.device)
    programs = triton.cdiv(x.numel(), _BLOCK)
    launch(find_nonfinite, programs, x, flat, found, x.numel(), BLOCK=_BLOCK)
    return found.view(torch.bool)


@triton.jit
def find_nonfinite(x, found, numel, BLOCK: tl.constexpr):
    """Stores 1 where a block has NaN or an infinity, whose exponents have all bits."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = as_fp32(tl.load(x + place, mask=place < numel, other=0.0))
    largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.store(found, 1, mask=largest >= 0x7F800000)
