"""The object that `mpcomp.pipeline` returns: a model that trains through compressed cuts."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

import stages as staging
from mpcomp import checkpoint
from mpcomp.api.comparison import Comparison
from mpcomp.api.equal_copies import EqualCopies
from mpcomp.api.evaluation import Metric, Sums, evaluating, mean_of, pair_of, sums_over
from mpcomp.api.first_data import FirstData
from mpcomp.api.generation import generate
from mpcomp.api.gradient_hooks import hooks_once
from mpcomp.api.learned_loss import LeafCheck
from mpcomp.api.memory_estimate import state_bytes
from mpcomp.api.original_names import OriginalNames
from mpcomp.api.pilot import MethodPair, Pilot, compare
from mpcomp.api.porting import (
    DifferentiatedLoss,
    check_function,
    check_no_graph,
    refuses_unpacked,
)
from mpcomp.api.report import print_report, report_of
from mpcomp.api.scaling import check_without_gradients, gradients_overflowed, overflow_gradients
from mpcomp.api.step_log import ScalarWriter, StepLog
from mpcomp.api.step_sync import finish_step, raise_if_nonfinite, sent_by
from mpcomp.api.step_window import Clock, StepWindow
from mpcomp.api.tracing import Tracing
from mpcomp.api.updating import updates_within
from mpcomp.api.weights import whole_again
from mpcomp.api.wrapping import WRAPPED, refuse_within_ddp
from mpcomp.core.account import Account, agreed_in_step
from mpcomp.core.loss import LossFn, StepLoss, num_terms, with_target
from mpcomp.core.loss_check import LossCheck
from mpcomp.core.microbatch import (
    check_target,
    gather,
    map_tensors,
    num_rows,
    rows_of_chunks,
    scatter,
)
from mpcomp.core.padding import valid_positions
from mpcomp.core.sample_ids import ids_of_batch, split_sample_ids
from mpcomp.core.sent import Sent
from mpcomp.core.step import Step
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.replica_sync import ReplicaSync
from mpcomp.engines.base import Engine
from mpcomp.engines.distributed import DistributedEngine
from mpcomp.engines.outline import Outline
from mpcomp.engines.shape_inference import Planner
from mpcomp.engines.stage_runner import Autocast
from mpcomp.engines.updates import Updates
from mpcomp.links.adaptation import Adaptation
from mpcomp.links.boundary import Boundary
from mpcomp.links.link import Link
from mpcomp.links.tied_weights import SharedWeight, Tie, TiedWeights
from stages.language_models import StageCaches

__all__ = ["LossFn", "Metric", "Pipeline"]

#: Attributes in which steps leave something, beside links, weights and generators.
_LEFT_BY_STEPS = (
    *("adaptation", "_copies", "step_times", "num_steps", "step_skipped", "_sent_by_all"),
    *("_open", "_began", "_warmup_steps", "_told"),
)


@dataclass(frozen=True)
class _Given:
    """The batch of a training step, as a rank has it.

    Attributes:
        step: the step.
        sizes: rows of its microbatches.
        parts: of each what the stages here are called with, or take.
        targets: of each; None without data.
        terms: of each, see `num_terms`.
        same: what must be the same on all ranks of a replica.
        data: batch and target; empty without data.
        watch: called with each output and target, see `LossCheck`.
    """

    step: Step
    sizes: Sequence[int]
    parts: Sequence[Any]
    targets: Sequence[Any]
    terms: Sequence[float]
    same: tuple[Any, ...] = ()
    data: tuple[Any, ...] = ()
    watch: Callable[[Tensor, Any], None] | None = None


class Pipeline(OriginalNames):
    """A model cut into stages, whose activations and gradients are compressed at every cut.

    Made by `mpcomp.pipeline`. Two ways to train:

    * ``loss = pipe.forward_backward(x, y)``: all microbatches, in the canonical order;
    * ``loss_fn(pipe(x), y).backward()``, as for any module. What links learn in a step is then
      stored at the next training call, once it is known whether the step was finite.

    ``parameters()``, ``state_dict()`` and so on have the original model's names. With several
    processes they are those of the stages on this rank; every rank makes the same calls, with the
    same data (or, with ``data="first"``, without any: see `has_data`), and the second way to train
    is not available.

    It begins in the mode of the model, training or evaluation; `train` and `eval` change it.

    Attributes:
        stages: the stage modules of this rank.
        cut_stages: all of them; those of other ranks on "meta".
        boundaries: the cuts, each with its two links.
        ties: the parameters of which two stages have copies, each with its two links.
        shared_weights: the parameters that the first stage and the last one, together, use both.
        engine: runs the stages.
        mesh: the ranks.
        replica_sync: keeps the replicas of this rank's stages alike; None for one replica.
        first_data: tells other ranks of batches, or hears of them; None where each has data.
        chunks: number of microbatches.
        num_steps: training steps so far, skipped ones counted.
        step_skipped: whether the last step was skipped (non-finite under a loss scaler).
        updating: whether an update within a step is under way, which meets no other rank.
    """

    def __init__(
        self,
        stages: Sequence[staging.Stage],
        cut: Sequence[staging.Stage],
        boundaries: Sequence[Boundary],
        engine: Engine,
        *,
        chunks: int,
        loss_fn: LossFn | None,
        scaler: torch.amp.GradScaler | None,
        ties: Sequence[Tie] = (),
        warmup_steps: int = 0,
        replica_sync: ReplicaSync | None = None,
        plain_model: nn.Module | None = None,
        compares_copies: bool = True,
        data_first: bool = False,
    ) -> None:
        # Where stages are sharded, plans are made with copies of them, which must follow too.
        elsewhere = [s for s in cut if all(s is not o for o in stages)]
        super().__init__(stages, engine.mesh, elsewhere)
        # In tuples, so that torch does not register them.
        self._with_loss_too = (OriginalNames(stages, engine.mesh, elsewhere, with_loss=True),)
        self.training = all(stage.training for stage in cut)
        self.cut_stages = list(cut)
        self.boundaries = list(boundaries)
        self.ties = [tie for tie in ties if isinstance(tie, TiedWeights)]
        self.shared_weights = [tie for tie in ties if isinstance(tie, SharedWeight)]
        self.engine = engine
        self.replica_sync = replica_sync
        self._plain_model = (plain_model,)
        self._sent_by_all = Sent()
        #: Training steps, and what this rank had sent its replicas, when a checkpoint was loaded.
        self._loaded = 0, Sent()
        self.chunks = chunks
        self.num_steps = 0
        self.step_skipped = False
        self.updating = False
        self._given_loss = (loss_fn,)
        self._loss_check = None if loss_fn is None else LossCheck(loss_fn)
        self._leaf_check = LeafCheck(list(self.with_loss.parameters()))
        self._metric_check: LossCheck | None = None
        self.scaler = scaler
        self._has_warned_of_part = False
        self._lr_of: torch.optim.Optimizer | None = None
        self._compress_act = self._compress_grad = self._compress_dp = True
        self._warmup_steps = warmup_steps
        self._open: Step | None = None
        self._began = 0.0  # when the open step did
        self._tracing: Tracing | None = None
        self.adaptation = Adaptation(
            self.links, num_ranks=self.mesh.num_ranks, num_replicas=self.mesh.num_replicas
        )
        alike = replica_sync is not None and replica_sync.keeps_weights_equal
        self._copies = EqualCopies(
            self.mesh, self.links, self.ties, stages if alike else (), enabled=compares_copies
        )
        self.first_data: FirstData | None = None
        if data_first and isinstance(engine, DistributedEngine):
            of_first = {i for i, place in enumerate(engine.places) if place == 0}
            elsewhere = [stage for i, stage in enumerate(cut) if i not in of_first]
            self.first_data = FirstData(engine, elsewhere)
        #: What this rank has told others of its data, since a checkpoint was loaded.
        self._told = Sent()
        #: Seconds of training calls on this rank so far.
        self.trained_s = 0.0
        #: Seconds of `evaluate` on this rank so far.
        self.evaluated_s = 0.0
        #: Of the last steps on this rank: seconds, and of these waiting for messages.
        self.step_times: deque[tuple[float, float]] = deque(maxlen=100)
        self._step_logs: list[StepLog] = []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipeline:
        self.engine.forget_shapes()  # dtypes may change
        super()._apply(fn, recurse)
        return self

    # -- ranks --------------------------------------------------------------------------------

    def collect(self, value: Any) -> list[Any]:
        """A value that JSON can hold from every rank, by rank; every rank calls it."""
        return self.mesh.all_gather_object(value)

    @property
    def rank(self) -> int:
        """Number of this process, 0 to `num_ranks` - 1."""
        return self.mesh.rank

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.mesh.num_ranks

    @property
    def replica(self) -> int:
        """Number of the pipeline that this rank is in, 0 to `num_replicas` - 1."""
        return self.mesh.replica

    @property
    def num_replicas(self) -> int:
        """Number of pipelines."""
        return self.mesh.num_replicas

    @property
    def has_data(self) -> bool:
        """Whether this rank is to be given batches: each is, but with ``data="first"``.

        Then it is the first of each pipeline, and the others make the same calls without::

            batches = loader if pipe.has_data else [(None, None)] * len(loader)
            for x, y in batches:
                pipe.forward_backward(x, y)
        """
        return self.first_data is None or self.first_data.tells

    # -- tools that expect a plain model ------------------------------------------------------

    @property
    def _loss_fn(self) -> LossFn | None:
        return self._given_loss[0]

    @property
    def with_loss(self) -> OriginalNames:
        """This rank's parameters and state, and beside the model's those that the loss has.

        They are named ``loss_fn.*``, and on the rank with the last stage.
        """
        return self._with_loss_too[0]

    @property
    def config(self) -> Any:
        """The configuration of a model of transformers.

        Raises:
            AttributeError: the model has none.
        """
        return self.cut_stages[0].original.config

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        # DistributedDataParallel asks for this before anything else. It would compare the
        # parameters of stages as if they were copies, and say that their number differs.
        raise TypeError(WRAPPED)

    def log_to(self, writer: ScalarWriter | Callable[..., Any] | None, *, every: int = 1) -> None:
        """Writes figures of `forward_backward`'s steps from now on; every rank calls it.

        They are the loss, seconds (without evaluation) and bytes of a step, all of them, with how
        many times below bf16 they and those of cuts are; and per cut and direction the bytes, that
        factor, their ratio to dense ones, and the fidelity. The first rank writes; that of the
        others may be None.

        Args:
            writer: has ``add_scalar(tag, value, step)``, as TensorBoard's SummaryWriter, or is
                called with a mapping and ``step=``, as ``wandb.log``.
            every: steps from one entry to the next; of bytes and seconds it has the mean.

        Raises:
            TypeError: a writer that is neither.
            ValueError: ``every`` is no positive whole number.
        """
        window = self.step_window()
        self._step_logs.append(StepLog(writer, every, window, self.links, writes=self.rank == 0))

    def step_window(self) -> StepWindow:
        """A window over the steps to come, from which all ranks gather figures; see there."""

        def clock() -> Clock:
            # An evaluation is part of no step.
            seconds = time.perf_counter() - self.evaluated_s
            return Clock(seconds, self.trained_s, self.engine.waited_s)

        return StepWindow(self.mesh, self.links, self.replica_sync, clock)

    # -- messages -----------------------------------------------------------------------------

    @property
    def crossings(self) -> list[Boundary | TiedWeights]:
        """All that sends messages: boundaries, then ties."""
        return [*self.boundaries, *self.ties]

    @property
    def links(self) -> list[Link]:
        """All links: of each cut that of activations, then that of gradients; those of ties."""
        return [link for each in self.crossings for link in each.links]

    @property
    def wire_bytes(self) -> int:
        """Bytes of all messages of training so far, headers included; of all ranks."""
        return int(self.sent.wire_bytes)

    @property
    def dense_bytes(self) -> int:
        """Bytes that training so far would have sent uncompressed, in the tensors' own dtypes."""
        return int(self.sent.dense_bytes)

    def account(self) -> Account:
        """All that training so far has sent, of all ranks, by what it was for; every rank calls it.

        Replicas that average by DDP or share parameters, and what first ranks tell the others of
        their data, count from the last checkpoint that was loaded.
        """
        sync = self.replica_sync
        between = Sent() if sync is None else sync.sent
        if sync is not None and not sync.counts_on:
            between -= self._loaded[1]
        links = ((link.direction, link.meter.train.sent) for link in self.links)
        own = Account.of_links(links, replicas=between, agreements=self._told).to_dict()["parts"]
        total = sum(map(Account.from_dict, self.mesh.all_gather_object(own)), Account())
        return replace(total, agreements=total.agreements + self.num_steps * self._agreed_in_step)

    @property
    def _agreed_in_step(self) -> Sent:
        return agreed_in_step(self.mesh.num_ranks, len(self.links))

    def _of_step(self, account: Account) -> Account:
        """The mean over the steps that each part was counted in."""
        of_step = (1 / max(1, self.num_steps)) * account
        counted = 1 / max(1, self.num_steps - self._loaded[0])
        agreed = self._agreed_in_step
        told = account.agreements - self.num_steps * agreed
        of_step = replace(of_step, agreements=agreed + counted * told)
        sync = self.replica_sync
        if sync is None or sync.counts_on:
            return of_step
        return replace(of_step, replicas=counted * account.replicas)

    @property
    def sent(self) -> Sent:
        """All that training so far has sent over cuts and ties, of all ranks; see `account`."""
        return self._sent_by_all if self.mesh.num_ranks > 1 else sent_by(self.links)

    def gather_scalars(self, values: Mapping[str, Tensor]) -> Tensor:
        """One number for a parameter, from all ranks of a replica, in the model's order: [n].

        Replicas are given the mean of theirs, unless they train apart from each other.

        Args:
            values: 0-d tensors by the names of this rank's parameters; some may be left out.
        """
        names = [name for stage in self.cut_stages for name, _ in stage.named_parameters()]
        if self.mesh.num_ranks == 1:
            found = [values[name] for name in names if name in values]
            if not found:
                return torch.zeros(0, device=self.mesh.device)
            return torch.stack([value.to(self.mesh.device) for value in found])
        own = [values[name].item() if name in values else 0.0 for name in names]
        there = [float(name in values) for name in names]
        apart = self.exchange is not None and self.exchange.method.rhythm is not None
        places, place = (self.num_replicas, self.replica) if apart else (1, 0)
        mine = slice(place * len(names), (place + 1) * len(names))
        placed = [0.0] * (places * len(names))
        placed[mine] = own
        sums = self.mesh.all_reduce_sum([*placed, *there])
        kept = [
            total / (self.num_replicas // places)
            for total, count in zip(sums[mine], sums[len(placed) :], strict=True)
            if count
        ]
        dtype = next((value.dtype for value in values.values()), torch.float32)
        return torch.tensor(kept, dtype=dtype, device=self.mesh.device)

    # -- training and inference ---------------------------------------------------------------

    @refuses_unpacked
    def forward(
        self,
        batch: Any = None,
        target: Any = None,
        *,
        sample_ids: Any = None,
        everywhere: bool = True,
    ) -> Any:
        """The model's output for ``batch`` on the last stage's device; with a target the loss too.

        Args:
            batch: tensor [b, ...], tuple of tensors, or mapping (arguments of the first stage);
                None on a rank without data (`has_data`).
            target: second argument of the loss function; then ``(output, loss)`` is returned.
            sample_ids: for AQ-SGD in training; see `forward_backward`.
            everywhere: with several processes, give the output to all ranks; else it stays with
                the last stage, and the other ranks get None. With ``data="first"`` it stays there
                in any case.

        Raises:
            ValueError: fewer rows than chunks in training, bad sample ids, training with several
                processes, or a target without a loss function.
            TypeError: a batch without tensors, or a stage whose output is not a tensor.
            FloatingPointError: NaN or Inf at a cut.
        """
        if target is None:
            return self._output(batch, sample_ids, everywhere)
        if self._loss_fn is None:
            raise ValueError(
                "pipe(x, y) gives output and loss, and needs the loss for that: "
                "pipeline(..., loss_fn=F.cross_entropy). Several inputs of a model are a tuple, "
                "pipe((x, y))"
            )
        output = self._output(batch, sample_ids, everywhere)
        if output is None:
            return None, None
        return output, self._loss_fn(output, map_tensors(target, lambda t: t.to(output.device)))

    def _output(self, batch: Any, sample_ids: Any, everywhere: bool) -> Any:
        train = self.training and torch.is_grad_enabled()
        if self.cut_stages[0].is_causal_lm and isinstance(batch, Mapping):
            batch = {name: value for name, value in batch.items() if name != "labels"}
        if not train:
            with self._inferring("pipe", batch) as infers:
                outputs = self._infer(batch)[0] if infers else []
            output = gather(outputs) if outputs else None
            self._check_finite()
            return self._output_on_all(output) if everywhere and self.first_data is None else output
        if self.mesh.num_ranks > 1:
            raise ValueError(
                "pipe(x) with gradients: autograd does not reach other processes; train with "
                "pipe.forward_backward(x, y), or infer under torch.no_grad() or pipe.eval()"
            )
        shared = [tie.name for tie in (*self.ties, *self.shared_weights) if tie.trains]
        if shared:
            raise ValueError(
                f"pipe(x) with gradients: two stages share {shared[0]}, and its gradients "
                "are added up at the end of pipe.forward_backward(x, y); train with that, or infer "
                "under torch.no_grad() or pipe.eval()"
            )
        self._finish_step()
        sizes = self._microbatch_rows(batch, train)
        step = self._step(sizes, batch, sample_ids, train)
        parts = scatter(batch, sizes)
        self._begin_adaptation(parts)
        self._open, self._began = step, time.perf_counter()
        with self._undone_on_error(train):
            return gather(self.engine.forward(parts, step, ()))

    def _infer(self, batch: Any, target: Any = None) -> tuple[list[Tensor], list[Any]]:
        """Outputs, where the last stage is, and targets of the microbatches."""
        sizes = self._microbatch_rows(batch, False)
        if target is not None:
            check_target(target, sum(sizes))
        step = self._step(sizes, batch, None, False)
        parts = scatter(batch, sizes)
        if self.first_data is not None:
            self.first_data.tell(batch, sizes, parts)
        same = ((batch, target),) if self.first_data is None else None
        with self._undone_on_error(False):
            outputs = self.engine.forward(parts, step, same)
        return outputs, [] if target is None else scatter(target, sizes)

    @contextmanager
    def _inferring(
        self, what: str, *given: Any, infer: Callable[[int, Outline], object] | None = None
    ) -> Iterator[bool]:
        """A context for inference on ranks with data; on others all of it is done at once.

        Args:
            what: is called.
            given: batches, where there are any.
            infer: called without data, with each outline and its number.

        Yields:
            Whether this rank has data.
        """
        first, step = self.first_data, self._bare_step(False)
        if first is None:
            yield True
            return
        with self._undone_on_error(False):
            if first.tells:
                with first.telling(step, what):
                    yield True
                return
            first.refuse(what, *given)
            for number, outline in enumerate(first.heard(step, what)):
                (infer or self._infer_outline)(number, outline)
        yield False

    def _infer_outline(self, number: int, outline: Outline) -> None:
        step = self._step(outline.sizes, outline.beside, None, False)
        self.engine.forward(outline.microbatches(), step, None)

    @overload
    def forward_backward(
        self,
        batch: Any = ...,
        target: Any = ...,
        *,
        sample_ids: Any = ...,
        weight: float = ...,
        update: Callable[[], object] | None = ...,
        updates: int = ...,
        with_output: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def forward_backward(
        self,
        batch: Any = ...,
        target: Any = ...,
        *,
        sample_ids: Any = ...,
        weight: float = ...,
        update: Callable[[], object] | None = ...,
        updates: int = ...,
        with_output: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    @refuses_unpacked
    def forward_backward(
        self,
        batch: Any = None,
        target: Any = None,
        *,
        sample_ids: Any = None,
        weight: float = 1.0,
        update: Callable[[], object] | None = None,
        updates: int = 1,
        with_output: bool = False,
    ) -> Any:
        """Runs all microbatches forward and backward; gradients add up in ``.grad``.

        Each microbatch's loss is weighted by its share of the terms that it is the mean over, rows
        or tokens (`mpcomp.core.loss.num_terms`; not at all where the loss has
        ``reduction="sum"``), and microbatches are differentiated in ascending order. Call it
        several times before the optimizer's step to accumulate gradients. Hooks of
        ``register_post_accumulate_grad_hook`` run once, at the end (`mpcomp.api.gradient_hooks`).

        Args:
            batch: tensor [b, ...], tuple of tensors, or mapping (arguments of the first stage);
                None on a rank without data (`has_data`), which has no target and no ids either.
            target: tensor [b, ...], tuple or mapping: second argument of the loss function; by
                default the ``labels`` of a batch that is a mapping.
            sample_ids: what AQ-SGD finds its buffers by: [b] ids; [b, 2] (id, augmentation
                seed); or a whole number, the index of a batch of fixed composition.
            weight: on the gradients, and not on the loss that is returned: 1 / n makes those of n
                accumulated batches their mean, as ``(loss / n).backward()`` does.
            update: trains within this call, asynchronously: changes the weights of this rank by
                their gradients and sets those to zero. No rank waits for another before it, so a
                link's latency costs next to nothing, and stage ``j`` of ``n`` computes with weights
                that lack up to ``n - 1 - j`` updates (PipeDream, Narayanan et al. 2019). A tied
                weight changes when both its uses' gradients are complete; the last stage, beside
                the first, then lacks ``n // 2``. Most optimizers suffer by that; NAdam with betas
                (0.99, 0.999) does not much (Ajanthan et al. 2025). See docs/guide/asynchronous.md.
            updates: so many times, after ``chunks / updates`` microbatches each, by the mean loss
                of these; links and `num_steps` count one step all the same.
            with_output: return ``(output, loss)``, for figures of training such as an accuracy.
                With several processes the output then goes to every rank, uncompressed; with
                ``data="first"`` it stays on the first, and others get None for it.

        Returns:
            The loss of the batch, detached, unscaled; 0-d; the same on every rank. With replicas,
            that of their batches together. Its ``backward`` is an error, as this has done it.

        Raises:
            ValueError: no loss function, evaluation mode, no batch on a rank that is to have one,
                or one on a rank that is not, fewer rows than chunks, bad ids, a weight that is no
                number, updates that cannot be made in between, a batch that was computed by what
                would not be trained (`mpcomp.api.porting`), or a loss of which the mean over
                microbatches is not its value for the batch (`mpcomp.core.loss_check`: the first
                step finds out, or the first with padding).
            TypeError: a batch without tensors, or a stage whose output is not a tensor.
            FloatingPointError: NaN or Inf at a cut or in the loss (in a gradient, and in the loss,
                only without a loss scaler). Links are then as before the step; gradients of the
                microbatches differentiated until then have been added, so ``zero_grad`` before
                going on.
        """
        if self._loss_fn is None:
            raise ValueError(
                "forward_backward needs the loss: pipeline(..., loss_fn=F.cross_entropy)"
            )
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "forward_backward under torch.inference_mode(), in which nothing has a gradient: "
                "leave it for training"
            )
        refuse_within_ddp()
        if not self.training:
            raise ValueError(
                "forward_backward in evaluation mode: call pipe.train() first, or dropout and "
                "BatchNorm would do what they do in evaluation. A model that transformers' "
                "from_pretrained gives is in that mode, and so is its pipeline"
            )
        if not math.isfinite(weight):
            raise ValueError(f"weight={weight!r}: expected a finite number, such as 1 / n")
        within = self._updates(update, updates)
        self._finish_step()
        begin, waited_before = time.perf_counter(), self.engine.waited_s
        count = None if within is None else within.count
        given = self._given(batch, target, sample_ids, count)
        step, parts, targets = given.step, given.parts, given.targets
        if self.engine.computes_loss:
            targets = [map_tensors(part, lambda t: t.to(self.mesh.device)) for part in targets]
        loss = StepLoss(
            self._loss_fn,
            given.terms,
            self.scaler,
            weight=weight,
            updates=count or 1,
            keeps_outputs=with_output,
            watch=given.watch,
            check=self._leaf_check,
        )
        if self.scaler is not None and not self.engine.computes_loss:
            # A scaler is made by its first loss, but `unscale_` and `update` need it on all ranks.
            self.scaler.scale(torch.zeros((), device=self.mesh.device))
        self._begin_adaptation(parts)
        with ExitStack() as stack:
            stack.enter_context(hooks_once(self.with_loss.named_parameters()))
            if self._tracing is not None:
                step = replace(step, trace=self._tracing.begin_step(step.index))
            self._open, self._began = step, time.perf_counter()
            stack.enter_context(self._undone_on_error(True))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(step.during("step"))
            self.engine.forward_backward(parts, targets, step, loss, given.same, within)
            with step.during("agree"):
                total = self._finish_step(loss)
        assert total is not None
        if self._tracing is not None:
            self._tracing.end_step()
        waited = self.engine.waited_s - waited_before
        seconds = time.perf_counter() - begin
        self.step_times.append((seconds, waited))
        self.trained_s += seconds
        for log in self._step_logs:
            log.step(self.num_steps - 1, total)
        total = total.as_subclass(DifferentiatedLoss)
        if not with_output:
            return total
        outputs = [output for _, output in sorted(loss.outputs.items())]
        whole = gather(outputs) if outputs else None
        return self._output_on_all(whole) if self.first_data is None else whole, total

    def _given(self, batch: Any, target: Any, sample_ids: Any, updates: int | None) -> _Given:
        """The batch of a training step, as this rank has it."""
        first, bare = self.first_data, self._bare_step(True)
        if first is None:
            made = self._made(batch, target, sample_ids)
            return replace(made, same=(*made.data, made.step.sample_ids, updates))
        if first.tells:
            with first.telling_step(bare, (updates,)):
                made = self._made(batch, target, sample_ids)
                told = first.tell(made.data[0], made.sizes, made.parts, sample_ids)
            self._told += Sent(told)
            return replace(made, same=(updates,))
        first.refuse("forward_backward", batch, target, sample_ids)
        announce = not self.adaptation.acts_before()
        outline = first.hear_step(bare, (updates,), announce=announce)
        count = len(outline.sizes)
        return _Given(
            step=self._step(outline.sizes, outline.beside, outline.sample_ids, True),
            sizes=outline.sizes,
            parts=outline.microbatches(),
            targets=[None] * count,
            terms=[0.0] * count,
            same=(updates,),
        )

    def _made(self, batch: Any, target: Any, sample_ids: Any) -> _Given:
        """The batch of a training step, of data that was given here."""
        if batch is None:
            raise _no_batch("forward_backward")
        batch, target = with_target(batch, target)
        sizes = self._microbatch_rows(batch, True)
        check_target(target, sum(sizes))
        for name, given in (("batch", batch), ("target", target)):
            check_no_graph(name, given, alone=self.mesh.num_ranks == 1)
        step = self._step(sizes, batch, sample_ids, True)
        parts, targets = scatter(batch, sizes), scatter(target, sizes)
        assert self._loss_fn is not None and self._loss_check is not None
        return _Given(
            step,
            sizes,
            parts,
            targets,
            terms=[
                num_terms(self._loss_fn, part, size)
                for part, size in zip(targets, sizes, strict=True)
            ],
            data=(batch, target),
            watch=self._loss_check.begin(len(sizes), target),
        )

    def check_updates(self, updates: int) -> None:
        """Refuses what `forward_backward` would, for a program that has not begun.

        Args:
            updates: to be made within a step.

        Raises:
            ValueError: they cannot be made with these stages, links, chunks or processes.
        """
        self._updates(lambda: None, updates)

    def evaluate(self, loader: Iterable[Any] | None = None, metric: Metric | None = None) -> Any:
        """The mean of ``metric`` over a loader, in evaluation mode, without gradients.

        Args:
            loader: yields (batch, target), (batch, target, anything else), or mappings with
                ``labels``. Any batch size. None on a rank without data (`has_data`), which needs
                no metric either.
            metric: ``metric(output, target)``, the mean over a microbatch: a number, a 0-d tensor,
                or a mapping of those. The loss function by default.

        Returns:
            A float, or a dict of floats: weighted by rows, or by the terms that the metric is over
            (`mpcomp.core.loss.num_terms`), so that short batches count right. The same on every
            rank; the metric is called where the last stage is. Replicas are taken together.

        Raises:
            ValueError: the loader is empty, there is neither metric nor loss function, the metric
                is a loss of which the mean over microbatches is not its value for a batch, or a
                rank without data was given a loader.
            TypeError: the metric is no function, or the loader yields something else.
        """
        begin = time.perf_counter()
        self._align_replicas()
        sums: Sums | None = None
        with evaluating(self, *self.cut_stages), torch.no_grad():
            with self._inferring("evaluate", loader) as infers:
                if infers:
                    sums = sums_over(self._judging(loader), *self._judged_by(metric), self.mesh)
            mean = mean_of(sums, self.mesh)
        self._check_finite()
        self.evaluated_s += time.perf_counter() - begin
        return mean

    def _judged_by(self, metric: Metric | None) -> tuple[Metric, LossCheck]:
        """The metric of an evaluation, and its check."""
        check_function("metric", metric, ". One batch is evaluated by pipe.evaluate([(x, y)])")
        metric = metric or self._loss_fn
        if metric is None:
            raise ValueError("evaluate needs a metric: evaluate(loader, metric)")
        check = self._loss_check
        if check is None or not check.is_of(metric):
            check = self._metric_check
            if check is None or not check.is_of(metric):
                check = self._metric_check = LossCheck(metric, "metric")
        return metric, check

    def _judging(
        self, loader: Iterable[Any] | None
    ) -> Iterator[tuple[list[Tensor], list[Any], Any]]:
        """Outputs and targets of each batch of a loader, by microbatch, and the target."""
        if loader is None:
            raise ValueError("evaluate needs a loader: evaluate(loader, metric)")
        for item in loader:
            batch, target = with_target(*pair_of(item))
            yield *self._infer(batch, target), target

    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 20,
        **options: Any,
    ) -> Any:
        """Continues token sequences with a causal language model, with a cache in each stage.

        Greedy it gives the tokens of the model's own ``generate``, with compression off. Whether
        cuts are compressed is as in evaluation: `uncompressed` is a context for it.

        Args:
            input_ids: prompts [b, s]; the same on every rank of a replica. All else is the same on
                all ranks; replicas whose rows end earlier than those of others keep pace with them.
                None on a rank without data (`has_data`), where nothing else counts either.
            attention_mask: [b, s], 0 where a prompt is padded, on its left.
            max_new_tokens: tokens to append at most.
            options: ``do_sample`` (False is greedy) with ``temperature``, ``top_k``, ``top_p`` and
                ``seed``; ``repetition_penalty``; ``logits_processor``, a list of functions of
                (ids [b, s], scores [b, vocabulary]); ``eos_token_id`` and ``pad_token_id``, by
                default those of the model's ``generation_config``, of which nothing else is used;
                ``streamer``, of transformers.

        Returns:
            Prompts and what follows, [b, s + n], on every rank; a row that has ended is padded.
            None on a rank without data.

        Raises:
            ValueError: no language model, prompts padded on the right, more tokens than the
                model has positions, or ranks that were given different arguments.
            FloatingPointError: NaN or Inf at a cut or in the logits.
        """
        caches = StageCaches()

        def infer(number: int, outline: Outline) -> None:
            (told,) = outline.microbatches(past_key_values=caches)
            step = replace(self._step(outline.sizes, told, None, False), call=number)
            self.engine.next_tokens(told, step, _nothing_chosen, everywhere=False)

        ids: Tensor | None = None
        with (
            evaluating(self, *self.cut_stages),
            torch.no_grad(),
            self._inferring("generate", input_ids, infer=infer) as infers,
        ):
            if infers:
                ids = generate(
                    self.next_tokens,
                    self.cut_stages,
                    self.replica if self.first_data is None else 0,
                    input_ids,
                    attention_mask=attention_mask,
                    max_new_tokens=max_new_tokens,
                    **options,
                )
        self._check_finite()  # a method may hide it
        return ids

    def next_tokens(
        self,
        batch: Mapping[str, Any],
        choose: Callable[[Tensor], Tensor],
        *,
        call: int,
        same: Any = None,
    ) -> list[Tensor]:
        """Runs one call of `generate`; ``choose`` gets the logits where the last stage is.

        Args:
            batch: what the first stage is called with.
            choose: gives int64 [b].
            call: number of the call, from 0.
            same: in the first call, what else than the batch must be the same on all ranks.

        Returns:
            What it chose, int64 [b] of each replica, on every rank; with ``data="first"`` of this
            replica alone.

        Raises:
            FloatingPointError: NaN or Inf in the logits of one of the replicas; on every rank.
        """
        sizes = [num_rows(batch["input_ids"])]
        step = replace(self._step(sizes, batch, None, False), call=call)
        everywhere = self.first_data is None
        if self.first_data is not None:
            self.first_data.tell(batch, sizes, [batch])
        with self._undone_on_error(False):
            chosen = self.engine.next_tokens(batch, step, choose, same=same, everywhere=everywhere)
        if any(bool((each < 0).any()) for each in chosen):  # there was no number to choose by
            if everywhere:
                self._check_finite()
            raise FloatingPointError("generate: NaN or Inf in the logits; the model has diverged")
        return chosen

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context replicas add up their gradients and do not average them.

        For accumulation: the last `forward_backward` before the optimizer's step goes outside.
        """
        return nullcontext() if self.replica_sync is None else self.replica_sync.disabled()

    # -- state of AQ-SGD ----------------------------------------------------------------------

    def prefetch(self, sample_ids: Any) -> None:
        """Begins to read, in a thread, what AQ-SGD holds of the samples of a batch to come.

        For state that is not at hand: in files, or in host memory with links on an accelerator.
        Numbers are the same with and without, and ranks may differ in their calls. Two batches are
        kept, so that a loop can call it for the next one and then train on this one::

            for (x, y, ids), following in zip(batches, [*batches[1:], None]):
                pipe.prefetch(following[2] if following else None)
                pipe.forward_backward(x, y, sample_ids=ids)

        Args:
            sample_ids: as `forward_backward` will be given them; None for no batch.

        Raises:
            TypeError, ValueError: as `forward_backward`, for bad sample ids.
            OSError: reading ahead failed since the last call.
        """
        ids = ids_of_batch(sample_ids, self.chunks)
        for link in self.links:
            link.prefetch(ids)

    def state_bytes(self, batch: Any, num_samples: int | None = None) -> dict[str, Any]:
        """Bytes that links of this process will keep at most: `mpcomp.api.memory_estimate`."""
        return state_bytes(
            batch,
            num_samples,
            cut=self.cut_stages,
            here=self._here(),
            boundaries=self.boundaries,
            ties=self.ties,
            chunks=self.chunks,
            device=self.mesh.device,
        )

    # -- compression on and off ---------------------------------------------------------------

    @contextmanager
    def compressed(self, act: bool = True, grad: bool = True, dp: bool = True) -> Iterator[None]:
        """Within this context activations and gradients are compressed or not, as given.

        ``dp`` is for gradients between replicas.

        In training, what goes dense is known exactly at both ends: estimates are set to it and
        residuals to zero.
        """
        before = self._compress_act, self._compress_grad, self._compress_dp
        self._compress_act, self._compress_grad, self._compress_dp = act, grad, dp
        try:
            yield
        finally:
            self._compress_act, self._compress_grad, self._compress_dp = before

    def uncompressed(self) -> Any:
        """A context within which everything goes dense."""
        return self.compressed(act=False, grad=False, dp=False)

    # -- a pilot ------------------------------------------------------------------------------

    def compare(
        self,
        methods: Sequence[MethodPair] | None = None,
        *,
        data: Iterable[Any],
        batches: int = 20,
        optimizer: torch.optim.Optimizer | None = None,
        mbps: float | None = None,
        latency_ms: float = 0.0,
        floor: float = 1.0,
        seconds: float = 60.0,
        show: bool = True,
    ) -> Comparison:
        """Tries methods at the cuts on this model and data, and recommends one.

        Each runs over the same batches from the same state; afterwards weights, gradients, the
        optimizer's state, generators and links are as before, bit for bit. Every rank calls it.

        Args:
            methods: spec strings for both directions, or pairs (activations, gradients); by
                default those that were studied for such models. "none" and "bf16" are added.
            data: yields batches as `evaluate` takes them; a third entry is taken for sample ids.
            batches: the most that are taken of it.
            optimizer: with one, each method trains over the batches; without one weights stay, and
                the gradients of all batches together are compared.
            mbps: Mbit/s of links between machines, one for each stage, on which a step is
                predicted.
            latency_ms: of these links, one way.
            floor: the most that what is recommended may raise the loss by, in %.
            seconds: that it may take, about; with less time fewer batches are used.
            show: print a table and the recommendation (on the first rank).

        Raises:
            ValueError: replicas, no batch, an unknown method, or a number that makes no sense.
            TypeError: an optimizer that is none of torch's, or data of another form.
        """
        if self.first_data is not None:
            raise ValueError(
                "compare with data='first': a pilot runs over batches that every rank has; build "
                "the pipeline with data='all' for it"
            )
        self._finish_step()
        pilot = Pilot(
            model=self.with_loss,
            boundaries=self.boundaries,
            engine=self.engine,
            scaler=self.scaler,
            is_language_model=self.cut_stages[0].is_causal_lm,
            forward_backward=self.forward_backward,
            crossed_by=self._crossed_by,
            step_times=lambda: self.step_times,
            account=self.account,
        )
        return compare(
            pilot,
            methods,
            data=data,
            batches=batches,
            optimizer=optimizer,
            mbps=mbps,
            latency_ms=latency_ms,
            floor=floor,
            seconds=seconds,
            show=show,
        )

    @contextmanager
    def _crossed_by(self, boundaries: Sequence[Boundary]) -> Iterator[None]:
        """Within it the links of other boundaries are used, and nothing is left of its steps.

        Weights and generators apart.
        """
        before = {name: getattr(self, name) for name in _LEFT_BY_STEPS}
        mesh = self.mesh
        with ExitStack() as stack:
            for own, other in zip(self.boundaries, boundaries, strict=True):
                stack.enter_context(own.crossed_by(other))
            for tie in self.ties:
                stack.enter_context(tie.crossed_anew())
            self._warmup_steps = 0
            self._copies = EqualCopies(mesh, self.links, self.ties, (), enabled=False)
            self.step_times = deque(maxlen=self.step_times.maxlen)
            self.adaptation = Adaptation(
                self.links, num_ranks=mesh.num_ranks, num_replicas=mesh.num_replicas
            )
            try:
                yield
            finally:
                for name, value in before.items():
                    setattr(self, name, value)

    # -- figures of the run ------------------------------------------------------------------------

    def report(self, *, show: bool = True) -> dict[str, Any]:
        """Bytes of a step, and of each boundary and direction, with fidelity and time.

        First comes all that a step sends, below bf16, and what most of it is for
        (`mpcomp.core.account`); then what crosses each cut and tie.

        With several processes every rank calls it; the figures are those of all ranks together,
        links are measured, and it says whether compression pays (`mpcomp.api.cost_model`).
        Fidelity is that of one microbatch a step, by turns. ``replicas`` is what replicas have
        exchanged with a ``dp_comp``: bytes of all ranks, paths of one replica, seconds of the
        slowest rank.

        Args:
            show: print the table as well (on the first rank).

        Returns:
            The figures as a dict of plain numbers and words.
        """
        account = self.account()
        report = report_of(
            self.engine,
            self.links,
            after=[
                *(stage.block_names[-1] for stage in self.cut_stages[:-1]),
                *(tie.name for tie in self.ties),  # numbered on, as if they were cuts
            ],
            adaptation=self.adaptation,
            exchange=self.exchange,
            step_times=self.step_times,
            num_steps=self.num_steps,
            account=account,
            of_step=self._of_step(account),
        )
        if show and self.rank == 0:
            print_report(report)
        return report

    @contextmanager
    def trace(self, path: str | Path, *, steps: int = 1, skip: int = 0) -> Iterator[None]:
        """Within this context calls of `forward_backward` are traced: who does what, and when.

        All ranks enter it and leave it together. The file is written as soon as there are enough
        steps, or else at the end; https://ui.perfetto.dev and chrome://tracing open it. Numbers of
        the training do not change. Accelerators are waited for at both ends of each span, so that
        its times are right: traced steps take longer there, and several of them in one process do
        not overlap.

        Args:
            path: of the file, which the first rank writes.
            steps: calls to trace.
            skip: calls to let pass before these: the first ones of a run take longer than others.

        Raises:
            ValueError: there is nothing to trace, no folder for the file, or a trace under way.
        """
        if self._tracing is not None:
            raise ValueError("pipe.trace within another one: end that first")
        devices = [self.engine.device_of(stage) for stage in self._here()]
        self._tracing = Tracing(self.mesh, devices, Path(path), steps=steps, skip=skip)
        try:
            with self._tracing:
                yield
        finally:
            self._tracing = None

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of gradients between replicas; None where none are compressed."""
        return None if self.replica_sync is None else self.replica_sync.exchange

    @property
    def adaptive_history(self) -> list[dict[str, Any]]:
        """An entry for each of the last 1,000 steps; see `mpcomp.links.adaptation`."""
        return list(self.adaptation.history)

    # -- the model ----------------------------------------------------------------------------

    def merge(self) -> nn.Module:
        """The original model, with the trained weights, on the first stage's device.

        With several processes a copy of it with all weights, on the CPU of every rank.
        """
        model = self._plain_model[0] or staging.merge(self.cut_stages)
        if self.mesh.num_ranks == 1:
            return model.to(self.engine.device_of(0))
        self._align_replicas()
        whole = copy.deepcopy(model)
        whole_again(whole)
        state = self.mesh.all_gather_tensors(_on_cpu(super().state_dict()), "weights")
        whole.load_state_dict(state, assign=True)
        staging.tie_names(whole, self.cut_stages)
        return whole.cpu()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Writes a model of transformers as its own ``save_pretrained`` does; every rank calls it.

        The folder is written by the first rank.

        Args:
            folder: to be made.
            options: for the model's ``save_pretrained``.

        Raises:
            TypeError: the model has no ``save_pretrained``.
        """
        original: Any = self.cut_stages[0].original
        if not hasattr(original, "save_pretrained"):
            raise TypeError(
                f"save_pretrained: {type(original).__name__} is no model of transformers; use "
                "pipe.merge() and torch.save, or pipe.save"
            )
        model: Any = self.merge()
        with self.mesh.failing_together("saving the model"):
            if self.rank == 0:
                model.save_pretrained(folder, **options)
        self.collect(None)  # none goes on to read what is not there yet

    # -- persistence --------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state under the original model's names: with several processes that of this rank.

        It then says so, once: a file that every rank writes would end with the part of one.
        """
        if self.num_ranks > 1 and not self._has_warned_of_part:
            self._has_warned_of_part = True
            warnings.warn(
                f"pipe.state_dict() on rank {self.rank} of {self.num_ranks} is the part of this "
                "rank's stages, and a file that all ranks write would hold one of the parts: take "
                "pipe.merge().state_dict(), on every rank, for the whole, or pipe.save(folder) for "
                "a checkpoint, in which each rank writes its own",
                stacklevel=2,
            )
        return super().state_dict(*args, **kwargs)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Names the optimizer that steps by the gradients, for the methods that must know it.

        Those with ``lr_scaled=True`` follow its (first group's) rate; `LocalSGD` between replicas
        acts after its steps.

        Raises:
            ValueError: the optimizer has momentum, and so has the method between replicas; or it
                has none of the parameters that `LocalSGD` is to average.
        """
        if self.exchange is not None:
            self.exchange.follow(optimizer)
        self._lr_of = optimizer

    def save(
        self,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> None:
        """Writes a checkpoint, each rank its part; see `mpcomp.checkpoint.save`."""
        self._finish_step()
        run = self._run_state()
        checkpoint.save(
            run, Path(folder), optimizer=optimizer, scheduler=scheduler, extra=extra, keep=keep
        )

    def load(
        self,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> dict[str, Any]:
        """Reads a checkpoint, on every rank, and returns its ``extra``.

        See `mpcomp.checkpoint.load`.
        """
        run = self._run_state()
        extra = checkpoint.load(run, Path(folder), optimizer=optimizer, scheduler=scheduler)
        self.num_steps = run.num_steps
        self._open = None  # only now: a load that fails leaves an open step open
        for each in self.crossings:
            each.finish_step(finite=False)
        for link in self.links:
            link.found_nonfinite(train=True)  # counts and clears
        self._sent_by_all = Sent.of(self.mesh.all_reduce_sum([*sent_by(self.links)]))
        self._told = Sent()
        self._loaded = (
            self.num_steps,
            Sent() if self.replica_sync is None else self.replica_sync.sent,
        )
        return extra

    # -- inside -------------------------------------------------------------------------------

    def _here(self) -> list[int]:
        """Numbers of the stages of this rank."""
        return [stage.index for stage in self.stages if isinstance(stage, staging.Stage)]

    def _run_state(self) -> checkpoint.RunState:
        return checkpoint.RunState(
            mesh=self.mesh,
            model=self.with_loss,
            cut=self.cut_stages,
            here=self._here(),
            chunks=self.chunks,
            links=self.links,
            device_of=self.engine.device_of,
            exchange=self.exchange,
            scaler=self.scaler,
            num_steps=self.num_steps,
        )

    def _output_on_all(self, output: Tensor | None) -> Tensor:
        """The output of this replica's last stage, on every rank of the replica."""
        place = self.engine.output_place
        return self.mesh.broadcast_in_pipelines(output, place, "output of the last stage")

    def _check_finite(self) -> None:
        raise_if_nonfinite(self.mesh, self.links, self.num_steps)

    def _align_replicas(self) -> None:
        """Gives all replicas the buffers (BatchNorm's statistics) of the first."""
        if self.replica_sync is not None:
            self.replica_sync.align_buffers()

    def _finish_replicas(self, finite: bool) -> None:
        if self.replica_sync is not None:
            self.replica_sync.finish_step(finite)

    def _begin_adaptation(self, parts: Sequence[Any]) -> None:
        """Lets adaptive links with a budget begin, before the first step has sent anything."""

        def metas() -> list[list[TensorMeta]]:
            planner = Planner(self.cut_stages, self.mesh.device)
            autocast = Autocast.of_caller(self.mesh.device)
            return [planner.plan(part, autocast) for part in parts]

        self.adaptation.begin(metas, self.mesh.all_reduce_sum)

    def _microbatch_rows(self, batch: Any, train: bool) -> list[int]:
        if batch is None:
            raise _no_batch("pipe(x)")
        rows = num_rows(batch)
        self.cut_stages[0].check_batch(batch)
        if rows == 0:
            raise ValueError("the batch has no rows: expected at least one sample")
        if train and rows < self.chunks:
            raise ValueError(
                f"chunks={self.chunks} is larger than the batch of {rows} rows: "
                "use fewer chunks, a larger batch, or drop_last=True in the loader"
            )
        return rows_of_chunks(rows, min(self.chunks, rows))

    def _bare_step(self, train: bool) -> Step:
        """The step to come, as far as it is known without its batch."""
        lr = self._lr_of.param_groups[0]["lr"] if self._lr_of is not None else None
        scaled = self.scaler is not None and self.scaler.is_enabled()
        return Step(
            index=self.num_steps,
            train=train,
            compress_act=self._compress_act,
            compress_grad=self._compress_grad,
            compress_dp=self._compress_dp and self.num_steps >= self._warmup_steps,
            scaled=scaled,
            loss_scale=self.scaler.get_scale() if self.scaler is not None and scaled else 1.0,
            lr=None if lr is None else float(lr),
        )

    def _step(self, sizes: Sequence[int], batch: Any, sample_ids: Any, train: bool) -> Step:
        # Of this name and meaning in transformers; a model of one's own may mean the opposite.
        marks = self.cut_stages[0].is_causal_lm and isinstance(batch, Mapping)
        mask = batch.get("attention_mask") if marks else None
        step = replace(
            self._bare_step(train),
            sample_ids=split_sample_ids(sample_ids, sizes) if train else (),
            valid=valid_positions(mask, sizes),
            num_microbatches=len(sizes),
        )
        for link in self.links:
            link.check_step(step, sizes)
        return step

    def _updates(self, update: Callable[[], object] | None, updates: int) -> Updates | None:
        def function() -> None:
            assert update is not None
            self.updating = True
            try:
                update()
            finally:
                self.updating = False

        return updates_within(
            None if update is None else function,
            updates,
            chunks=self.chunks,
            scaler=self.scaler,
            ties=self.ties,
            stages=list(self.stages),
            engine=self.engine,
        )

    def _finish_step(self, loss: StepLoss | None = None) -> Tensor | None:
        """Ends the open step, if there is one; returns its loss, if given one."""
        step, self._open = self._open, None
        if step is None:
            return None
        overflowed = self._overflowed(step)
        result = finish_step(
            self.mesh,
            self.crossings,
            step,
            loss,
            overflowed,
            self.adaptation,
            self._began,
            self._copies,
        )
        self._finish_replicas(result.finite)
        if self.scaler is not None and step.scaled and self.mesh.num_ranks > 1:
            if not result.finite:
                overflow_gradients(self.with_loss.parameters())
            check_without_gradients(self.scaler, skipped=not result.finite)
        self._sent_by_all = result.sent
        self.step_skipped = not result.finite
        self.num_steps += 1
        return result.loss

    def _overflowed(self, step: Step) -> bool:
        """Whether the scaler skips the step, or has: then it has already lowered the scale."""
        if self.scaler is None or not step.scaled:
            return False
        parameters = self.with_loss.parameters()
        return self.scaler.get_scale() < step.loss_scale or gradients_overflowed(parameters)

    @contextmanager
    def _undone_on_error(self, train: bool) -> Iterator[None]:
        """Leaves no trace in the links of a step that failed."""
        try:
            yield
        except BaseException:
            if train:
                failed, self._open = self._open, None
                if self._tracing is not None and failed is not None:
                    self._tracing.discard_step(failed.trace)
                for each in self.crossings:
                    each.finish_step(finite=False)
                self._finish_replicas(finite=False)
                self.adaptation.discard()
            for link in self.links:
                link.found_nonfinite(train)  # counts and clears
            raise


def _nothing_chosen(output: Tensor) -> Tensor:
    raise AssertionError("a rank without data has no last stage")


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _no_batch(call: str) -> ValueError:
    return ValueError(
        f"{call} without a batch: each rank is given one, or, in a pipeline that is built with "
        "data='first', the first alone"
    )
