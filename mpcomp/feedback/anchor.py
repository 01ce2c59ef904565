"""Local SGD's memory: a parameter is due, what it has moved by is sent, an outer step comes of it.

Between two messages of a parameter each replica moves its own copy x away from the anchor, where
all of them were. The distance is what is compressed, and the mean of what arrives is the gradient
of an outer optimizer, SGD with Nesterov's momentum, whose result is the next anchor::

    sent: a - x        v <- m v + mean        a <- a - lr (m v + mean)        result: a

Anchor and velocity are alike on all replicas, as they follow from means alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpcomp.core.context import TensorMeta
from mpcomp.feedback.memory import Field, FieldState, FieldStorage, Memory, Sent, Side, State
from mpcomp.feedback.momentum import advanced
from mpcomp.feedback.state import as_rows
from mpcomp.feedback.store import StoragePlan

__all__ = ["ANCHOR", "OUTER_VELOCITY", "Anchored"]

#: The field that must be known before the first message: where all replicas begin.
ANCHOR = "anchor"
OUTER_VELOCITY = "outer_velocity"


@dataclass(frozen=True)
class Anchored(Memory):
    """The outer step of DiLoCo (Douillard et al. 2023, algorithm 1), round what deltas need.

    Args:
        inner: remembers what messages leave out of a - x.
        lr: rate of the outer step.
        momentum: m, in [0, 1); with 0 there is no velocity.
    """

    inner: Memory
    lr: float
    momentum: float

    @property
    def storage_plan(self) -> StoragePlan:
        return self.inner.storage_plan

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        # Exact, also beside a residual in few bits: replicas return to it again and again.
        exact = Field(Side.RECEIVER, kept=_Fp32Rows(slot.numel))
        own = (ANCHOR, OUTER_VELOCITY) if self.momentum else (ANCHOR,)
        return {**self.inner.fields(slot), **dict.fromkeys(own, exact)}

    def compensate(self, x: Tensor, state: State) -> Tensor:
        return self.inner.compensate(state[ANCHOR] - x, state)

    def sent(self, sent: Sent, state: State) -> None:
        self.inner.sent(replace(sent, x=state[ANCHOR] - sent.x), state)

    def received(self, mean: Tensor, state: State) -> Tensor:
        step = self.inner.received(mean, state)
        if self.momentum:
            velocity, step = advanced(state[OUTER_VELOCITY], step, self.momentum, nesterov=True)
            state[OUTER_VELOCITY] = velocity
        anchor = state[ANCHOR] - self.lr * step
        state[ANCHOR] = anchor
        return anchor

    def second_stage_memory(self) -> Memory:
        return self.inner.second_stage_memory()


@dataclass(frozen=True)
class _Fp32Rows(FieldStorage):
    """As it is, in fp32, whatever precision other fields of the memory are stored in.

    Attributes:
        numel: of a slot.
    """

    numel: int

    def state(self, plan: StoragePlan, device: torch.device) -> FieldState:
        return as_rows(self.numel, replace(plan, storage="fp32"), device)
