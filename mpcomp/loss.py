"""The loss of one step: each microbatch's share of it, and their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LossFn", "StepLoss"]

LossFn = Callable[[Tensor, Any], Tensor]


class StepLoss:
    """Called with a microbatch's output and target, gives what is to be differentiated.

    A mean is weighted by the microbatch's share of the rows, a sum is not. Nothing is rescaled
    after backward.

    Args:
        loss_fn: ``loss_fn(output, target)``.
        sizes: rows of the microbatches.
        scaler: loss scaler, if there is one.

    Attributes:
        total: sum of the weighted losses so far, detached and unscaled.
        rows: number of rows of this replica.
        factor: on every loss. Replicas average their gradients, so one that has more rows than
            another, or a sum, must weigh more for the average to be right.
    """

    def __init__(
        self, loss_fn: LossFn, sizes: Sequence[int], scaler: torch.amp.GradScaler | None
    ) -> None:
        self._loss_fn = loss_fn
        self._sizes = sizes
        self._scaler = scaler
        self._summed = getattr(loss_fn, "reduction", "mean") == "sum"
        self.rows = sum(sizes)
        self.total: Tensor | None = None
        self.factor = 1.0

    def share_with(self, all_rows: int, replicas: int) -> None:
        """Sets the factor for this many rows over all replicas."""
        self.factor = float(replicas if self._summed else replicas * self.rows / all_rows)

    def __call__(self, output: Tensor, target: Any, microbatch: int) -> Tensor:
        """The weighted and scaled loss, 0-d with its graph."""
        loss = self._loss_fn(output, target)
        if not self._summed:
            loss = loss * (self._sizes[microbatch] / self.rows)
        if self.factor != 1:
            loss = loss * self.factor
        self.total = loss.detach() if self.total is None else self.total + loss.detach()
        return self._scaler.scale(loss) if self._scaler is not None else loss
