"""Inference: outputs, a metric's mean over a data loader, and text, without gradients.

Ranks with data give the batches to their stages, and others infer what they are told of
(`mpcomp.api.batches`). NaN or Inf that a link has seen is an error on all ranks at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

import stages as staging
from mpcomp.api.batches import Batches
from mpcomp.api.generation import generate
from mpcomp.api.porting import check_function
from mpcomp.api.training_steps import TrainingSteps
from mpcomp.comm.mesh import Mesh
from mpcomp.core.loss import is_sum, num_terms, pair_of, with_target
from mpcomp.core.loss_check import LossCheck
from mpcomp.core.microbatch import gather, map_tensors, num_rows
from mpcomp.engines.base import Engine
from mpcomp.engines.outline import Outline
from stages.language_models import StageCaches

__all__ = ["Inference", "Metric", "evaluating"]

Metric = Callable[[Tensor, Any], Any]

#: Of the rows that a rank has judged: sums by name, terms, whether names are the metric's, and
#: whether it is a sum.
_Sums = tuple[dict[str, float], float, bool, bool]


class Inference:
    """The inference of a pipeline, on one rank; called in evaluation mode, without gradients.

    Each method is called by all ranks, with the training steps that there are now: a pass has the
    number of the next one.

    Args:
        engine: runs the stages.
        cut: all stages.
        batches: of this rank.
        metric: that is judged by where no other is given: the loss function, if there is one.
    """

    def __init__(
        self,
        engine: Engine,
        cut: Sequence[staging.Stage],
        batches: Batches,
        metric: Metric | None,
    ) -> None:
        self._engine = engine
        self._mesh = engine.mesh
        self._cut = list(cut)
        self._batches = batches
        self._metric = metric
        self._check: LossCheck | None = None

    def output(self, steps: TrainingSteps, batch: Any) -> Tensor | None:
        """The model's output for a batch, where the last stage is."""
        with self._batches.inferring(steps, "pipe", batch) as infers:
            outputs = self._batches.infer(steps, batch)[0] if infers else []
        output = gather(outputs) if outputs else None
        steps.raise_if_nonfinite()
        return output

    def evaluate(
        self, steps: TrainingSteps, loader: Iterable[Any] | None, metric: Metric | None
    ) -> float | dict[str, float]:
        """The mean of a metric over a loader; see `mpcomp.Pipeline.evaluate`."""
        sums: _Sums | None = None
        with self._batches.inferring(steps, "evaluate", loader) as infers:
            if infers:
                judged = self._judging(steps, loader)
                sums = _sums_over(judged, *self._judged_by(metric), self._mesh)
        mean = _mean_of(sums, self._mesh)
        steps.raise_if_nonfinite()
        return mean

    def _judged_by(self, metric: Metric | None) -> tuple[Metric, LossCheck]:
        """The metric of an evaluation, and its check."""
        check_function("metric", metric, ". One batch is evaluated by pipe.evaluate([(x, y)])")
        metric = metric or self._metric
        if metric is None:
            raise ValueError("evaluate needs a metric: evaluate(loader, metric)")
        for check in (self._batches.loss_check, self._check):
            if check is not None and check.is_of(metric):
                return metric, check
        self._check = LossCheck(metric, "metric")
        return metric, self._check

    def _judging(
        self, steps: TrainingSteps, loader: Iterable[Any] | None
    ) -> Iterator[tuple[list[Tensor], list[Any], Any]]:
        """Outputs and targets of each batch of a loader, by microbatch, and the target."""
        if loader is None:
            raise ValueError("evaluate needs a loader: evaluate(loader, metric)")
        for item in loader:
            batch, target = with_target(*pair_of(item))
            yield *self._batches.infer(steps, batch, target), target

    def generate(
        self, steps: TrainingSteps, input_ids: Tensor | None, **options: Any
    ) -> Tensor | None:
        """Prompts and what follows; see `mpcomp.Pipeline.generate`."""
        caches = StageCaches()

        def infer(number: int, outline: Outline) -> None:
            (told,) = outline.microbatches(past_key_values=caches)
            step = replace(self._batches.step(steps, outline.sizes, told), call=number)
            self._engine.next_tokens(told, step, _nothing_chosen, everywhere=False)

        def next_tokens(
            batch: Mapping[str, Any],
            choose: Callable[[Tensor], Tensor],
            *,
            call: int,
            same: Any = None,
        ) -> list[Tensor]:
            return self._next_tokens(steps, batch, choose, call, same)

        first = self._batches.first
        ids: Tensor | None = None
        with self._batches.inferring(steps, "generate", input_ids, infer=infer) as infers:
            if infers:
                replica = self._mesh.replica if first is None else 0
                ids = generate(next_tokens, self._cut, replica, input_ids, **options)
        steps.raise_if_nonfinite()  # a method may hide it
        return ids

    def _next_tokens(
        self,
        steps: TrainingSteps,
        batch: Mapping[str, Any],
        choose: Callable[[Tensor], Tensor],
        call: int,
        same: Any,
    ) -> list[Tensor]:
        """Runs the stages for one token of each row; see `mpcomp.api.generation.NextTokens`."""
        sizes = [num_rows(batch["input_ids"])]
        step = replace(self._batches.step(steps, sizes, batch), call=call)
        first = self._batches.first
        if first is not None:
            first.tell(batch, sizes, [batch])
        with steps.undone_on_error(False):
            chosen = self._engine.next_tokens(
                batch, step, choose, same=same, everywhere=first is None
            )
        if any(bool((each < 0).any()) for each in chosen):  # there was no number to choose by
            if first is None:
                steps.raise_if_nonfinite()
            raise FloatingPointError("generate: NaN or Inf in the logits; the model has diverged")
        return chosen


def _nothing_chosen(output: Tensor) -> Tensor:
    raise AssertionError("a rank without data has no last stage")


def _sums_over(
    inferred: Iterable[tuple[list[Tensor], list[Any], Any]],
    metric: Metric,
    check: LossCheck,
    mesh: Mesh,
) -> _Sums | None:
    """The sums of ``metric`` over the terms of a loader: rows, or what the metric says.

    Args:
        inferred: of each batch, outputs and targets of its microbatches, and the target; no outputs
            on a rank without them.
        metric: the mean over a microbatch: a number, a 0-d tensor, or a mapping of those.
        check: of the metric.
        mesh: the ranks.

    Returns:
        The sums; None on a rank without outputs.

    Raises:
        ValueError: a metric is no single number, or the check fails.
        TypeError: the metric returns something else.
    """
    totals: dict[str, float] = {}
    terms = 0.0
    judged, named, summed = False, True, is_sum(metric)
    for outputs, targets, target in inferred:
        watch = check.begin(len(outputs), target)
        for output, part in zip(outputs, targets, strict=bool(outputs)):
            judged = True
            with mesh.abort_all_on_error("metric"):  # others wait for its value
                part = map_tensors(part, lambda t: t.to(mesh.device))
                if watch is not None:
                    watch(output, part)
                weight = num_terms(metric, part, output.shape[0])
                if weight:  # the mean over nothing is NaN
                    value = metric(output, part)
                    several = value.items() if isinstance(value, Mapping) else [("", value)]
                    means = [(key, _number(mean)) for key, mean in several]
            if not weight:
                continue
            named = isinstance(value, Mapping)
            terms += weight
            for key, mean in means:
                totals[key] = totals.get(key, 0.0) + mean * (1.0 if summed else weight)
    return (totals, terms, named, summed) if judged else None


def _mean_of(own: _Sums | None, mesh: Mesh) -> float | dict[str, float]:
    """The value of a metric for all rows of all loaders together: of a sum the sum.

    Args:
        own: of this rank.
        mesh: the ranks.

    Raises:
        ValueError: there were no batches, or nothing in them counts; on every rank.
    """
    found = [sums for sums in mesh.all_gather_object(own) if sums]
    if not found:
        raise ValueError("evaluate: the loader yielded no batch")
    found = [sums for sums in found if sums[1]]
    if not found:
        raise ValueError("evaluate: no token of the loader's batches has a label")
    _, _, named, summed = found[0]
    all_terms = 1.0 if summed else sum(terms for _, terms, *_ in found)
    result = {key: sum(totals[key] for totals, *_ in found) / all_terms for key in found[0][0]}
    return result if named else result[""]


def _number(mean: object) -> float:
    """The value of a metric, or one of its values, as a float."""
    if isinstance(mean, Tensor) and mean.numel() != 1:
        raise ValueError(
            f"the metric returned a tensor of shape {list(mean.shape)}: expected one number, the "
            "mean over a microbatch; leave out reduction='none', or end with .mean()"
        )
    try:
        return float(mean)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"the metric returned a {type(mean).__name__}: expected a number, a 0-d tensor, or a "
            "mapping from names to those"
        ) from error


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has the mode it had."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
