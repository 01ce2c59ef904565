"""A metric's mean over a data loader, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mpcomp.comm.mesh import Mesh
from mpcomp.core.loss import num_terms, with_target
from mpcomp.core.microbatch import map_tensors

__all__ = ["Metric", "evaluating", "mean_over"]

Metric = Callable[[Tensor, Any], Any]


def mean_over(
    infer: Callable[[Any, Any], tuple[list[Tensor], list[Any]]],
    loader: Iterable[Any],
    metric: Metric,
    mesh: Mesh,
) -> float | dict[str, float]:
    """The mean of ``metric`` over the terms of a loader: rows, or what the metric says.

    Args:
        infer: called with each batch and target, gives the outputs and targets of microbatches;
            no outputs on a rank without them.
        loader: yields (batch, target), (batch, target, anything else), or mappings with labels.
        metric: the mean over a microbatch: a number, a 0-d tensor, or a mapping of those.
        mesh: the ranks; sums from those with outputs are added up.

    Raises:
        ValueError: the loader is empty, or nothing in it counts.
    """
    totals: dict[str, float] = {}
    terms = 0
    judged, named = False, True
    for item in loader:
        batch, target, *_ = (item, None) if isinstance(item, Mapping) else item
        outputs, targets = infer(*with_target(batch, target))
        for output, part in zip(outputs, targets, strict=bool(outputs)):
            judged = True
            with mesh.failing_together("metric"):  # others wait for its value
                weight = num_terms(metric, part, output.shape[0])
                if not weight:
                    continue  # the mean over nothing is NaN
                value = metric(output, map_tensors(part, lambda t: t.to(mesh.device)))
            named = isinstance(value, Mapping)
            terms += weight
            for key, mean in value.items() if isinstance(value, Mapping) else [("", value)]:
                totals[key] = totals.get(key, 0.0) + float(mean) * weight
    own = [totals, terms, named] if judged else None
    found = [sums for sums in mesh.all_gather_object(own) if sums]
    if not found:
        raise ValueError("evaluate: the loader yielded no batch")
    found = [sums for sums in found if sums[1]]
    if not found:
        raise ValueError("evaluate: no token of the loader's batches has a label")
    all_terms = sum(terms for _, terms, _ in found)
    means = {key: sum(totals[key] for totals, *_ in found) / all_terms for key in found[0][0]}
    return means if found[0][2] else means[""]


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
