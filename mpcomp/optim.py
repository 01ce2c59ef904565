"""What optimizers need from a pipeline as a whole: the norm over all stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpcomp.pipe import Pipeline

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    pipe: Pipeline, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clips the gradients of all stages by their common norm, in place, and returns the norm.

    Clipping acts on what the optimizer sees, after decompression; links' residuals stay in
    unclipped units. With a loss scaler call ``scaler.unscale_(optimizer)`` before.

    Args:
        pipe: a pipeline.
        max_norm: largest norm allowed, above 0.
        norm_type: of the p-norm.
        error_if_nonfinite: raise if the norm is NaN or Inf.

    Raises:
        ValueError: max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: expected a positive number")
    return torch.nn.utils.clip_grad_norm_(
        pipe.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
    )
