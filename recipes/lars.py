"""LARS with the velocity of its paper, for learning rates that change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LARS"]


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling. You et al. 2017, algorithm 1.

    For the weights w of a layer with gradient g::

        local = trust * ||w|| / (||g|| + decay * ||w||)
        v <- momentum * v + lr * local * (g + decay * w),   w <- w - v

    The velocity v holds the learning rate, so a step that was taken into it at one rate keeps that
    rate. (The SGD of torch, and the LARS of most packages, multiply the velocity by the rate of the
    moment: the same as long as the rate stays, but in a warm-up they scale up what older steps
    left, and after a fall of the rate they scale it down.)

    Biases, norms and other parameters of fewer than two dimensions, and weights or gradients that
    are all zero, have local = 1.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: in [0, 1).
        weight_decay: decay.
        nesterov: step by momentum * v + lr * local * (g + decay * w), with the new v, in place
            of v.
        trust: how far a step may go, relative to the norm of the weights.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust: float = 1e-3,
    ) -> None:
        defaults = {
            **{"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            **{"nesterov": nesterov, "trust": trust},
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all parameters that have a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    self._step_one(w, w.grad, group)
        return loss

    def _step_one(self, w: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        change = g.add(w, alpha=decay)
        if w.dim() > 1:
            norm = torch.linalg.vector_norm(w)
            base = torch.linalg.vector_norm(g) + decay * norm
            known = (norm > 0) & (base > 0)
            change *= torch.where(known, group["trust"] * norm / base, torch.ones_like(norm))
        change *= group["lr"]
        state = self.state[w]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(w)
        velocity = state["velocity"].mul_(group["momentum"]).add_(change)
        w.sub_(change.add_(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity)
