"""An engine: what runs the stages of one rank, and moves the messages between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpcomp.comm.mesh import Mesh
from mpcomp.core.context import Step
from mpcomp.core.loss import StepLoss
from mpcomp.engines.updates import Updates

__all__ = ["Engine", "choose_finite"]


class Engine(ABC):
    """Runs the stages of one rank.

    Attributes:
        name: as given to ``mpcomp.pipeline(engine=...)``.
        mesh: the ranks.
        output_place: the rank of a pipeline that has the last stage.
        waited_s: seconds of training that this rank has waited for messages.
        in_flight: microbatches that the first stage has under way, where that can be chosen.
        together: whether the last stage is where the first one is.
    """

    name: ClassVar[str]
    mesh: Mesh
    output_place = 0
    waited_s: float = 0.0
    in_flight: int | None = None
    connections: int = 1
    together: bool = False

    @property
    def device(self) -> torch.device:
        """The device of outputs, losses and targets on this rank."""
        return self.mesh.device

    @property
    def computes_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.output_place == self.mesh.place

    @abstractmethod
    def forward(
        self, microbatches: Sequence[Any], step: Step, same: tuple[Any, ...] | None
    ) -> list[Tensor]:
        """Outputs of the last stage for microbatches of the first; empty where it is not.

        Args:
            microbatches: what the first stage is called with, or `mpcomp.engines.outline.Told`.
            step: the step they belong to.
            same: what must be the same on all ranks of a replica; None if nothing is compared.
        """

    @abstractmethod
    def next_tokens(
        self,
        batch: Mapping[str, Any],
        step: Step,
        choose: Callable[[Tensor], Tensor],
        *,
        same: Any = None,
        everywhere: bool = True,
    ) -> list[Tensor]:
        """The tokens chosen from the last stage's output [b, 1, n]: int64 [b] of each replica.

        On every rank; negative numbers where that output has NaN or Inf.

        Args:
            batch: what the first stage is called with.
            step: the pass of evaluation.
            choose: called where the last stage is.
            same: in the first call for a batch, what else must be the same on all ranks; None
                afterwards, when nothing is compared.
            everywhere: give them to every rank; else those of this replica stay where they are
                chosen, nothing is compared, and other ranks get none.
        """

    @abstractmethod
    def forward_backward(
        self,
        microbatches: Sequence[Any],
        targets: Sequence[Any],
        step: Step,
        loss: StepLoss,
        same: tuple[Any, ...],
        updates: Updates | None = None,
    ) -> None:
        """Runs all microbatches forward and backward; ``loss`` then has their losses.

        Args:
            microbatches: what the first stage is called with.
            targets: of each.
            step: the step they belong to.
            loss: of the step.
            same: what must be the same on all ranks of a replica.
            updates: of weights in between; `check_updates` has let them pass.
        """

    def check_updates(self) -> None:  # noqa: B027  (in one process they can be made)
        """Raises ValueError where weights cannot change within a step."""

    @abstractmethod
    def device_of(self, stage: int) -> torch.device:
        """The device of a stage, if it is on this rank, and of the ends of links with it."""

    def probe(self) -> list[tuple[float, float] | None]:
        """(Mbit/s, round trip in seconds) of each cut; None where nothing leaves the rank."""
        return []

    def stage_shares(self) -> list[float]:
        """Shares that the stages here have of this rank's computing; empty if that is not known."""
        return []

    def forget_shapes(self) -> None:  # noqa: B027  (nothing is known ahead in one process)
        """Finds out anew what crosses the cuts, as dtypes have changed."""


def choose_finite(output: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """``choose``, or -1 for every row of an output that is not finite."""
    if bool(output.isfinite().all()):
        return choose(output)
    return torch.full((output.shape[0],), -1, dtype=torch.int64)
