"""Momentum on the replicas' side of compression: what DGC and RedSync remember.

An optimizer's momentum would act on gradients that arrive late and all at once. So each replica has
the momentum u of its own gradients and sends from their sum v::

    u <- m u + g        v <- v + u        sent: some of v's elements, which then are 0 in u and v

The optimizer then must have no momentum of its own. Lin et al., ICLR 2018, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpcomp.core.context import TensorMeta
from mpcomp.feedback.memory import Field, Memory, Sent, Side, State

__all__ = [
    "LocalMomentum",
    "MomentumCorrection",
    "advanced",
    "check_momentum",
    "momentum_memory",
    "refuse_momentum",
]


@dataclass(frozen=True)
class MomentumCorrection(Memory):
    """Momentum, sum and factor masking for a parameter that goes compressed.

    Where everything is sent, u is 0 after each step: the method then is SGD without momentum.

    Args:
        momentum: m.
        nesterov: u <- m (u + g), v <- v + u + g.
        masking: set u to 0 where v was sent.
    """

    momentum: float
    nesterov: bool = False
    masking: bool = True

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        return {"velocity": Field(Side.SENDER), "sum": Field(Side.SENDER, merge="owed")}

    def compensate(self, x: Tensor, state: State) -> Tensor:
        velocity, step = advanced(state["velocity"], x, self.momentum, self.nesterov)
        state["velocity"] = velocity
        return state["sum"] + step

    def sent(self, sent: Sent, state: State) -> None:
        if self.masking:
            velocity = state.new("velocity")
            if sent.positions is None:
                state["velocity"] = torch.zeros_like(velocity)
            else:
                masked = velocity.reshape(-1).index_fill(0, sent.positions, 0.0)
                state["velocity"] = masked.reshape(velocity.shape)
        state["sum"] = sent.left

    def second_stage_memory(self) -> Memory:
        # Momentum is the replicas' own; a mean that is sent on has a residual, no velocity.
        return MomentumCorrection(0.0)


@dataclass(frozen=True)
class LocalMomentum(Memory):
    """Momentum of the mean, for a parameter that goes as it is; the same on all replicas.

    Args:
        momentum: m.
        nesterov: as for `MomentumCorrection`.
    """

    momentum: float
    nesterov: bool = False

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        return {"velocity": Field(Side.RECEIVER)}

    def received(self, mean: Tensor, state: State) -> Tensor:
        velocity, step = advanced(state["velocity"], mean, self.momentum, self.nesterov)
        state["velocity"] = velocity
        return step


def advanced(
    velocity: Tensor, gradient: Tensor, momentum: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """The new velocity, and what an optimizer would step by, as `torch.optim.SGD` has them.

    With Nesterov's momentum the velocity is kept times ``momentum``, as it is used.
    """
    if nesterov:
        velocity = momentum * (velocity + gradient)
        return velocity, velocity + gradient
    velocity = momentum * velocity + gradient
    return velocity, velocity


def momentum_memory(
    momentum: float, *, compressed: bool, nesterov: bool = False, masking: bool = True
) -> Memory:
    """The memory of a parameter of a method that has the momentum itself."""
    if not compressed:
        return LocalMomentum(momentum, nesterov)
    return MomentumCorrection(momentum, nesterov, masking)


def check_momentum(momentum: float) -> None:
    """Raises ValueError unless ``momentum`` is in [0, 1)."""
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum}: expected a number in [0, 1)")


def refuse_momentum(method: object, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer with momentum."""
    if any(group.get("momentum") for group in optimizer.param_groups):
        raise ValueError(
            f"{method} has the momentum on each replica, and the optimizer has one of its own: "
            "make it with momentum=0"
        )
