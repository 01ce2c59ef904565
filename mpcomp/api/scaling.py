"""Loss scalers on several ranks: all skip the same steps, each looking at its own gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpcomp.core.dtensor import local

__all__ = ["check_without_gradients", "gradients_overflowed", "overflow_gradients"]


def gradients_overflowed(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether one of the gradients here is not finite."""
    grads = [_values(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return False
    largest = torch.nn.utils.get_total_norm(grads, norm_type=math.inf)
    return not bool(largest.isfinite())


def overflow_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Makes this rank's scaler skip the step, as it must where another's gradients overflowed."""
    for parameter in parameters:
        if parameter.grad is not None:
            _values(parameter.grad).fill_(math.inf)


def _values(grad: Tensor) -> Tensor:
    """The numbers of a gradient that are here, which is dense, sparse or sharded."""
    return grad._values() if grad.is_sparse else local(grad)


def check_without_gradients(scaler: torch.amp.GradScaler, *, skipped: bool) -> None:
    """Gives this step's check for Inf and NaN a result where this rank has nothing to train.

    torch's ``step`` and ``update`` raise where an optimizer has no gradients, as that of a rank
    whose stages are all frozen. The check is done in `_unscale_grads_`, which torch's scaler for
    sharded models overrides likewise; what it finds in gradients stays as it is.

    Args:
        scaler: of this rank.
        skipped: whether the other ranks' scalers skip this step.
    """
    scaler._unscale_grads_ = partial(_checked, scaler, skipped)  # type: ignore[method-assign]


def _checked(
    scaler: torch.amp.GradScaler,
    skipped: bool,
    optimizer: torch.optim.Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    unscale: Any = type(scaler)._unscale_grads_
    found: dict[torch.device, Tensor] = unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    return found or {found_inf.device: found_inf.fill_(float(skipped))}
