"""1-bit SGD: a bit for each element, two numbers for each column, and the error fed back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpcomp.compressors import OneBitColumns
from mpcomp.data_parallel.base import Controller, ReplicaMethod, RunInfo, Static
from mpcomp.feedback.memory import NO_MEMORY, Memory, Residual
from mpcomp.feedback.store import StoragePlan

__all__ = ["OneBit"]


@dataclass(frozen=True)
class OneBit(ReplicaMethod):
    """1-bit SGD. Spec ``onebitsgd``.

    Each column of a matrix arrives as the mean of its non-negative elements and that of its
    negative ones; what that leaves out is added to the next gradient. As published, the mean of all
    replicas is quantized again, with an error of its own that is fed back too; that is the
    two-phase path (`ReplicaNetwork`), which is chosen from about five replicas on.

    * Source: Seide et al., Interspeech 2014, section 3.
    * State: a residual of each parameter on each replica, and on the two-phase path one of the
      mean's piece that a replica quantizes.
    * Theory: a contraction of each column in error feedback, so that one's theorem for SGD; the
      paper has none.

    Args:
        storage: "fp32", "fp16", "bf16" or bits (1-8) of what is kept.

    Raises:
        ValueError: another storage.
    """

    storage: str | int = "fp32"
    spec: ClassVar[str] = "onebitsgd"

    def __post_init__(self) -> None:
        StoragePlan(self.storage)  # raises for a bad one

    def controller(self, run: RunInfo) -> Controller:
        return Static(OneBitColumns())

    def memory(self, *, compressed: bool) -> Memory:
        return Residual(StoragePlan(self.storage)) if compressed else NO_MEMORY
