"""Keeping the replicas of a pipeline's stages alike: once a step, when all microbatches are done.

Gradients are averaged by DDP's reducer (`GradientAverage`), made into something else by a method
(`CompressedAverage`), or exchanged by replicas that own a piece of each parameter
(`mpcomp.data_parallel.sharded_average`). The engine knows none of these; it asks at the same places
of a step, in this order::

    check_begin, begin      before anything is sent
    reduce                  after the last backward, and the sum over tied weights
    check_finite            when no rank waits for this one any more
    finish_step             when all ranks know whether the step is stored

A pass of evaluation is a `begin` and an `end`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stages as staging
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.core.context import Step
from mpcomp.core.sent import Sent
from mpcomp.data_parallel.exchange import Exchange, in_groups

__all__ = ["CompressedAverage", "GradientAverage", "ReplicaSync", "trained_in"]


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
        return self.exchange is None or self.exchange.method.sync_schedule is None

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
        with mesh.abort_all_on_error(), mesh.waiting("buffers of the first replica"):
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


class GradientAverage(ReplicaSync):
    """Averages gradients by DDP's reducer, and so by its hooks.

    DDP reduces in the last backward of a step. A pipeline has one backward for each microbatch,
    and schedules that split backward never run one that DDP would notice: replicas would drift
    apart without a word. So DDP's hooks stay asleep (its forward is never called) until all
    gradients are there; then a backward of zeros through the parameters wakes them, once.

    The uncompressed mean of an exchange (`paths.dense_sum`) is no replacement. On gloo it has DDP's
    bits with 2 replicas, fp32 and bf16, but not with others. Of 12 million fp32 gradients in three
    buckets 43 % differ with 3 replicas, where DDP multiplies by 1/3 and an exchange divides by 3.
    With 4 replicas 15 % differ, as the order of a ring's sums follows from the place in the buffer,
    and so from how gradients are grouped. They differ by one unit in the last place (1.4e-7 of the
    largest).

    Args:
        stages: on every replica with equal parameter shapes; they take the values of replica 0.
        mesh: the connected ranks.

    Attributes:
        reducers: of each stage; None where there is nothing to train. A hook of DDP can be
            registered there.
    """

    def __init__(self, stages: Sequence[staging.Stage], mesh: ProcessMesh) -> None:
        super().__init__(stages, mesh)
        self._numbers = [stage.index for stage in stages]
        self._known = [_parameter_ids(stage) for stage in stages]
        with mesh.waiting("weights of the first replica"):
            self.reducers = [
                _reducer(stage, mesh) if known else None
                for stage, known in zip(stages, self._known, strict=True)
            ]
        self._sent = Sent()

    @property
    def sent(self) -> Sent:
        return self._sent

    def reduce(self, step: Step) -> None:
        """Replaces ``.grad`` by its mean over the replicas."""
        if not self.enabled:
            return
        for number, stage, known, ddp in zip(
            self._numbers, self._stages, self._known, self.reducers, strict=True
        ):
            self._mesh.where = f"stage {number}, averaging over replicas"
            _check_unchanged(stage, known)
            if ddp is None:
                continue
            parameters = [p for p in stage.parameters() if p.requires_grad]
            with (
                self._completed(trained_in([stage]), self._mesh.replica_group),
                self._mesh.waiting("gradients of other replicas"),
            ):
                ddp.reducer.prepare_for_backward([])
                torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])
            num_bytes = sum(p.nbytes for p in parameters)
            self._sent += Sent(num_bytes, num_bytes, sum(p.numel() for p in parameters))

    def close(self) -> None:
        super().close()
        self.reducers.clear()


class CompressedAverage(ReplicaSync):
    """Replaces the gradients of a rank's stages by what a method makes of all replicas' ones.

    It runs when all microbatches are done, and so under every schedule alike; there is no reducer
    of DDP that would have to notice a backward that was split.

    Args:
        stages: of this rank.
        mesh: the connected ranks.
        exchange: of their parameters.
        tied: names of parameters that another rank may have a copy of.
    """

    counts_on = True

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: ProcessMesh,
        exchange: Exchange,
        tied: Collection[str] = (),
    ) -> None:
        super().__init__(stages, mesh)
        self._known = [_parameter_ids(stage) for stage in stages]
        self._tied = frozenset(tied)
        self.exchange: Exchange | None = exchange

    @property
    def sent(self) -> Sent:
        return Sent() if self.exchange is None else self.exchange.totals.sent

    def reduce(self, step: Step) -> None:
        self._mesh.where = f"step {step.index}, exchanging gradients with other replicas"
        if not self.enabled:
            return
        for stage, known in zip(self._stages, self._known, strict=True):
            _check_unchanged(stage, known)
        exchange = self.exchange
        assert exchange is not None
        exchange.begin(loss_scale=step.loss_scale, lr=step.lr, compress=step.compress_dp)
        trained = trained_in(self._stages)
        with self._completed(trained, exchange.averaged_over) as unused:
            gradients = ((name, p.grad) for name, p in trained.items() if p.grad is not None)
            for group in in_groups(gradients, alone=self._tied):
                exchange.add(group)
            exchange.finish()
        exchange.leave_alone(unused)


def _parameter_ids(stage: nn.Module) -> list[tuple[int, torch.dtype]]:
    """The parameters that are connected: these are lost without a word when one changes."""
    return [(id(p), p.dtype) for p in stage.parameters() if p.requires_grad]


def _check_unchanged(stage: nn.Module, known: list[tuple[int, torch.dtype]]) -> None:
    """Raises ValueError if the parameters are not those of an earlier `_parameter_ids`."""
    if _parameter_ids(stage) != known:
        raise ValueError(
            "parameters were replaced, frozen, unfrozen or given another dtype after the "
            "replicas were connected, so their gradients would not be averaged: change the "
            "model before mpcomp.pipeline"
        )


def trained_in(stages: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of stages that require gradients, by name."""
    named = (item for stage in stages for item in stage.named_parameters())
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def _reducer(stage: staging.Stage, mesh: ProcessMesh) -> DistributedDataParallel:
    # Not a parameter once more: its gradient is added to the first use's before replicas exchange.
    ignored: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignored(stage, stage.second_uses)
    return DistributedDataParallel(stage, process_group=mesh.replica_group)
