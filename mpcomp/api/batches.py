"""Batches as a rank has them: it is given them, or told of them by the first rank.

Whoever has a batch divides it into microbatches, and with ``data="first"`` tells the others
(`mpcomp.engines.first_data`), which take the same steps with what they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

import stages as staging
from mpcomp.api.porting import check_no_graph
from mpcomp.api.training_steps import TrainingBatch, TrainingSteps
from mpcomp.core.context import Step, valid_positions
from mpcomp.core.loss import LossFn, num_terms, with_target
from mpcomp.core.loss_check import LossCheck
from mpcomp.core.microbatch import (
    check_target,
    map_tensors,
    num_rows,
    rows_of_chunks,
    scatter,
)
from mpcomp.core.sample_ids import split_sample_ids
from mpcomp.core.sent import Sent
from mpcomp.engines.base import Engine
from mpcomp.engines.first_data import FirstData
from mpcomp.engines.outline import Outline

__all__ = ["Batches"]


class Batches:
    """The batches of a pipeline, on one rank.

    Args:
        engine: runs the stages.
        cut: all stages.
        chunks: microbatches of a training batch.
        loss_fn: of training, if any.
        first: tells other ranks of batches, or hears of them; None where each rank has data.

    Attributes:
        chunks: as given; may be changed between steps.
        loss_check: of the loss function, if there is one.
        first: as given.
    """

    def __init__(
        self,
        engine: Engine,
        cut: Sequence[staging.Stage],
        chunks: int,
        loss_fn: LossFn | None,
        first: FirstData | None,
    ) -> None:
        self._engine = engine
        self._head = cut[0]
        self.chunks = chunks
        self._loss_fn = loss_fn
        self.loss_check = None if loss_fn is None else LossCheck(loss_fn)
        self.first = first

    def rows(self, batch: Any, train: bool) -> list[int]:
        """Rows of the microbatches of a batch.

        Raises:
            ValueError: there is none, or it has too few rows.
            TypeError: it is no batch of the first stage.
        """
        if batch is None:
            raise _no_batch("pipe(x)")
        rows = num_rows(batch)
        self._head.check_batch(batch)
        if rows == 0:
            raise ValueError("the batch has no rows: expected at least one sample")
        if train and rows < self.chunks:
            raise ValueError(
                f"chunks={self.chunks} is larger than the batch of {rows} rows: "
                "use fewer chunks, a larger batch, or drop_last=True in the loader"
            )
        return rows_of_chunks(rows, min(self.chunks, rows))

    def step(
        self,
        steps: TrainingSteps,
        sizes: Sequence[int],
        batch: Any,
        sample_ids: Any = None,
        *,
        train: bool = False,
    ) -> Step:
        """The step that a batch is for.

        Args:
            steps: that it is the next one of.
            sizes: rows of its microbatches.
            batch: what the first stage is called with, or what goes beside activations.
            sample_ids: of its rows, in training.
            train: whether it is one of training.

        Raises:
            TypeError, ValueError: bad sample ids, or links that cannot take the step.
        """
        step = replace(
            steps.bare(train),
            sample_ids=split_sample_ids(sample_ids, sizes) if train else (),
            valid=valid_positions(self._head.positions(batch), sizes),
            num_microbatches=len(sizes),
        )
        return steps.checked(step, sizes)

    # -- training -----------------------------------------------------------------------------

    def for_training(
        self,
        steps: TrainingSteps,
        batch: Any,
        target: Any,
        sample_ids: Any,
        updates: int | None,
    ) -> TrainingBatch:
        """The batch of a training step, as this rank has it.

        Args:
            steps: that it is the next one of.
            batch: given to this rank, with target and ids; None where it has no data.
            target: of the batch.
            sample_ids: of its rows.
            updates: within the step, if any.

        Raises:
            ValueError, TypeError: as of `mpcomp.Pipeline.forward_backward`.
        """
        first, bare = self.first, steps.bare(True)
        if first is None:
            made = self._made(steps, batch, target, sample_ids)
            return replace(made, same=(*made.data, made.step.sample_ids, updates))
        if first.tells:
            with first.telling_step(bare, (updates,)):
                made = self._made(steps, batch, target, sample_ids)
                told = first.tell(made.data[0], made.sizes, made.parts, sample_ids)
            steps.told += Sent(told)
            return replace(made, same=(updates,))
        first.refuse("forward_backward", batch, target, sample_ids)
        announce = not steps.acts_before()
        outline = first.hear_step(bare, (updates,), announce=announce)
        count = len(outline.sizes)
        return TrainingBatch(
            step=self.step(steps, outline.sizes, outline.beside, outline.sample_ids, train=True),
            sizes=outline.sizes,
            parts=outline.microbatches(),
            targets=[None] * count,
            terms=[0.0] * count,
            same=(updates,),
        )

    def _made(
        self, steps: TrainingSteps, batch: Any, target: Any, sample_ids: Any
    ) -> TrainingBatch:
        """The batch of a training step, of data that was given here."""
        if batch is None:
            raise _no_batch("forward_backward")
        batch, target = with_target(batch, target)
        batch = self._head.completed(batch, target)
        sizes = self.rows(batch, True)
        check_target(target, sum(sizes))
        mesh = self._engine.mesh
        for name, given in (("batch", batch), ("target", target)):
            check_no_graph(name, given, alone=mesh.num_ranks == 1)
        step = self.step(steps, sizes, batch, sample_ids, train=True)
        parts, targets = scatter(batch, sizes), scatter(target, sizes)
        assert self._loss_fn is not None and self.loss_check is not None
        terms = [
            num_terms(self._loss_fn, part, size) for part, size in zip(targets, sizes, strict=True)
        ]
        watch = self.loss_check.begin(len(sizes), target)
        if self._engine.computes_loss:
            targets = [map_tensors(part, lambda t: t.to(mesh.device)) for part in targets]
        return TrainingBatch(step, sizes, parts, targets, terms, data=(batch, target), watch=watch)

    def to_differentiate(
        self, steps: TrainingSteps, batch: Any, sample_ids: Any
    ) -> tuple[Step, list[Any]]:
        """The step and the microbatches of a batch whose output the caller differentiates.

        Args:
            steps: that it is the next one of.
            batch: of the step.
            sample_ids: of its rows.

        Raises:
            ValueError, TypeError: as of `mpcomp.Pipeline.forward`.
        """
        sizes = self.rows(batch, True)
        step = self.step(steps, sizes, batch, sample_ids, train=True)
        return step, scatter(batch, sizes)

    # -- inference ----------------------------------------------------------------------------

    def infer(
        self, steps: TrainingSteps, batch: Any, target: Any = None
    ) -> tuple[list[Tensor], list[Any]]:
        """Outputs, where the last stage is, and targets of the microbatches.

        Args:
            steps: of training; the pass has the number of the next one.
            batch: of this rank, which has data.
            target: of the batch, if it has one.

        Raises:
            ValueError, TypeError: as of `mpcomp.Pipeline.forward`.
        """
        batch = self._head.completed(batch, target)
        sizes = self.rows(batch, False)
        if target is not None:
            check_target(target, sum(sizes))
        step = self.step(steps, sizes, batch)
        parts = scatter(batch, sizes)
        if self.first is not None:
            self.first.tell(batch, sizes, parts)
        same = ((batch, target),) if self.first is None else None
        with steps.undone_on_error(False):
            outputs = self._engine.forward(parts, step, same)
        return outputs, [] if target is None else scatter(target, sizes)

    @contextmanager
    def inferring(
        self,
        steps: TrainingSteps,
        what: str,
        *given: Any,
        infer: Callable[[int, Outline], object] | None = None,
    ) -> Iterator[bool]:
        """A context for inference on ranks with data; on others all of it is done at once.

        Args:
            steps: of training.
            what: is called.
            given: batches, where there are any.
            infer: called without data, with each outline and its number.

        Yields:
            Whether this rank has data.
        """
        first, bare = self.first, steps.bare(False)
        if first is None:
            yield True
            return

        def infer_outline(number: int, outline: Outline) -> None:
            step = self.step(steps, outline.sizes, outline.beside)
            self._engine.forward(outline.microbatches(), step, None)

        with steps.undone_on_error(False):
            if first.tells:
                with first.telling(bare, what):
                    yield True
                return
            first.refuse(what, *given)
            for number, outline in enumerate(first.heard(bare, what)):
                (infer or infer_outline)(number, outline)
        yield False


def _no_batch(call: str) -> ValueError:
    return ValueError(
        f"{call} without a batch: each rank is given one, or, in a pipeline that is built with "
        "data='first', the first alone"
    )
