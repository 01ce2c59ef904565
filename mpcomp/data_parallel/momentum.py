"""Momentum on the replicas' side of compression: what DGC and RedSync remember.

An optimizer's momentum would act on gradients that arrive late and all at once. So each replica has
the momentum u of its own gradients and sends from their sum v::

    u <- m u + g        v <- v + u        sent: some of v's elements, which then are 0 in u and v

The optimizer then must have no momentum of its own. Lin et al., ICLR 2018, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpcomp.data_parallel.memory import Draw, Memory, StateTensor
from mpcomp.feedback.slots import StoragePlan

__all__ = [
    "LocalMomentum",
    "MomentumCorrection",
    "check_momentum",
    "momentum_memory",
    "refuse_momentum",
]


class MomentumCorrection(Memory):
    """Momentum, sum and factor masking for a parameter that goes compressed.

    Where everything is sent, u is 0 after each step: the method then is SGD without momentum.

    Args:
        numel: of the parameter.
        device: of its gradients.
        momentum: m.
        nesterov: u <- m (u + g), v <- v + u + g.
        masking: set u to 0 where v was sent.
    """

    keeps = True

    def __init__(
        self, numel: int, device: torch.device, *, momentum: float, nesterov: bool, masking: bool
    ) -> None:
        super().__init__()
        plan = StoragePlan()
        self._velocity = self._state["velocity"] = StateTensor(numel, plan, device)
        self._sum = self._state["sum"] = StateTensor(numel, plan, device)
        self._momentum, self._nesterov, self._masking = momentum, nesterov, masking
        self._new: Tensor | None = None

    def wanted(self, gradient: Tensor, unit: float) -> Tensor:
        velocity = self._velocity.read(unit)
        if self._nesterov:
            velocity = self._momentum * (velocity + gradient)
            step = velocity + gradient
        else:
            velocity = self._momentum * velocity + gradient
            step = velocity
        self._new = velocity
        return self._sum.read(unit) + step

    def keep(self, rest: Tensor, positions: Tensor | None, unit: float, draw: Draw) -> None:
        velocity, self._new = self._new, None
        assert velocity is not None
        if self._masking:
            if positions is None:
                velocity = torch.zeros_like(velocity)
            else:
                velocity = velocity.index_fill(0, positions, 0.0)
        self._velocity.note(velocity, unit)
        self._sum.note(rest, unit)


class LocalMomentum(Memory):
    """Momentum of the mean, for a parameter that goes as it is; the same on all replicas."""

    def __init__(
        self, numel: int, device: torch.device, *, momentum: float, nesterov: bool
    ) -> None:
        super().__init__()
        self._velocity = self._state["velocity"] = StateTensor(numel, StoragePlan(), device)
        self._momentum, self._nesterov = momentum, nesterov

    def result(self, mean: Tensor, unit: float) -> Tensor:
        velocity = self._velocity.read(unit)
        if self._nesterov:
            velocity = self._momentum * (velocity + mean)
            self._velocity.note(velocity, unit)
            return velocity + mean
        velocity = self._momentum * velocity + mean
        self._velocity.note(velocity, unit)
        return velocity


def momentum_memory(
    numel: int,
    device: torch.device,
    momentum: float,
    *,
    compressed: bool,
    nesterov: bool = False,
    masking: bool = True,
) -> Memory:
    """The memory of a parameter of a method that has the momentum itself."""
    if not compressed:
        return LocalMomentum(numel, device, momentum=momentum, nesterov=nesterov)
    return MomentumCorrection(numel, device, momentum=momentum, nesterov=nesterov, masking=masking)


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
