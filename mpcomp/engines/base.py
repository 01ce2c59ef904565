"""What a pipeline asks of an engine: run the stages, move the messages, agree with other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mpcomp.core.loss import StepLoss
from mpcomp.core.step import Step
from mpcomp.data_parallel.exchange import Exchange

__all__ = ["Engine"]


class Engine(ABC):
    """Runs the stages of one rank.

    Attributes:
        name: as given to ``mpcomp.pipeline(engine=...)``.
        device: where outputs, losses and targets of this rank are.
        num_replicas: number of pipelines.
        replica: which of them this rank is in.
        rank: of this process.
        num_ranks: of processes.
        num_in_pipeline: ranks of one pipeline.
        computes_loss: whether the last stage is on this rank.
    """

    name: ClassVar[str]
    device: torch.device
    num_replicas = 1
    replica = 0
    rank = 0
    num_ranks = 1
    num_in_pipeline = 1
    computes_loss = True

    @abstractmethod
    def forward(
        self, microbatches: Sequence[Any], step: Step, same: tuple[Any, ...]
    ) -> list[Tensor]:
        """Outputs of the last stage for microbatches of the first; empty where it is not.

        Args:
            microbatches: what the first stage is called with.
            step: the step they belong to.
            same: what must be the same on all ranks of a replica.
        """

    @abstractmethod
    def next_tokens(
        self,
        batch: Mapping[str, Any],
        step: Step,
        choose: Callable[[Tensor], Tensor],
        *,
        same: Any = None,
    ) -> list[Tensor]:
        """What ``choose`` makes of the last stage's output [b, 1, n]: int64 [b] of each replica.

        On every rank; negative numbers where that output has NaN or Inf.

        Args:
            batch: what the first stage is called with.
            step: the pass of evaluation.
            choose: called where the last stage is.
            same: in the first call for a batch, what else must be the same on all ranks; None
                afterwards, when nothing is compared.
        """

    @abstractmethod
    def forward_backward(
        self,
        microbatches: Sequence[Any],
        targets: Sequence[Any],
        step: Step,
        loss: StepLoss,
        same: tuple[Any, ...],
    ) -> None:
        """Runs all microbatches forward and backward; ``loss`` then has their losses."""

    @abstractmethod
    def device_of(self, stage: int) -> torch.device:
        """Where a stage lives, if on this rank, and the ends of links with it."""

    #: The model without data, where stages are sharded and it has no parameters of its own.
    plain_model: nn.Module | None = None
    #: Seconds of training that this rank has waited for messages.
    waited_s: float = 0.0
    #: Microbatches that the first stage has under way, where that can be chosen.
    in_flight: int | None = None

    def probe(self) -> list[tuple[float, float] | None]:
        """(Mbit/s, round trip in seconds) of each cut; None where nothing leaves the rank."""
        return []

    def forget_shapes(self) -> None:  # noqa: B027  (nothing is known ahead in one process)
        """Finds out anew what crosses the cuts, as dtypes have changed."""

    @staticmethod
    def choose_finite(output: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """``choose``, or -1 for every row of an output that is not finite."""
        if bool(output.isfinite().all()):
            return choose(output)
        return torch.full((output.shape[0],), -1, dtype=torch.int64)

    # -- agreement with other ranks; alone there is nothing to agree about ----------------------

    def agree(self, figures: Sequence[float]) -> list[float]:
        """Sums of figures over all ranks."""
        return list(figures)

    def everywhere(self, output: Tensor | None) -> Tensor:
        """The output of this replica's last stage, on every rank of the replica."""
        assert output is not None
        return output

    def collect(self, value: Any) -> list[Any]:
        """What JSON can hold, from every rank, in their order."""
        return [value]

    def share_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under distinct names from the ranks of a replica, all of them on each."""
        return tensors

    def align_replicas(self) -> None:  # noqa: B027  (nothing to do for one)
        """Gives all replicas the buffers (BatchNorm's statistics) of the first."""

    def without_reduction(self) -> AbstractContextManager[None]:
        """A context within which replicas add up gradients without averaging them."""
        return nullcontext()

    @property
    def exchange(self) -> Exchange | None:
        """What compresses gradients between replicas; None where nothing does."""
        return None

    def settle_replicas(self, finite: bool) -> None:
        """Ends the step of `exchange`, if one is under way; see there."""
        if self.exchange is not None:
            self.exchange.settle(finite)

    def together(self, where: str = "") -> AbstractContextManager[None]:
        """A context in which this rank needs others, and they it; ``where`` is for errors."""
        return nullcontext()
