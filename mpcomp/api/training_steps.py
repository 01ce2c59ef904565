"""Training steps: each is opened, and then ended by one decision of all ranks, or undone.

What links noted in a step is stored if the step was finite everywhere, and else forgotten
everywhere. Ranks find out in one sum, which also takes the loss to all of them, and the counts of
bytes::

    [stopped, loss, its dtype, wire bytes, dense bytes, elements, a flag for each link that saw NaN
     or Inf, what adaptive links have measured, sums over copies that must be equal]

All that steps leave behind, beside links, weights and generators, is left here: a pilot swaps it as
one (`TrainingSteps.apart`).
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import stages as staging
from mpcomp.core.account import Account, agreed_in_step
from mpcomp.core.checks import nonfinite_error, nonfinite_loss_error
from mpcomp.core.context import Step, TensorMeta
from mpcomp.core.loss import StepLoss
from mpcomp.core.microbatch import gather
from mpcomp.core.sent import Sent
from mpcomp.data_parallel.replica_sync import ReplicaSync
from mpcomp.engines.base import Engine
from mpcomp.engines.gradients import (
    check_without_gradients,
    gradients_overflowed,
    hooks_once,
    overflow_gradients,
    updates_within,
)
from mpcomp.engines.shape_inference import Planner
from mpcomp.engines.stage_runner import Autocast
from mpcomp.engines.updates import Updates
from mpcomp.links.adaptation import Adaptation
from mpcomp.links.boundary import Boundary
from mpcomp.links.equal_copies import EqualCopies
from mpcomp.links.link import Link
from mpcomp.links.tied_weights import TiedWeights
from mpcomp.monitor.step_log import StepLog
from mpcomp.monitor.tracing import Tracing
from mpcomp.pilot.dial import Dial

__all__ = ["Moment", "TrainingBatch", "TrainingSteps"]

#: Dtypes of a loss, by the number that ranks exchange.
_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

#: A point in time, and the seconds that this rank had waited for messages until then.
Moment = tuple[float, float]


@dataclass(frozen=True)
class TrainingBatch:
    """The batch of a training step, as a rank has it.

    Attributes:
        step: the step.
        sizes: rows of its microbatches.
        parts: of each what the stages here are called with, or take.
        targets: of each; None without data.
        terms: of each, see `mpcomp.core.loss.num_terms`.
        same: what must be the same on all ranks of a replica.
        data: batch and target; empty without data.
        watch: called with each output and target, see `mpcomp.core.loss_check.LossCheck`.
    """

    step: Step
    sizes: Sequence[int]
    parts: Sequence[Any]
    targets: Sequence[Any]
    terms: Sequence[float]
    same: tuple[Any, ...] = ()
    data: tuple[Any, ...] = ()
    watch: Callable[[Tensor, Any], None] | None = None


class TrainingSteps:
    """The training steps of a pipeline, one after the other; at most one is open.

    Args:
        engine: runs the stages.
        stages: of this rank.
        cut: all stages.
        crossings: all that sends messages: boundaries, then ties.
        model: has this rank's parameters, and those of the loss.
        scaler: of the losses, if any.
        replica_sync: keeps replicas of the stages alike; None for one replica.
        warmup_steps: steps between whose replicas nothing is compressed at first.
        compares_copies: whether copies that must stay equal are compared.
        dial: has chosen what ``auto`` is, or will by the first step.

    Attributes:
        num_steps: so far, skipped ones counted.
        skipped: whether the last step was skipped (non-finite under a loss scaler).
        adaptation: of the adaptive links.
        scaler: as given; may be changed between steps.
        compresses: whether activations, gradients, and gradients between replicas are compressed.
        optimizer: whose rate methods follow; None for none.
        updating: whether an update within a step is under way.
        times: of the last steps on this rank: seconds, and of these waiting for messages.
        trained_s: seconds of all steps on this rank.
        waited_s: of these, waiting for messages.
        told: bytes that this rank has told others of its data, since a checkpoint was loaded.
        tracing: takes steps down, within `mpcomp.Pipeline.trace`.
        logs: are written at the end of each step.
    """

    def __init__(
        self,
        engine: Engine,
        stages: Sequence[staging.Stage],
        cut: Sequence[staging.Stage],
        crossings: Sequence[Boundary | TiedWeights],
        model: nn.Module,
        *,
        scaler: torch.amp.GradScaler | None,
        replica_sync: ReplicaSync | None,
        warmup_steps: int,
        compares_copies: bool,
        dial: Dial | None = None,
    ) -> None:
        self._engine = engine
        self._mesh = engine.mesh
        self._stages = list(stages)
        self._cut = list(cut)
        self._crossings = list(crossings)
        self._ties = [each for each in crossings if isinstance(each, TiedWeights)]
        self._boundaries = [each for each in crossings if isinstance(each, Boundary)]
        self._dial = dial
        self._model = model
        self.scaler = scaler
        self._sync = replica_sync
        self.num_steps = 0
        self.skipped = False
        self.compresses = True, True, True
        self.optimizer: torch.optim.Optimizer | None = None
        self.updating = False
        if dial is not None:
            dial.watch(engine, self._boundaries, warmup_steps)
        self._sent_by_all = Sent()
        self.told = Sent()
        #: Steps, and what this rank had sent its replicas, when a checkpoint was loaded.
        self._loaded = 0, Sent()
        self._start(warmup_steps, compares_copies)

    def _start(self, warmup_steps: int, compares_copies: bool) -> None:
        """Sets all that is changed in place, or belongs to the links that are there now."""
        mesh, sync = self._mesh, self._sync
        self._warmup_steps = warmup_steps
        self._open: Step | None = None
        self._began = 0.0  # when the open step did
        self.adaptation = Adaptation(
            self.links, num_ranks=mesh.num_ranks, num_replicas=mesh.num_replicas
        )
        alike = sync is not None and sync.keeps_weights_equal
        self._copies = EqualCopies(
            mesh, self.links, self._ties, self._stages if alike else (), enabled=compares_copies
        )
        self.times: deque[tuple[float, float]] = deque(maxlen=100)
        self.trained_s = self.waited_s = 0.0
        self.tracing: Tracing | None = None
        self.logs: list[StepLog] = []

    def apart(self) -> TrainingSteps:
        """Steps that go on from here, over the links that are there now, and leave nothing here.

        Nothing is warmed up, compared, traced or logged in them.
        """
        steps = copy.copy(self)
        steps._dial = None
        steps._start(warmup_steps=0, compares_copies=False)
        return steps

    @property
    def links(self) -> list[Link]:
        """All links, in the order of crossings."""
        return [link for each in self._crossings for link in each.links]

    # -- before a step ------------------------------------------------------------------------

    def bare(self, train: bool) -> Step:
        """The step to come, as far as it is known without its batch."""
        scaler, optimizer = self.scaler, self.optimizer
        scaled = scaler is not None and scaler.is_enabled()
        lr = None if optimizer is None else optimizer.param_groups[0]["lr"]
        act, grad, dp = self.compresses
        return Step(
            index=self.num_steps,
            train=train,
            compress_act=act,
            compress_grad=grad,
            compress_dp=dp and self.num_steps >= self._warmup_steps,
            scaled=scaled,
            loss_scale=scaler.get_scale() if scaler is not None and scaled else 1.0,
            lr=None if lr is None else float(lr),
        )

    def checked(self, step: Step, sizes: Sequence[int]) -> Step:
        """A step that links have let pass.

        Args:
            step: with all that is known of its batch.
            sizes: rows of its microbatches.

        Raises:
            ValueError: a link cannot take it.
        """
        if self._dial is not None:
            self._dial.settle(self._boundaries, step)
        for link in self.links:
            link.check_step(step, sizes)
        return step

    def updates(
        self, update: Callable[[], object] | None, count: int, chunks: int
    ) -> Updates | None:
        """The updates within a step; see `mpcomp.engines.gradients.updates_within`."""

        def function() -> None:
            assert update is not None
            self.updating = True
            try:
                update()
            finally:
                self.updating = False

        return updates_within(
            None if update is None else function,
            count,
            chunks=chunks,
            scaler=self.scaler,
            ties=self._ties,
            stages=self._stages,
            engine=self._engine,
        )

    def acts_before(self) -> bool:
        """Whether ranks do something together before the next training step."""
        asks = self._dial is not None and self._dial.asks(self._mesh)
        return asks or self.adaptation.acts_before()

    def agree_on_choice(self, step: Step) -> None:
        """Before a training step, finds out whether ``auto`` is the same on all ranks.

        Raises:
            ValueError: it is not; on all of them.
        """
        if self._dial is not None:
            self._dial.agree(self._mesh, step)

    def begin_adaptation(self, parts: Sequence[Any]) -> None:
        """Lets adaptive links with a budget begin, before the first step has sent anything."""

        def metas() -> list[list[TensorMeta]]:
            planner = Planner(self._cut, self._mesh.device)
            autocast = Autocast.of_caller(self._mesh.device)
            return [planner.plan(part, autocast) for part in parts]

        self.adaptation.begin(metas, self._mesh.all_reduce_sum)

    # -- a step -------------------------------------------------------------------------------

    def now(self) -> Moment:
        """The moment at which a step's call began."""
        return time.perf_counter(), self._engine.waited_s

    def open(self, step: Step) -> None:
        """Begins a step; the one before has been finished."""
        self._open, self._began = step, time.perf_counter()

    def forward(self, step: Step, parts: Sequence[Any]) -> Tensor:
        """The output of a step that the caller differentiates, in one process.

        The step is ended by the next one.

        Args:
            step: the step.
            parts: its microbatches.
        """
        self.begin_adaptation(parts)
        self.open(step)
        with self.undone_on_error(True):
            return gather(self._engine.forward(parts, step, ()))

    def run(
        self, batch: TrainingBatch, loss: StepLoss, updates: Updates | None, since: Moment
    ) -> Tensor:
        """Runs a whole step, and ends it; adaptation has begun.

        Args:
            batch: of the step.
            loss: of the step.
            updates: of weights within it, if any.
            since: when its call began.

        Returns:
            The loss of all replicas' batches, 0-d, on every rank.

        Raises:
            FloatingPointError, RuntimeError: as of `finish`.
        """
        if self.scaler is not None and not self._engine.computes_loss:
            # A scaler is made by its first loss, but `unscale_` and `update` need it on all ranks.
            self.scaler.scale(torch.zeros((), device=self._mesh.device))
        step = batch.step
        with ExitStack() as stack:
            stack.enter_context(hooks_once(self._model.named_parameters()))
            if self.tracing is not None:
                step = replace(step, trace=self.tracing.begin_step(step.index))
            self.open(step)
            stack.enter_context(self.undone_on_error(True))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(step.during("step"))
            self._engine.forward_backward(
                batch.parts, batch.targets, step, loss, batch.same, updates
            )
            with step.during("agree"):
                total = self.finish(loss)
        assert total is not None
        if self.tracing is not None:
            self.tracing.end_step()
        seconds, waited = (b - a for a, b in zip(since, self.now(), strict=True))
        self.times.append((seconds, waited))
        self.trained_s += seconds
        self.waited_s += waited
        for log in self.logs:
            log.step(self.num_steps - 1, total)
        if self._dial is not None:
            self._dial.look(self._boundaries, step, self.times, tells=self._mesh.rank == 0)
        return total

    def finish(self, loss: StepLoss | None = None) -> Tensor | None:
        """Ends the open step, if there is one: all ranks commit what links noted, or discard it.

        Args:
            loss: of the step, if it was computed here or elsewhere.

        Returns:
            The step's loss, over all replicas, 0-d; None if there was none to ask for.

        Raises:
            RuntimeError: copies have come apart.
            FloatingPointError: NaN or Inf at a cut or in the loss (in a gradient, and in the loss,
                only without a loss scaler).
        """
        step, self._open = self._open, None
        if step is None:
            return None
        finite, total = self._decide(step, loss)
        if self._sync is not None:
            self._sync.finish_step(finite)
        if self.scaler is not None and step.scaled and self._mesh.num_ranks > 1:
            if not finite:
                overflow_gradients(self._model.parameters())
            check_without_gradients(self.scaler, skipped=not finite)
        self.skipped = not finite
        self.num_steps += 1
        if self._dial is not None:
            self._dial.close(self._boundaries, tells=self._mesh.rank == 0)
        return total

    def _decide(self, step: Step, loss: StepLoss | None) -> tuple[bool, Tensor | None]:
        """Whether a step's updates were stored, on all ranks, and its loss."""
        mesh, links = self._mesh, self.links
        overflowed = self._overflowed(step)
        broken = [float(link.nonfinite.found(train=True)) for link in links]
        failed = any(each.failed for each in self._crossings)  # and has raised its error
        total = loss.total if loss is not None else None
        alone = mesh.num_ranks == 1  # then nobody needs the loss as a number, which waits for a GPU
        own_loss = [0.0, 0.0]
        if total is not None and not alone:
            own_loss = [float(total), _LOSS_DTYPES.index(total.dtype)]
        measured = self.adaptation.figures(time.perf_counter() - self._began)
        compared = self._copies.figures(step)
        sent = self._sent_here()
        sums = mesh.all_reduce_sum(
            [float(failed or overflowed), *own_loss, *sent, *broken, *compared, *measured]
        )
        stopped, value, dtype, wire_bytes, dense_bytes, elements, *rest = sums
        flags, rest = rest[: len(links)], rest[len(links) :]
        compared, measured = rest[: len(compared)], rest[len(compared) :]
        self._copies.check(step, compared)
        found = [link for link, flag in zip(links, flags, strict=True) if flag]
        # Where the first stages are frozen, no gradient crosses a cut to show it.
        lost = loss is not None and not step.scaled and not _is_finite(total if alone else value)
        finite = not (found or stopped or lost)
        for each in self._crossings:
            each.finish_step(finite)
        if found and not (step.scaled and all(link.direction != "act" for link in found)):
            raise nonfinite_error(_origin(found).name, step.index)
        if lost:
            raise nonfinite_loss_error(step.index)
        self.adaptation.finish_step(step, measured, finite=finite)
        if not step.index & (step.index + 1):  # after 1, 2, 4, ... steps, as an accelerator waits
            for link in links:
                link.warnings.of_error(link.meter.train)
                link.warnings.of_lag(link.meter.train)
        if loss is not None and not alone:
            replicas = mesh.num_replicas
            of_dtype = _LOSS_DTYPES[int(dtype) // replicas]
            total = torch.tensor(value / replicas, dtype=of_dtype, device=mesh.device)
        self._sent_by_all = Sent.of((wire_bytes, dense_bytes, elements))
        return finite, total

    def _overflowed(self, step: Step) -> bool:
        """Whether the scaler skips the step, or has: then it has already lowered the scale."""
        if self.scaler is None or not step.scaled:
            return False
        lowered = self.scaler.get_scale() < step.loss_scale
        return lowered or gradients_overflowed(self._model.parameters())

    @contextmanager
    def undone_on_error(self, train: bool) -> Iterator[None]:
        """Leaves no trace in the links of a step that failed."""
        try:
            yield
        except BaseException:
            if train:
                failed, self._open = self._open, None
                if self.tracing is not None and failed is not None:
                    self.tracing.discard_step(failed.trace)
                for each in self._crossings:
                    each.finish_step(finite=False)
                if self._sync is not None:
                    self._sync.finish_step(False)
                self.adaptation.discard()
            self._clear_nonfinite(train)
            raise

    def raise_if_nonfinite(self) -> None:
        """For inference, where one rank saw what all must raise, or an accelerator saw it later."""
        links = self.links
        flags = [float(link.nonfinite.found(train=False)) for link in links]
        if self._mesh.num_ranks > 1:
            flags = self._mesh.all_reduce_sum(flags)
        for link, flag in zip(links, flags, strict=True):
            if flag:
                raise nonfinite_error(link.name, self.num_steps)
        for link in links:
            link.warnings.of_error(link.meter.eval)

    @contextmanager
    def traced(self, tracing: Tracing) -> Iterator[None]:
        """A context in which steps are traced.

        Raises:
            ValueError: a trace is under way.
        """
        if self.tracing is not None:
            raise ValueError("pipe.trace within another one: end that first")
        self.tracing = tracing
        try:
            with tracing:
                yield
        finally:
            self.tracing = None

    def go_on(self, num_steps: int, methods: Sequence[str], dial: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint that has been loaded; drops an open step.

        Args:
            num_steps: of the checkpoint.
            methods: of each link of a cut before.
            dial: of the checkpoint, as `of_dial`.
        """
        self.num_steps = num_steps
        if self._dial is not None:
            self._dial.go_on(self._boundaries, methods, dial)
        self._open = None
        for each in self._crossings:
            each.finish_step(finite=False)
        self._clear_nonfinite(train=True)
        self._sent_by_all = Sent.of(self._mesh.all_reduce_sum([*self._sent_here()]))
        self.told = Sent()
        self._loaded = num_steps, Sent() if self._sync is None else self._sync.sent

    @property
    def of_dial(self) -> dict[str, Any]:
        """Measurements of the dial, for a checkpoint."""
        return {} if self._dial is None else self._dial.state_dict()

    @property
    def chosen(self) -> str:
        """A sentence on what ``auto`` is; empty where nothing was asked."""
        return "" if self._dial is None else self._dial.sentence(self._boundaries)

    def _clear_nonfinite(self, train: bool) -> None:
        for link in self.links:
            link.nonfinite.found(train)  # counts and clears

    # -- what steps have sent -----------------------------------------------------------------

    def _sent_here(self) -> Sent:
        """All that this rank has sent over cuts and ties."""
        return sum((link.meter.train.sent for link in self.links), Sent())

    @property
    def sent(self) -> Sent:
        """All that has been sent over cuts and ties, of all ranks."""
        return self._sent_by_all if self._mesh.num_ranks > 1 else self._sent_here()

    def account(self) -> Account:
        """All that has been sent, of all ranks, by what it was for; every rank calls it."""
        sync = self._sync
        between = Sent() if sync is None else sync.sent
        if sync is not None and not sync.counts_on:
            between -= self._loaded[1]
        links = ((link.direction, link.meter.train.sent) for link in self.links)
        own = Account.of_links(links, replicas=between, agreements=self.told).to_dict()["parts"]
        total = sum(map(Account.from_dict, self._mesh.all_gather_object(own)), Account())
        return replace(total, agreements=total.agreements + self.num_steps * self._agreed_in_step)

    def of_step(self, account: Account) -> Account:
        """The mean over the steps that each part was counted in."""
        of_step = (1 / max(1, self.num_steps)) * account
        counted = 1 / max(1, self.num_steps - self._loaded[0])
        agreed = self._agreed_in_step
        told = account.agreements - self.num_steps * agreed
        of_step = replace(of_step, agreements=agreed + counted * told)
        if self._sync is None or self._sync.counts_on:
            return of_step
        return replace(of_step, replicas=counted * account.replicas)

    @property
    def _agreed_in_step(self) -> Sent:
        return agreed_in_step(self._mesh.num_ranks, len(self.links))


def _is_finite(loss: Tensor | float | None) -> bool:
    return loss is None or math.isfinite(float(loss))


def _origin(found: Sequence[Link]) -> Link:
    """The link where non-finite values began: activations take them on, gradients back."""
    activations = [link for link in found if link.direction == "act"]
    return activations[0] if activations else found[-1]
