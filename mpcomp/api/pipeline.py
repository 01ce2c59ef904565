"""The object that `mpcomp.pipeline` returns: a model that trains through compressed cuts."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stages as staging
from mpcomp import checkpoint
from mpcomp.api.evaluation import Metric, evaluating, mean_over
from mpcomp.api.generation import generate
from mpcomp.api.loss_probe import measure_losses
from mpcomp.api.memory_estimate import state_bytes
from mpcomp.api.parts import Parts
from mpcomp.api.report import print_report, report_of
from mpcomp.api.scaling import check_without_gradients
from mpcomp.api.step_sync import bytes_sent, raise_if_nonfinite, settle
from mpcomp.core.dtensor import local
from mpcomp.core.loss import LossFn, StepLoss, num_terms, with_target
from mpcomp.core.microbatch import gather, map_tensors, num_rows, rows_of_chunks, scatter
from mpcomp.core.padding import valid_positions
from mpcomp.core.sample_ids import ids_of_batch, split_sample_ids
from mpcomp.core.step import Step
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.engines.base import Engine
from mpcomp.engines.shape_inference import Planner
from mpcomp.engines.stage_runner import Autocast
from mpcomp.links.adaptation import Adaptation
from mpcomp.links.boundary import Boundary
from mpcomp.links.tied_weights import Tie

__all__ = ["LossFn", "Metric", "Pipeline"]


class Pipeline(Parts):
    """A model cut into stages, whose activations and gradients are compressed at every cut.

    Made by `mpcomp.pipeline`. Two ways to train:

    * ``loss = pipe.forward_backward(x, y)``: all microbatches, in the canonical order;
    * ``loss_fn(pipe(x), y).backward()``, as for any module. What links learn in a step is then
      stored at the next training call, once it is known whether the step was finite.

    ``parameters()``, ``state_dict()`` and so on have the original model's names. With several
    processes they are those of the stages on this rank; every rank makes the same calls, with the
    same data, and the second way to train is not available.

    Attributes:
        stages: the stage modules of this rank.
        cut_stages: all of them; those of other ranks on "meta".
        boundaries: the cuts, each with its two links.
        ties: the parameters that two stages share, each with its two links.
        chunks: number of microbatches.
        num_steps: training steps so far, skipped ones counted.
        step_skipped: whether the last step was skipped (non-finite under a loss scaler).
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
    ) -> None:
        super().__init__(stages, cut, boundaries, ties, engine)
        self.chunks = chunks
        self.num_steps = 0
        self.step_skipped = False
        self._loss_fn = loss_fn
        self.scaler = scaler
        self._lr_of: torch.optim.Optimizer | None = None
        self._compress_act = self._compress_grad = self._compress_dp = True
        self._warmup_steps = warmup_steps
        self._open: Step | None = None
        self._began = 0.0  # when the open step did
        self.adaptation = Adaptation(
            self.links, num_ranks=engine.num_ranks, num_replicas=engine.num_replicas
        )
        #: Of the last steps on this rank: seconds, and of these waiting for messages.
        self.step_times: deque[tuple[float, float]] = deque(maxlen=100)

    # -- training and inference ---------------------------------------------------------------

    def forward(self, batch: Any, *, sample_ids: Any = None, everywhere: bool = True) -> Any:
        """The model's output for ``batch`` on the last stage's device.

        Args:
            batch: tensor [b, ...], tuple of tensors, or mapping (arguments of the first stage).
            sample_ids: for AQ-SGD in training; see `forward_backward`.
            everywhere: with several processes, give the output to all ranks; else it stays with
                the last stage, and the other ranks get None.

        Raises:
            ValueError: fewer rows than chunks in training, bad sample ids, or training with
                several processes.
            TypeError: a batch without tensors, or a stage whose output is not a tensor.
            FloatingPointError: NaN or Inf at a cut.
        """
        train = self.training and torch.is_grad_enabled()
        if self.cut_stages[0].is_causal_lm and isinstance(batch, Mapping):
            batch = {name: value for name, value in batch.items() if name != "labels"}
        if not train:
            output = gather(outputs) if (outputs := self._infer(batch, batch)[0]) else None
            raise_if_nonfinite(self.engine, self.links, self.num_steps)
            return self.engine.everywhere(output) if everywhere else output
        if self.engine.num_ranks > 1:
            raise ValueError(
                "pipe(x) with gradients: autograd does not reach other processes; train with "
                "pipe.forward_backward(x, y), or infer under torch.no_grad() or pipe.eval()"
            )
        if any(tie.trains for tie in self.ties):
            raise ValueError(
                f"pipe(x) with gradients: two stages share {self.ties[0].name}, and its gradients "
                "are added up at the end of pipe.forward_backward(x, y); train with that, or infer "
                "under torch.no_grad() or pipe.eval()"
            )
        self._settle()
        sizes = self._microbatch_rows(batch, train)
        step = self._step(sizes, batch, sample_ids, train)
        if any(state.measures_losses for state in self.adaptation.states):
            raise ValueError(
                "pipe(x) with gradients and gain='loss', which is measured by the loss function: "
                "train with pipe.forward_backward(x, y), or use gain='energy' or 'centred'"
            )
        parts = scatter(batch, sizes)
        self._begin_adaptation(parts)
        self._open, self._began = step, time.perf_counter()
        with self._undone_on_error(train):
            return gather(self.engine.forward(parts, step, ()))

    def _infer(self, batch: Any, same: Any, target: Any = None) -> tuple[list[Tensor], list[Any]]:
        """Outputs, where the last stage is, and targets of the microbatches."""
        sizes = self._microbatch_rows(batch, False)
        step = self._step(sizes, batch, None, False)
        with self._undone_on_error(False):
            outputs = self.engine.forward(scatter(batch, sizes), step, (same,))
        return outputs, [] if target is None else scatter(target, sizes)

    def forward_backward(self, batch: Any, target: Any = None, *, sample_ids: Any = None) -> Tensor:
        """Runs all microbatches forward and backward; gradients add up in ``.grad``.

        Each microbatch's loss is weighted by its share of the terms that it is the mean over, rows
        or tokens (`mpcomp.core.loss.num_terms`; not at all where the loss has
        ``reduction="sum"``), and microbatches are differentiated in ascending order. Call it
        several times before the optimizer's step to accumulate gradients.

        Args:
            batch: tensor [b, ...], tuple of tensors, or mapping (arguments of the first stage).
            target: tensor [b, ...], tuple or mapping: second argument of the loss function; by
                default the ``labels`` of a batch that is a mapping.
            sample_ids: what AQ-SGD finds its buffers by: [b] ids; [b, 2] (id, augmentation
                seed); or a whole number, the index of a batch of fixed composition.

        Returns:
            The loss of the batch, detached, unscaled; 0-d; the same on every rank. With replicas,
            that of their batches together.

        Raises:
            ValueError: no loss function, fewer rows than chunks, or bad sample ids.
            TypeError: a batch without tensors, or a stage whose output is not a tensor.
            FloatingPointError: NaN or Inf at a cut (in a gradient only without a loss scaler).
                Links are then as before the step; gradients of the microbatches differentiated
                until then have been added, so ``zero_grad`` before going on.
        """
        if self._loss_fn is None:
            raise ValueError(
                "forward_backward needs the loss: pipeline(..., loss_fn=F.cross_entropy)"
            )
        if not self.training:
            raise ValueError("forward_backward in evaluation mode: call pipe.train() first")
        self._settle()
        batch, target = with_target(batch, target)
        sizes = self._microbatch_rows(batch, True)
        if num_rows(target) != sum(sizes):
            raise ValueError(
                f"target has {num_rows(target)} rows, the batch {sum(sizes)}: expected one each"
            )
        step = self._step(sizes, batch, sample_ids, True)
        parts, targets = scatter(batch, sizes), scatter(target, sizes)
        begin, waited_before = time.perf_counter(), self.engine.waited_s
        same = (batch, target, step.sample_ids)
        terms = [
            num_terms(self._loss_fn, part, size) for part, size in zip(targets, sizes, strict=True)
        ]
        if self.engine.computes_loss:
            targets = [map_tensors(part, lambda t: t.to(self.engine.device)) for part in targets]
        loss = StepLoss(self._loss_fn, terms, self.scaler)
        if self.scaler is not None and not self.engine.computes_loss:
            # A scaler is made by its first loss, but `unscale_` and `update` need it on all ranks.
            self.scaler.scale(torch.zeros((), device=self.engine.device))
        self._begin_adaptation(parts)
        with self._undone_on_error(False):
            measure_losses(
                self.adaptation, self.engine, self.stages, parts, targets, step, self._loss_fn
            )
        self._open, self._began = step, time.perf_counter()
        with self._undone_on_error(True), torch.enable_grad():
            self.engine.forward_backward(parts, targets, step, loss, same)
            total = self._settle(loss)
        assert total is not None
        waited = self.engine.waited_s - waited_before
        self.step_times.append((time.perf_counter() - begin, waited))
        return total

    def evaluate(self, loader: Iterable[Any], metric: Metric | None = None) -> Any:
        """The mean of ``metric`` over a loader, in evaluation mode, without gradients.

        Args:
            loader: yields (batch, target), (batch, target, anything else), or mappings with
                ``labels``. Any batch size.
            metric: ``metric(output, target)``, the mean over a microbatch: a number, a 0-d tensor,
                or a mapping of those. The loss function by default.

        Returns:
            A float, or a dict of floats: weighted by rows, or by the terms that the metric is over
            (`mpcomp.core.loss.num_terms`), so that short batches count right. The same on every
            rank; the metric is called where the last stage is. Replicas are taken together.

        Raises:
            ValueError: the loader is empty, or there is neither metric nor loss function.
        """
        metric = metric or self._loss_fn
        if metric is None:
            raise ValueError("evaluate needs a metric: evaluate(loader, metric)")

        self.engine.align_replicas()
        with evaluating(self, *self.cut_stages), torch.no_grad():
            mean = mean_over(
                lambda batch, target: self._infer(batch, (batch, target), target),
                loader,
                metric,
                self.engine.device,
                self.engine.collect,
                self.engine.together,
            )
        raise_if_nonfinite(self.engine, self.links, self.num_steps)
        return mean

    def generate(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 20,
        **options: Any,
    ) -> Tensor:
        """Continues token sequences with a causal language model, with a cache in each stage.

        Greedy it gives the tokens of the model's own ``generate``, with compression off. Whether
        cuts are compressed is as in evaluation: `uncompressed` is a context for it.

        Args:
            input_ids: prompts [b, s]; the same on every rank of a replica. All else is the same on
                all ranks; replicas whose rows end earlier than those of others keep pace with them.
            attention_mask: [b, s], 0 where a prompt is padded, on its left.
            max_new_tokens: tokens to append at most.
            options: ``do_sample`` (False is greedy) with ``temperature``, ``top_k``, ``top_p`` and
                ``seed``; ``repetition_penalty``; ``logits_processor``, a list of functions of
                (ids [b, s], scores [b, vocabulary]); ``eos_token_id`` and ``pad_token_id``, by
                default those of the model's ``generation_config``, of which nothing else is used;
                ``streamer``, of transformers.

        Returns:
            Prompts and what follows, [b, s + n], on every rank; a row that has ended is padded.

        Raises:
            ValueError: no language model, prompts padded on the right, more tokens than the
                model has positions, or ranks that were given different arguments.
            FloatingPointError: NaN or Inf at a cut or in the logits.
        """
        return generate(
            self,
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            **options,
        )

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
            What it chose, int64 [b] of each replica, on every rank.

        Raises:
            FloatingPointError: NaN or Inf in the logits of one of the replicas; on every rank.
        """
        sizes = [num_rows(batch["input_ids"])]
        step = replace(self._step(sizes, batch, None, False), call=call)
        with self._undone_on_error(False):
            chosen = self.engine.next_tokens(batch, step, choose, same=same)
        if any(bool((each < 0).any()) for each in chosen):  # there was no number to choose by
            raise_if_nonfinite(self.engine, self.links, self.num_steps)
            raise FloatingPointError("generate: NaN or Inf in the logits; the model has diverged")
        return chosen

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context replicas add up their gradients and do not average them.

        For accumulation: the last `forward_backward` before the optimizer's step goes outside.
        """
        return self.engine.without_reduction()

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
        return state_bytes(self, batch, num_samples)

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

    # -- what happened ------------------------------------------------------------------------

    def report(self, *, show: bool = True) -> dict[str, Any]:
        """Bytes, ratio, fidelity, time and non-finite counts, per boundary and direction.

        With several processes every rank calls it; the figures are those of all ranks together,
        links are measured, and it says whether compression pays (`mpcomp.api.cost_model`).
        Fidelity is then that of one microbatch a step. ``replicas`` is what replicas have
        exchanged with a ``dp_comp``: bytes of all ranks, paths of one replica, seconds of the
        slowest rank.

        Args:
            show: print the table as well (on the first rank).

        Returns:
            The figures as a dict of plain numbers and words.
        """
        report = report_of(self)
        if show and self.engine.rank == 0:
            print_report(report)
        return report

    @property
    def adaptive_history(self) -> list[dict[str, Any]]:
        """What adaptive links sent with in each step; see `mpcomp.links.adaptation`."""
        return list(self.adaptation.history)

    # -- persistence --------------------------------------------------------------------------

    def follow_lr(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets methods with ``lr_scaled=True`` follow this optimizer's (first group's) rate.

        Raises:
            ValueError: the optimizer has momentum, and so has the method between replicas.
        """
        if self.engine.exchange is not None:
            self.engine.exchange.method.check_optimizer(optimizer)
        self._lr_of = optimizer

    def save(
        self,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a checkpoint, each rank its part; see `mpcomp.checkpoint.save`."""
        self._settle()
        checkpoint.save(self, Path(folder), optimizer=optimizer, scheduler=scheduler, extra=extra)

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
        extra = checkpoint.load(self, Path(folder), optimizer=optimizer, scheduler=scheduler)
        self._open = None  # only now: a load that fails leaves an open step open
        for each in self.crossings:
            each.settle(finite=False)
        for link in self.links:
            link.found_nonfinite(train=True)  # counts and clears
        wire_bytes, dense_bytes = self.engine.agree(bytes_sent(self.links))
        self._agreed_bytes = (int(wire_bytes), int(dense_bytes))
        return extra

    # -- inside -------------------------------------------------------------------------------

    def _begin_adaptation(self, parts: Sequence[Any]) -> None:
        """Lets adaptive links with a budget begin, before the first step has sent anything."""

        def metas() -> list[list[TensorMeta]]:
            planner = Planner(self.cut_stages, self.engine.device)
            autocast = Autocast.of_caller(self.engine.device)
            return [planner.crossing(part, autocast) for part in parts]

        self.adaptation.begin(metas, self.engine.agree)

    def _microbatch_rows(self, batch: Any, train: bool) -> list[int]:
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

    def _step(self, sizes: Sequence[int], batch: Any, sample_ids: Any, train: bool) -> Step:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        lr = self._lr_of.param_groups[0]["lr"] if self._lr_of is not None else None
        scaled = self.scaler is not None and self.scaler.is_enabled()
        step = Step(
            index=self.num_steps,
            train=train,
            compress_act=self._compress_act,
            compress_grad=self._compress_grad,
            compress_dp=self._compress_dp and self.num_steps >= self._warmup_steps,
            sample_ids=split_sample_ids(sample_ids, sizes) if train else (),
            scaled=scaled,
            loss_scale=self.scaler.get_scale() if self.scaler is not None and scaled else 1.0,
            lr=None if lr is None else float(lr),
            valid=valid_positions(mask, sizes),
            num_microbatches=len(sizes),
        )
        for link in self.links:
            link.check_step(step, sizes)
        return step

    def _settle(self, loss: StepLoss | None = None) -> Tensor | None:
        """Ends the open step, if there is one; returns its loss, if given one."""
        step, self._open = self._open, None
        if step is None:
            return None
        overflowed = self._overflowed(step)
        outcome = settle(
            self.engine, self.crossings, step, loss, overflowed, self.adaptation, self._began
        )
        self.engine.settle_replicas(outcome.finite)
        if self.scaler is not None and step.scaled and self.engine.num_ranks > 1:
            if not outcome.finite:
                self._overflow_gradients()
            check_without_gradients(self.scaler, skipped=not outcome.finite)
        self._agreed_bytes = outcome.wire_bytes, outcome.dense_bytes
        self.step_skipped = not outcome.finite
        self.num_steps += 1
        return outcome.loss

    def _overflow_gradients(self) -> None:
        """Makes this rank's scaler skip the step, as it must where another rank's gradients

        have overflowed: each scaler looks at its own alone.
        """
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(math.inf)

    def _overflowed(self, step: Step) -> bool:
        """Whether the scaler skips the step, or has: then it has already lowered the scale."""
        if self.scaler is None or not step.scaled:
            return False
        return self.scaler.get_scale() < step.loss_scale or self._gradients_overflowed()

    def _gradients_overflowed(self) -> bool:
        grads = [local(p.grad) for p in self.parameters() if p.grad is not None]
        if not grads:
            return False
        largest = torch.nn.utils.get_total_norm(grads, norm_type=math.inf)
        return not bool(largest.isfinite())

    @contextmanager
    def _undone_on_error(self, train: bool) -> Iterator[None]:
        """Leaves no trace in the links of a step that failed."""
        try:
            yield
        except BaseException:
            if train:
                self._open = None
                for each in self.crossings:
                    each.settle(finite=False)
                self.engine.settle_replicas(finite=False)
                self.adaptation.discard()
            for link in self.links:
                link.found_nonfinite(train)  # counts and clears
            raise
