"""Error feedback as formulas: what a message leaves out is added to the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.memory import Field, Memory, Sent, Side, State
from mpcomp.feedback.slots import StoragePlan

__all__ = ["ErrorMemory", "Residual"]


class ErrorMemory(Memory):
    """w = x + d e; e <- w - sent. Seide et al. 2014; Stich et al. 2018, d = 1 in both.

    Attributes:
        decay: d, the part of the residual that is still due when the next message is.
    """

    decay: float = 1.0

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        return {"residual": Field(Side.SENDER, merge="owed")}

    def compensate(self, x: Tensor, state: State) -> Tensor:
        return x + self.due(state) if "residual" in state else x

    def due(self, state: State) -> Tensor:
        """The part of the residual that goes into the next message."""
        residual = state["residual"]
        return residual if self.decay == 1 else self.decay * residual

    def sent(self, sent: Sent, state: State) -> None:
        state["residual"] = sent.left

    def dense(self, x: Tensor, state: State) -> None:
        state.clear("residual")


@dataclass(frozen=True)
class Residual(ErrorMemory):
    """Error feedback as a memory alone, for methods that choose compressors themselves.

    Args:
        plan: precision and place of the residual.
    """

    plan: StoragePlan = field(default_factory=StoragePlan)

    @property
    def storage_plan(self) -> StoragePlan:
        return self.plan
