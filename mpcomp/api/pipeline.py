"""The object that `mpcomp.pipeline` returns: a model that trains through compressed cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

import stages as staging
from mpcomp import checkpoint
from mpcomp.api.batches import Batches
from mpcomp.api.figures import Figures
from mpcomp.api.inference import Inference, Metric, evaluating
from mpcomp.api.learned_loss import LeafCheck
from mpcomp.api.original_names import OriginalModel
from mpcomp.api.porting import (
    DifferentiatedLoss,
    check_differentiable,
    check_trainable,
    refuses_unpacked,
)
from mpcomp.api.training_steps import TrainingSteps
from mpcomp.core.loss import TARGETS, LossFn, StepLoss
from mpcomp.core.microbatch import gather, map_tensors
from mpcomp.core.sample_ids import ids_of_batch
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.replica_sync import ReplicaSync
from mpcomp.engines.base import Engine
from mpcomp.engines.first_data import FirstData
from mpcomp.engines.gradients import OptimizerWatch
from mpcomp.links.boundary import Boundary
from mpcomp.links.tied_weights import SharedWeight, Tie, TiedWeights, fresh_copy
from mpcomp.pilot.comparison import Comparison
from mpcomp.pilot.dial import Dial
from mpcomp.pilot.trials import MethodPair, Pilot, compare
from mpcomp.plan.state_bytes import state_bytes

__all__ = ["LossFn", "Metric", "Pipeline"]


class Pipeline(Figures, OriginalModel):
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
        crossings: all that sends messages: boundaries, then ties.
        mesh: the ranks.
        rank: number of this process, 0 to `num_ranks` - 1.
        num_ranks: number of processes.
        replica: number of the pipeline that this rank is in, 0 to `num_replicas` - 1.
        num_replicas: number of pipelines.
        replica_sync: keeps the replicas of this rank's stages alike; None for one replica.
        first_data: tells other ranks of batches, or hears of them; None where each has data.
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
        first_data: FirstData | None = None,
        dial: Dial | None = None,
    ) -> None:
        super().__init__(stages, cut, engine, replica_sync, plain_model)
        self._given_loss = (loss_fn,)  # in a tuple, so that torch does not register it
        self.boundaries = list(boundaries)
        self.ties = [tie for tie in ties if isinstance(tie, TiedWeights)]
        self.shared_weights = [tie for tie in ties if isinstance(tie, SharedWeight)]
        self.crossings: list[Boundary | TiedWeights] = [*self.boundaries, *self.ties]
        self.rank, self.num_ranks = self.mesh.rank, self.mesh.num_ranks
        self.replica, self.num_replicas = self.mesh.replica, self.mesh.num_replicas
        self.first_data = first_data
        #: All that a step leaves beside links, weights and generators; a pilot swaps it.
        self._steps = TrainingSteps(
            engine,
            stages,
            cut,
            self.crossings,
            self.with_loss,
            scaler=scaler,
            replica_sync=replica_sync,
            warmup_steps=warmup_steps,
            compares_copies=compares_copies,
            dial=dial,
        )
        self._batches = Batches(engine, cut, chunks, loss_fn, first_data)
        self._inference = Inference(engine, cut, self._batches, loss_fn)
        self._leaf_check = LeafCheck(list(self.with_loss.parameters()))
        pp_size = self.mesh.pp_size
        self._watch = OptimizerWatch(self.with_loss, pp_size) if pp_size > 1 else None

    @property
    def chunks(self) -> int:
        """The number of microbatches; it may be changed between steps, on all ranks alike."""
        return self._batches.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._batches.chunks = chunks

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, if there is one; it may be changed between steps."""
        return self._steps.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._steps.scaler = scaler

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipeline:
        self.engine.forget_shapes()  # dtypes may change
        super()._apply(fn, recurse)
        return self

    # -- ranks --------------------------------------------------------------------------------

    def collect(self, value: Any) -> list[Any]:
        """A value that JSON can hold from every rank, by rank; every rank calls it."""
        return self.mesh.all_gather_object(value)

    @property
    def has_data(self) -> bool:
        """Whether this rank is to be given batches: each is, but with ``data="first"``.

        Then it is the first of each pipeline, and the others make the same calls without::

            batches = loader if pipe.has_data else [(None, None)] * len(loader)
            for x, y in batches:
                pipe.forward_backward(x, y)
        """
        return self.first_data is None or self.first_data.tells

    @property
    def _loss_fn(self) -> LossFn | None:
        return self._given_loss[0]

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of gradients between replicas; None where none are compressed."""
        return None if self.replica_sync is None else self.replica_sync.exchange

    @property
    def updating(self) -> bool:
        """Whether an update within a step is under way, which meets no other rank."""
        return self._steps.updating

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
            return self._output(batch, None, sample_ids, everywhere)
        if self._loss_fn is None:
            raise ValueError(
                "pipe(x, y) gives output and loss, and needs the loss for that: "
                "pipeline(..., loss_fn=F.cross_entropy). Several inputs of a model are a tuple, "
                "pipe((x, y))"
            )
        output = self._output(batch, target, sample_ids, everywhere)
        if output is None:
            return None, None
        return output, self._loss_fn(output, map_tensors(target, lambda t: t.to(output.device)))

    def _output(self, batch: Any, target: Any, sample_ids: Any, everywhere: bool) -> Any:
        head = self.cut_stages[0]
        if batch is not None:
            batch = head.completed(batch, target)
        if head.of_transformers and isinstance(batch, Mapping):
            batch = {name: value for name, value in batch.items() if name not in TARGETS}
        if self.training and torch.is_grad_enabled():
            check_differentiable(self.mesh.num_ranks, [*self.ties, *self.shared_weights])
            self._steps.finish()
            step, parts = self._batches.to_differentiate(self._steps, batch, sample_ids)
            return self._steps.forward(step, parts)
        output = self._inference.output(self._steps, batch)
        return self._output_on_all(output) if everywhere and self.first_data is None else output

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
        ``register_post_accumulate_grad_hook`` run once, at the end (`mpcomp.engines.gradients`).

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
        check_trainable(self.training, weight)
        steps = self._steps
        within = steps.updates(update, updates, self.chunks)
        steps.finish()
        since = steps.now()
        count = None if within is None else within.count
        given = self._batches.for_training(steps, batch, target, sample_ids, count)
        steps.agree_on_choice(given.step)
        steps.begin_adaptation(given.parts)
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
        total = steps.run(given, loss, within, since).as_subclass(DifferentiatedLoss)
        if update is None:  # within a step each stage may be clipped by its own norm
            self.note_gradients()
        if not with_output:
            return total
        outputs = [output for _, output in sorted(loss.outputs.items())]
        whole = gather(outputs) if outputs else None
        return self._output_on_all(whole) if self.first_data is None else whole, total

    def note_gradients(self) -> None:
        """Takes gradients as they are for right (`mpcomp.engines.gradients.OptimizerWatch`)."""
        if self._watch is not None:
            self._watch.note()

    def check_updates(self, updates: int) -> None:
        """Refuses what `forward_backward` would, for a program that has not begun.

        Args:
            updates: to be made within a step.

        Raises:
            ValueError: they cannot be made with these stages, links, chunks or processes.
        """
        self._steps.updates(lambda: None, updates, self.chunks)

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
        self._align_replicas()
        with self._beside_steps(), evaluating(self, *self.cut_stages), torch.no_grad():
            return self._inference.evaluate(self._steps, loader, metric)

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
        with evaluating(self, *self.cut_stages), torch.no_grad():
            return self._inference.generate(
                self._steps,
                input_ids,
                attention_mask=attention_mask,
                max_new_tokens=max_new_tokens,
                **options,
            )

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
            link.endpoint.prefetch(ids)

    def state_bytes(self, batch: Any, num_samples: int | None = None) -> dict[str, Any]:
        """Bytes that links of this process will keep at most: `mpcomp.plan.state_bytes`."""
        return state_bytes(
            batch,
            num_samples,
            cut=self.cut_stages,
            here=self._here,
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
        steps = self._steps
        before, steps.compresses = steps.compresses, (act, grad, dp)
        try:
            yield
        finally:
            steps.compresses = before

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
        self._steps.finish()
        pilot = Pilot(
            model=self.with_loss,
            boundaries=self.boundaries,
            engine=self.engine,
            scaler=self.scaler,
            is_language_model=self.cut_stages[0].is_causal_lm,
            forward_backward=self.forward_backward,
            swapped_links=self._swapped_links,
            step_times=lambda: self.step_times,
            account=self.account,
        )
        with self._beside_steps():
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
    def _swapped_links(self, boundaries: Sequence[Boundary]) -> Iterator[None]:
        """Within it the links of other boundaries are used, and nothing is left of its steps.

        Weights and generators apart.
        """
        steps = self._steps
        with ExitStack() as stack:
            fresh = [(fresh_copy(a), fresh_copy(b)) for a, b in (tie.links for tie in self.ties)]
            links = [*(each.links for each in boundaries), *fresh]
            for own, others in zip(self.crossings, links, strict=True):
                stack.enter_context(own.swapped_links(others))
            self._steps = steps.apart()
            try:
                yield
            finally:
                self._steps = steps

    # -- persistence --------------------------------------------------------------------------

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
        self._steps.optimizer = optimizer

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
        self._steps.finish()
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
        before = [str(link.method) for each in self.boundaries for link in each.links]
        extra = checkpoint.load(run, Path(folder), optimizer=optimizer, scheduler=scheduler)
        # Only now: a load that fails leaves an open step open.
        self._steps.go_on(run.num_steps, before, run.dial)
        return extra

    # -- inside -------------------------------------------------------------------------------

    def _run_state(self) -> checkpoint.RunState:
        return checkpoint.RunState(
            mesh=self.mesh,
            model=self.with_loss,
            cut=self.cut_stages,
            here=self._here,
            chunks=self.chunks,
            links=self.links,
            device_of=self.engine.device_of,
            exchange=self.exchange,
            scaler=self.scaler,
            num_steps=self.num_steps,
            dial=self._steps.of_dial,
        )

    def _output_on_all(self, output: Tensor | None) -> Tensor:
        """The output of this replica's last stage, on every rank of the replica."""
        place = self.engine.output_place
        return self.mesh.broadcast_in_pipelines(output, place, "output of the last stage")
