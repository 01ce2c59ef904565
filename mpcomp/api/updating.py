"""The updates that `forward_backward` makes within a step, where they can be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mpcomp.api.gradient_hooks import has_hooks
from mpcomp.engines.base import Engine
from mpcomp.engines.updates import Updates, check_stashable
from mpcomp.links.tied_weights import Tie

__all__ = ["updates_within"]


def updates_within(
    update: Callable[[], object] | None,
    count: int,
    *,
    chunks: int,
    scaler: torch.amp.GradScaler | None,
    ties: Sequence[Tie],
    stages: Sequence[nn.Module],
    engine: Engine,
) -> Updates | None:
    """The updates of a call; None where its gradients are left to the caller.

    Args:
        update: changes the weights of this rank.
        count: how often within a step.
        chunks: microbatches of a step.
        scaler: of the losses, if any.
        ties: parameters that two stages have copies of.
        stages: of this rank.
        engine: that is to make them.

    Raises:
        ValueError: they cannot be made.
    """
    if update is None:
        if count != 1:
            raise ValueError(f"updates={count} without update: pass the function that makes one")
        return None
    if count < 1 or chunks % count:
        raise ValueError(
            f"updates={count} with chunks={chunks}: each update has as many microbatches as the "
            "others; pass a divisor of chunks"
        )
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "updates within a step, and a loss scaler, which skips steps as a whole: train in "
            "bf16, which needs no scaler, or leave update out"
        )
    tied = [tie.name for tie in ties if tie.trains]
    if tied:
        raise ValueError(
            f"updates within a step, and two stages have copies of {tied[0]}, which exchange their "
            "gradients at the end of it: let one rank have both uses (ties='together', which says "
            "why where it cannot), untie or freeze it, or leave update out"
        )
    hooked = [n for stage in stages for n, p in stage.named_parameters() if has_hooks(p)]
    if hooked:
        raise ValueError(
            f"updates within a step, and {hooked[0]} has a hook that waits for the step's whole "
            "gradient (register_post_accumulate_grad_hook): do in update what it does, or leave "
            "update out"
        )
    check_stashable(stages)
    engine.check_updates()
    return Updates(update, count, chunks // count)
