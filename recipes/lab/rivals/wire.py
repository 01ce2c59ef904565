"""A cut in one process, as far as numbers are concerned: what crosses it is bf16, both ways."""

from __future__ import annotations

from torch import Tensor

#: Bytes of a number that crosses.
NUMBER_BYTES = 2


def crossing(z: Tensor) -> Tensor:
    """The tensor as it arrives: rounded to bf16, and its gradient on the way back likewise."""
    return z.bfloat16().to(z.dtype)  # autograd casts the gradient the same way, backwards
