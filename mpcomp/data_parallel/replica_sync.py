"""Keeping the replicas of a pipeline's stages alike: once a step, when all microbatches are done.

Gradients are averaged by DDP's reducer (`replicas`), made into something else by a method
(`average`), or exchanged by replicas that own a piece of each parameter (`sharded_average`). The
engine knows none of these; it asks at the same places of a step, in this order::

    check_begin, begin      before anything is sent
    reduce                  after the last backward, and the sum over tied weights
    check_finite            when no rank waits for this one any more
    finish_step             when all ranks know whether the step is stored

A pass of evaluation is a `begin` and an `end`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from mpcomp.comm.mesh import ProcessMesh
from mpcomp.core.sent import Sent
from mpcomp.core.step import Step
from mpcomp.data_parallel.exchange import Exchange

__all__ = ["ReplicaSync", "check_unchanged", "parameter_ids", "trained_in"]


class ReplicaSync(ABC):
    """One rank's stages, and the same stages of other replicas.

    Args:
        stages: of this rank.
        mesh: the connected ranks.

    Attributes:
        exchange: what compresses gradients; None where nothing does.
        enabled: whether steps are exchanged, or gradients added up for a later one.
        gathers: whether a forward needs other replicas, which have its parameters.
        counts_on: whether `sent` goes on from a checkpoint, and does not begin anew.
    """

    exchange: Exchange | None = None
    gathers = False
    counts_on: ClassVar[bool] = False

    def __init__(self, stages: Sequence[nn.Module], mesh: ProcessMesh) -> None:
        self._stages = list(stages)
        self._mesh = mesh
        self.enabled = True

    @property
    @abstractmethod
    def sent(self) -> Sent:
        """All that this rank has sent its replicas; each message counts once."""

    @abstractmethod
    def reduce(self, step: Step) -> None:
        """Replaces the gradients of a step by what all replicas make of theirs.

        Raises:
            ValueError: parameters are not those that were connected.
        """

    def check_begin(self, step: Step) -> None:
        """Raises ValueError, on all ranks alike, if the step cannot be exchanged."""
        if self.enabled and self.exchange is not None:
            self.exchange.check_begin(step.lr)

    @property
    def keeps_weights_equal(self) -> bool:
        """Whether all replicas have the same weights after each of the optimizer's steps."""
        return self.exchange is None or self.exchange.method.rhythm is None

    def begin(self, step: Step) -> None:  # noqa: B027  (most have nothing to do)
        """Before the first microbatch of a step, or of a pass of evaluation."""

    def end(self) -> None:  # noqa: B027
        """After the last microbatch of a pass of evaluation."""

    def check_finite(self, step: Step) -> None:
        """Raises FloatingPointError on all ranks for NaN or Inf; see `Exchange.check_finite`."""
        if self.enabled and self.exchange is not None:
            self.exchange.check_finite(step.index, scaled=step.scaled)

    def finish_step(self, finite: bool) -> None:
        """Stores what the exchange has noted, or forgets it; see `Exchange.finish_step`."""
        if self.exchange is not None:
            self.exchange.finish_step(finite)

    def align_buffers(self) -> None:
        """Gives all replicas the buffers (BatchNorm's statistics) of the first."""
        mesh = self._mesh
        with mesh.failing_together(), mesh.waiting("buffers of the first replica"):
            for stage in self._stages:
                for buffer in stage.buffers():
                    dist.broadcast(buffer, src=mesh.place, group=mesh.replica_group)

    @contextmanager
    def _completed(
        self, trained: Mapping[str, nn.Parameter], group: dist.ProcessGroup | None
    ) -> Iterator[set[str]]:
        """Within it every parameter has a gradient, zeros where this replica has none.

        At its end those have none again that no replica had one for; it gives their names then.

        Args:
            trained: parameters of this rank that are trained, the same on all replicas.
            group: the replicas whose gradients are averaged; None if each keeps its own.
        """
        missing = [parameter.grad is None for parameter in trained.values()]
        without = torch.tensor(missing, dtype=torch.uint8, device=self._mesh.device)
        work = None
        if group is not None and missing:
            work = dist.all_reduce(without, dist.ReduceOp.MIN, group=group, async_op=True)
        for parameter in trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        unused: set[str] = set()
        yield unused
        if work is not None:
            with self._mesh.waiting("names of gradients that other replicas have"):
                work.wait()
        if any(missing):  # else nobody waits for an accelerator
            unused |= {name for name, none in zip(trained, without.tolist(), strict=True) if none}
            for name in unused:
                trained[name].grad = None

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it gradients add up, and are not exchanged."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def close(self) -> None:
        """Lets go of all connections."""
        if self.exchange is not None:
            self.exchange.close()
        self.exchange = None


def parameter_ids(stage: nn.Module) -> list[tuple[int, torch.dtype]]:
    """The parameters that are connected: these are lost without a word when one changes."""
    return [(id(p), p.dtype) for p in stage.parameters() if p.requires_grad]


def check_unchanged(stage: nn.Module, known: list[tuple[int, torch.dtype]]) -> None:
    """Raises ValueError if the parameters are not those of an earlier `parameter_ids`."""
    if parameter_ids(stage) != known:
        raise ValueError(
            "parameters were replaced, frozen, unfrozen or given another dtype after the "
            "replicas were connected, so their gradients would not be averaged: change the "
            "model before mpcomp.pipeline"
        )


def trained_in(stages: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of stages that require gradients, by name."""
    named = (item for stage in stages for item in stage.named_parameters())
    return {name: parameter for name, parameter in named if parameter.requires_grad}
