"""A metric's mean over a data loader, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mpcomp.comm.mesh import Mesh
from mpcomp.core.loss import is_sum, num_terms
from mpcomp.core.loss_check import LossCheck
from mpcomp.core.microbatch import map_tensors

__all__ = ["Metric", "Sums", "evaluating", "mean_of", "sums_over"]

Metric = Callable[[Tensor, Any], Any]


#: Of the rows that a rank has judged: sums by name, terms, whether names are the metric's, and
#: whether it is a sum.
Sums = tuple[dict[str, float], float, bool, bool]


def sums_over(
    inferred: Iterable[tuple[list[Tensor], list[Any], Any]],
    metric: Metric,
    check: LossCheck,
    mesh: Mesh,
) -> Sums | None:
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
            with mesh.failing_together("metric"):  # others wait for its value
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


def mean_of(own: Sums | None, mesh: Mesh) -> float | dict[str, float]:
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
