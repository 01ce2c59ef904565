"""The object that `mpcomp.pipeline` returns: a model that trains through compressed cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stages as staging
from mpcomp import checkpoint
from mpcomp.boundary import Boundary
from mpcomp.checks import nonfinite_error
from mpcomp.engines.local import LocalEngine
from mpcomp.evaluation import Metric, mean_over
from mpcomp.link import Link
from mpcomp.microbatch import gather, map_tensors, num_rows, rows_of_chunks, scatter
from mpcomp.original_names import OriginalNames
from mpcomp.report import print_report, report_of
from mpcomp.sample_ids import split_sample_ids
from mpcomp.visit import Step

__all__ = ["LossFn", "Metric", "Pipeline"]

LossFn = Callable[[Tensor, Any], Tensor]


class Pipeline(OriginalNames):
    """A model cut into stages, whose activations and gradients are compressed at every cut.

    Made by `mpcomp.pipeline`. Two ways to train:

    * ``loss = pipe.forward_backward(x, y)``: all microbatches, in the canonical order;
    * ``loss_fn(pipe(x), y).backward()``, as for any module. What links learn in a step is then
      stored at the next training call, once it is known whether the step was finite.

    ``parameters()``, ``state_dict()`` and so on have the original model's names.

    Attributes:
        stages: the stage modules.
        boundaries: the cuts, each with its two links.
        chunks: number of microbatches.
        num_steps: training steps so far, skipped ones counted.
        step_skipped: whether the last step was skipped (non-finite under a loss scaler).
    """

    def __init__(
        self,
        stages: Sequence[staging.Stage],
        boundaries: Sequence[Boundary],
        engine: LocalEngine,
        *,
        chunks: int,
        loss_fn: LossFn | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        super().__init__(stages)
        self.boundaries = list(boundaries)
        self.chunks = chunks
        self.num_steps = 0
        self.step_skipped = False
        self._engine = engine
        self._loss_fn = loss_fn
        self.scaler = scaler
        self._lr_of: torch.optim.Optimizer | None = None
        self._compress_act = self._compress_grad = True
        self._open: Step | None = None

    # -- training and inference ---------------------------------------------------------------

    def forward(self, batch: Any, *, sample_ids: Any = None) -> Tensor:
        """The model's output for ``batch`` on the last stage's device.

        Args:
            batch: tensor [b, ...], tuple of tensors, or mapping (arguments of the first stage).
            sample_ids: for AQ-SGD in training; see `forward_backward`.

        Raises:
            ValueError: fewer rows than chunks in training, or bad sample ids.
            TypeError: a batch without tensors, or a stage whose output is not a tensor.
            FloatingPointError: NaN or Inf at a cut.
        """
        train = self.training and torch.is_grad_enabled()
        if train:
            self._settle()
        sizes = self._microbatch_rows(batch, train)
        step = self._step(sizes, sample_ids, train)
        if train:
            self._open = step
        with self._undone_on_error(train):
            output = gather(self._engine.forward(scatter(batch, sizes), step))
            if not train:
                self._raise_if_nonfinite(step)
            return output

    def forward_backward(self, batch: Any, target: Any, *, sample_ids: Any = None) -> Tensor:
        """Runs all microbatches forward and backward; gradients add up in ``.grad``.

        Each microbatch's loss is weighted by its share of the rows (not at all where the loss has
        ``reduction="sum"``), and microbatches are differentiated in ascending order. Call it
        several times before the optimizer's step to accumulate gradients.

        Args:
            batch: tensor [b, ...], tuple of tensors, or mapping (arguments of the first stage).
            target: tensor [b, ...], tuple or mapping: second argument of the loss function.
            sample_ids: what AQ-SGD finds its buffers by: [b] ids; [b, 2] (id, augmentation
                seed); or a whole number, the index of a batch of fixed composition.

        Returns:
            The loss of the batch, detached, unscaled; 0-d, on the last stage's device.

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
        sizes = self._microbatch_rows(batch, True)
        if num_rows(target) != sum(sizes):
            raise ValueError(
                f"target has {num_rows(target)} rows, the batch {sum(sizes)}: expected one each"
            )
        step = self._step(sizes, sample_ids, True)
        device = self._engine.devices[-1]
        targets = scatter(map_tensors(target, lambda t: t.to(device)), sizes)
        summed = getattr(self._loss_fn, "reduction", "mean") == "sum"
        total: Tensor | None = None
        self._open = step
        with self._undone_on_error(True), torch.enable_grad():
            outputs = self._engine.forward(scatter(batch, sizes), step)
            for part, size in zip(targets, sizes, strict=True):
                loss = self._loss_fn(outputs.pop(0), part)  # its memory goes with its graph
                if not summed:
                    loss = loss * (size / sum(sizes))
                total = loss.detach() if total is None else total + loss.detach()
                scaled = self.scaler.scale(loss) if self.scaler is not None else loss
                scaled.backward()  # type: ignore[no-untyped-call]
            self._settle()
        assert total is not None
        return total

    def evaluate(self, loader: Iterable[Any], metric: Metric | None = None) -> Any:
        """The mean of ``metric`` over a loader, in evaluation mode, without gradients.

        Args:
            loader: yields (batch, target), or (batch, target, anything else). Any batch size.
            metric: ``metric(output, target)``, the mean over a batch: a number, a 0-d tensor, or
                a mapping of those. The loss function by default.

        Returns:
            A float, or a dict of floats: weighted by rows, so that short batches count right.

        Raises:
            ValueError: the loader is empty, or there is neither metric nor loss function.
        """
        metric = metric or self._loss_fn
        if metric is None:
            raise ValueError("evaluate needs a metric: evaluate(loader, metric)")
        return mean_over(self, loader, metric, self._engine.devices[-1])

    # -- compression on and off ---------------------------------------------------------------

    @contextmanager
    def compressed(self, act: bool = True, grad: bool = True) -> Iterator[None]:
        """Within this context activations and gradients are compressed or not, as given.

        In training, what goes dense is known exactly at both ends: estimates are set to it and
        residuals to zero.
        """
        before = self._compress_act, self._compress_grad
        self._compress_act, self._compress_grad = act, grad
        try:
            yield
        finally:
            self._compress_act, self._compress_grad = before

    def uncompressed(self) -> Any:
        """A context within which everything goes dense."""
        return self.compressed(act=False, grad=False)

    # -- what happened ------------------------------------------------------------------------

    @property
    def links(self) -> list[Link]:
        """All links: of each cut that of activations, then that of gradients."""
        return [link for boundary in self.boundaries for link in boundary.links]

    @property
    def wire_bytes(self) -> int:
        """Bytes of all messages of training so far, headers included."""
        return sum(link.meter.train.wire_bytes for link in self.links)

    @property
    def dense_bytes(self) -> int:
        """Bytes that training so far would have sent uncompressed, in the tensors' own dtypes."""
        return sum(link.meter.train.dense_bytes for link in self.links)

    def report(self, *, show: bool = True) -> dict[str, Any]:
        """Bytes, ratio, fidelity, time and non-finite counts, per boundary and direction.

        Args:
            show: print the table as well.

        Returns:
            The figures as a dict of plain numbers and words.
        """
        report = report_of(self)
        if show:
            print_report(report)
        return report

    # -- persistence --------------------------------------------------------------------------

    def follow_lr(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets methods with ``lr_scaled=True`` follow this optimizer's (first group's) rate."""
        self._lr_of = optimizer

    def save(
        self,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a checkpoint; see `mpcomp.checkpoint.save`."""
        self._settle()
        checkpoint.save(self, Path(folder), optimizer=optimizer, scheduler=scheduler, extra=extra)

    def load(
        self,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> dict[str, Any]:
        """Reads a checkpoint and returns its ``extra``; see `mpcomp.checkpoint.load`."""
        extra = checkpoint.load(self, Path(folder), optimizer=optimizer, scheduler=scheduler)
        self._open = None  # only now: a load that fails leaves an open step open
        for boundary in self.boundaries:
            boundary.settle(finite=False)
        self._nonfinite_links(train=True)
        return extra

    def merge(self) -> nn.Module:
        """The original model, with the trained weights, on the first stage's device."""
        return staging.merge(self.cut_stages).to(self._engine.devices[0])

    @property
    def cut_stages(self) -> list[staging.Stage]:
        """The stage modules, as a typed list."""
        return [stage for stage in self.stages if isinstance(stage, staging.Stage)]

    def device_of(self, boundary: int, role: str, direction: str) -> torch.device:
        """Where the "sender" or "receiver" of a link is."""
        return self._engine.device_of(boundary, role, direction)

    # -- inside -------------------------------------------------------------------------------

    def _microbatch_rows(self, batch: Any, train: bool) -> list[int]:
        rows = num_rows(batch)
        if rows == 0:
            raise ValueError("the batch has no rows: expected at least one sample")
        if train and rows < self.chunks:
            raise ValueError(
                f"chunks={self.chunks} is larger than the batch of {rows} rows: "
                "use fewer chunks, a larger batch, or drop_last=True in the loader"
            )
        return rows_of_chunks(rows, min(self.chunks, rows))

    def _step(self, sizes: Sequence[int], sample_ids: Any, train: bool) -> Step:
        lr = self._lr_of.param_groups[0]["lr"] if self._lr_of is not None else None
        scaled = self.scaler is not None and self.scaler.is_enabled()
        step = Step(
            index=self.num_steps,
            train=train,
            compress_act=self._compress_act,
            compress_grad=self._compress_grad,
            sample_ids=split_sample_ids(sample_ids, sizes) if train else (),
            scaled=scaled,
            loss_scale=self.scaler.get_scale() if self.scaler is not None and scaled else 1.0,
            lr=None if lr is None else float(lr),
        )
        for link in self.links:
            link.check_step(step, sizes)
        return step

    def _settle(self) -> None:
        """Ends the open step: commits what links noted, or discards it if it was not finite."""
        step, self._open = self._open, None
        if step is None:
            return
        broken = self._nonfinite_links(train=True)
        failed = any(boundary.failed for boundary in self.boundaries)  # and has raised its error
        finite = not (broken or failed or self._overflowed(step))
        for boundary in self.boundaries:
            boundary.settle(finite)
        if broken and not (step.scaled and all(link.direction == "grad" for link in broken)):
            raise nonfinite_error(broken[0].name, step.index)
        self.step_skipped = not finite
        self.num_steps += 1

    def _nonfinite_links(self, train: bool) -> list[Link]:
        return [link for link in self.links if link.found_nonfinite(train)]

    def _raise_if_nonfinite(self, step: Step) -> None:
        """For inference on an accelerator, where the flags could not be read on the way."""
        for link in self._nonfinite_links(train=False):
            raise nonfinite_error(link.name, step.index)

    def _overflowed(self, step: Step) -> bool:
        """Whether the scaler skips the step, or has: then it has already lowered the scale."""
        if self.scaler is None or not step.scaled:
            return False
        return self.scaler.get_scale() < step.loss_scale or self._gradients_overflowed()

    def _gradients_overflowed(self) -> bool:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
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
                for boundary in self.boundaries:
                    boundary.settle(finite=False)
            self._nonfinite_links(train)  # counts and clears
            raise
