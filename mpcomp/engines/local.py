"""The engine of one process: torchgpipe's schedule, with a compressed link at every cut.

torchgpipe calls `fence` in the main thread before the computations of a clock cycle, to move each
microbatch to its next device. Here that step is `LinkCopy`: the activation is sent over the cut
and received, on this same rank; its backward does so with the gradient, the other way::

    stage j-1 ──> x ──> encode ──> message ──> decode ──> y ──> stage j       (LinkCopy.forward)
    stage j-1 <── gx <── decode <── message <── encode <── gy <── stage j     (LinkCopy.backward)

The compressor is never differentiated: the gradient that leaves stage j is that of ``y``, and what
stage j-1 receives is taken for that of ``x``.

Microbatches have graphs of their own (torchgpipe would tie them together with `depend`, to be
walked in descending order by one backward). So losses are differentiated one by one in ascending
order, which is the canonical order of accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchgpipe.microbatch import Batch
from torchgpipe.pipeline import Pipeline as GPipeSchedule
from torchgpipe.pipeline import clock_cycles
from torchgpipe.skip.layout import SkipLayout

import stages as staging
from mpcomp.comm.channels import LocalChannel
from mpcomp.comm.mesh import LocalMesh
from mpcomp.core.context import Step, TensorMeta
from mpcomp.core.loss import StepLoss
from mpcomp.core.trace import Trace
from mpcomp.engines.base import Engine, choose_finite
from mpcomp.engines.stage_runner import Autocast, StageRunner
from mpcomp.engines.updates import StashedWeights, Updates, lag_of, late_of
from mpcomp.links.boundary import Boundary, ConnectedBoundary
from mpcomp.links.tied_weights import Tie, TiedWeights, separate_gradients

__all__ = ["LinkCopy", "LocalEngine"]

_ONCE = (
    "create_graph=True through a cut: what crosses it as a message has no second derivative. Leave "
    "create_graph out; a gradient penalty, or a loss of gradients with respect to inputs, can take "
    "them with respect to the output, or needs the plain model (pipe.merge())"
)


class LocalEngine(Engine):
    """All stages in this process, each on its device.

    Args:
        stages: modules in order.
        boundaries: one fewer.
        devices: one for each stage; they may repeat.
        recompute: recompute activations in backward.
        seed: of the run.
        ties: parameters that two of the stages share.
    """

    name = "local"

    def __init__(
        self,
        stages: Sequence[staging.Stage],
        boundaries: Sequence[Boundary],
        devices: Sequence[torch.device],
        *,
        recompute: bool,
        seed: int,
        ties: Sequence[Tie] = (),
    ) -> None:
        assert len(stages) == len(devices) == len(boundaries) + 1
        self.devices = list(devices)
        self.mesh = LocalMesh(self.devices[-1])
        self.together = stages[0].together
        self.boundaries = list(boundaries)
        self._connected = [
            ConnectedBoundary(boundary, LocalChannel(later), LocalChannel(earlier))
            for boundary, earlier, later in zip(
                boundaries, self.devices[:-1], self.devices[1:], strict=True
            )
        ]
        self._ties = list(ties)
        for tie in ties:
            if isinstance(tie, TiedWeights):
                tie.attach(dict(enumerate(stages)))
            else:
                tie.find(dict(enumerate(stages)))
        self._runners = [
            StageRunner(stage, i, device, recompute=recompute, seed=seed)
            for i, (stage, device) in enumerate(zip(stages, devices, strict=True))
        ]

    def forward(
        self, microbatches: Sequence[Any], step: Step, same: tuple[Any, ...] | None = ()
    ) -> list[Tensor]:
        return self._run(list(enumerate(microbatches)), step)

    def _run(self, microbatches: Sequence[tuple[int, Any]], step: Step) -> list[Tensor]:
        """Outputs of microbatches, each with its number."""
        for tie in self._ties:
            tie.follow()
        batches: list[Batch] = [
            _Microbatch(self._runners[0].inputs(batch), batch, i, step) for i, batch in microbatches
        ]
        _Schedule(batches, self._runners, self.devices, self._connected, step).run()
        return [cast(Tensor, batch.value) for batch in batches]

    def next_tokens(
        self,
        batch: Mapping[str, Any],
        step: Step,
        choose: Callable[[Tensor], Tensor],
        *,
        same: Any = None,
        everywhere: bool = True,
    ) -> list[Tensor]:
        (output,) = self.forward([batch], step)
        return [choose_finite(output, choose).cpu()]

    def forward_backward(
        self,
        microbatches: Sequence[Any],
        targets: Sequence[Any],
        step: Step,
        loss: StepLoss,
        same: tuple[Any, ...] = (),
        updates: Updates | None = None,
    ) -> None:
        if updates is not None:
            self._forward_backward_update(microbatches, targets, step, loss, updates)
            return
        with separate_gradients(self._ties, step):
            outputs = self.forward(microbatches, step)
            for i, target in enumerate(targets):
                # An output's memory goes with its graph.
                self._backward(outputs.pop(0), target, i, step, loss)

    def _forward_backward_update(
        self,
        microbatches: Sequence[Any],
        targets: Sequence[Any],
        step: Step,
        loss: StepLoss,
        updates: Updates,
    ) -> None:
        """Runs one microbatch after the other, each with weights as old as in many processes."""
        num_stages = len(self._runners)
        try:
            with separate_gradients(self._ties, step) as added_up:
                stashed = []
                for runner in self._runners:
                    lag = lag_of(runner.index, num_stages, together=self.together)
                    late = late_of(runner.index, num_stages, together=self.together)
                    runner.stashed = StashedWeights(runner.stage, updates, lag, kept=lag, late=late)
                    stashed.append(runner.stashed)
                updates = updates.completed(stashed, added_up)
                for i, (batch, target) in enumerate(zip(microbatches, targets, strict=True)):
                    (output,) = self._run([(i, batch)], step)
                    with stashed[0].gathering(i):
                        self._backward(output, target, i, step, loss)
                    if updates.follows(i):
                        with step.during("update", num_stages - 1, i):
                            updates.function()
        finally:
            for runner in self._runners:
                runner.stashed = None

    def _backward(self, output: Tensor, target: Any, i: int, step: Step, loss: StepLoss) -> None:
        """Differentiates the loss of microbatch ``i``, through all stages."""
        last = len(self._runners) - 1
        stashed = self._runners[last].stashed
        with step.during("loss", last, i):
            # A loss's own parameters are as old as those of the stage that has them.
            part = (
                loss(output, target, i)
                if stashed is None
                else stashed.call(i, lambda: loss(output, target, i))
            )
        if step.trace is not None:
            step.trace.open("backward", last, i)
        part.backward()  # type: ignore[no-untyped-call]
        if step.trace is not None:
            step.trace.close()
        trained = [runner.index for runner in self._runners if runner.has_trainable]
        for boundary in self.boundaries[min(trained, default=last) :]:
            boundary.grad.count_nothing(step, i)  # as ranks send it

    def device_of(self, stage: int) -> torch.device:
        return self.devices[stage]

    def stage_shares(self) -> list[float]:
        # A backward is long where its forward is. An accelerator's clock is not this process's.
        seconds = [runner.forward_s for runner in self._runners]
        if any(device.type != "cpu" for device in self.devices) or not sum(seconds):
            return []
        return [each / sum(seconds) for each in seconds]


class _Microbatch(Batch):
    """torchgpipe's batch, which also knows which one it is and takes any value.

    Args:
        value: what the next stage is called with.
        batch: what the first one is called with, from which the others may take something.
        index: number of the microbatch.
        step: the step.
    """

    def __init__(self, value: Any, batch: Any, index: int, step: Step) -> None:
        self.value = value
        self.batch = batch
        self.atomic = isinstance(value, Tensor)
        self.index = index
        self.step = step

    def call(self, function: Callable[..., Any]) -> _Microbatch:
        """Runs a stage (for GPUs torchgpipe calls this in a worker thread)."""
        return _Microbatch(function(self.value, self), self.batch, self.index, self.step)


class _Schedule(GPipeSchedule):
    """torchgpipe's clock cycles, with links for copies."""

    def __init__(
        self,
        batches: list[Batch],
        runners: Sequence[StageRunner],
        devices: list[torch.device],
        boundaries: Sequence[ConnectedBoundary],
        step: Step,
    ) -> None:
        torch.clear_autocast_cache()  # weights have changed since an earlier step in this context
        # torchgpipe's worker threads do not inherit the caller's autocast: it is captured here.
        partitions = [_partition(runner, Autocast.of_caller(runner.device)) for runner in runners]
        layout = SkipLayout(len(partitions), {})
        # It types partitions as Sequential but only calls them.
        super().__init__(
            batches, cast(list[nn.Sequential], partitions), devices, skip_layout=layout
        )
        self._boundaries = boundaries
        self._step = step

    def run(self) -> None:
        """Runs all clock cycles; `batches` then hold the last stage's outputs."""
        if any(device.type != "cpu" for device in self.devices):
            super().run()
            return
        # torchgpipe would run stages in a worker thread while links, losses and backward run in
        # this one: two OpenMP teams that take turns on the same cores, which costs a third of the
        # time of a small model. One CPU has nothing to overlap, so everything runs here.
        for schedule in clock_cycles(len(self.batches), len(self.partitions)):
            self.fence(schedule, [])
            for i, j in schedule:
                self.batches[i] = self.batches[i].call(self.partitions[j])

    def fence(self, schedule: list[tuple[int, int]], skip_trackers: list[Any]) -> None:
        """Carries each microbatch of this clock cycle over the cut before its next stage."""
        for i, j in schedule:
            if j > 0:
                batch = cast(_Microbatch, self.batches[i])
                batch[0] = LinkCopy.apply(  # type: ignore[no-untyped-call]
                    batch[0], self._boundaries[j - 1], self._step, batch.index
                )


def _partition(runner: StageRunner, autocast: Autocast) -> Callable[[Any, _Microbatch], Tensor]:
    def run(value: Any, batch: _Microbatch) -> Tensor:
        beside = runner.inputs(batch.batch) if runner.index > 0 else {}
        with batch.step.during("forward", runner.index, batch.index):
            return runner(value, beside, batch.step.index, batch.index, autocast)

    return run


class LinkCopy(torch.autograd.Function):
    """Carries one microbatch over a cut, and its gradient back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, connected: ConnectedBoundary, step: Step, microbatch: int
    ) -> Tensor:
        meta = TensorMeta.of(x)
        ctx.connected, ctx.meta, ctx.step, ctx.microbatch = connected, meta, step, microbatch
        ctx.set_materialize_grads(False)  # where there is no gradient, none crosses the cut
        connected.act.send(x, meta, step, microbatch)
        y, _ = connected.act.receive(meta, step, microbatch)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        connected: ConnectedBoundary = ctx.connected
        trace: Trace | None = ctx.step.trace
        if trace is not None:  # one backward goes through all stages
            trace.close()
        try:
            if torch.is_grad_enabled():
                raise RuntimeError(_ONCE)
            connected.grad.send(grad, ctx.meta, ctx.step, ctx.microbatch)
            x = connected.grad.receive_any(ctx.meta, ctx.step, ctx.microbatch)
        except BaseException:
            # The caller may be no part of us: `pipe(x)`, then backward.
            connected.boundary.failed = True
            raise
        if trace is not None:
            trace.open("backward", connected.boundary.act.sender_stage, ctx.microbatch)
        return x, None, None, None
