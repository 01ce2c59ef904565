"""Drift correction: after an exchange each replica's Adam learns where the others went.

A replica that trains alone follows its own noise, which Adam's first moment m has in it for about
1 / (1 - beta1) steps more. An exchange after H steps at a rate lr moves the replica on by j, from
where it had come to where the mean of all is. Its steps, -lr m / (1 - beta1^t) / (sqrt(v^) + eps),
would have made that move with another m; a share c of the difference is put in::

    m <- m - c (1 - beta1^t) (sqrt(v^) + eps) j / (H lr)

so that each of its next steps has c j / H more, but for the decay of m. What j is all replicas have
been told anyway: nothing is sent for this, and nothing is kept.

SCAFFOLD (Karimireddy et al., ICML 2020, section 3, option II) likewise takes the mean gradient from
what parameters have moved by, and corrects gradients by its distance from a replica's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_correction", "correct", "has_first_moments"]


def check_correction(correction: float) -> None:
    """Raises ValueError unless ``correction`` is a share, in [0, 1]."""
    if not 0 <= correction <= 1:
        raise ValueError(f"correction={correction}: expected a share in [0, 1]; 0.5, say")


def has_first_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's Adam or AdamW, whose moments `correct` can read."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


@torch.no_grad()
def correct(
    optimizer: torch.optim.Optimizer, moved: Mapping[Tensor, Tensor], period: int, share: float
) -> None:
    """Puts a share of what an exchange has moved parameters by into their first moments.

    Parameters that the optimizer has not stepped yet, and those at a rate of 0, are left alone.

    Args:
        optimizer: Adam or AdamW.
        moved: parameters -> j, of the same shapes.
        period: H, steps since the exchange before.
        share: c, in [0, 1].
    """
    for group in optimizer.param_groups:
        lr = float(group["lr"])
        for parameter in group["params"]:
            jump, state = moved.get(parameter), optimizer.state.get(parameter)
            if jump is None or not state or not lr:
                continue
            scale = _scale(state, group)
            state["exp_avg"].sub_((scale * jump).mul_(share / (period * lr)))


def _scale(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """The first moment that makes a step as long as the rate: (1 - beta1^t) (sqrt(v^) + eps)."""
    step = float(state["step"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root: Tensor = second.float().sqrt() / math.sqrt(1 - beta2**step)
    return root.add_(float(group["eps"])).mul_(1 - beta1**step)
