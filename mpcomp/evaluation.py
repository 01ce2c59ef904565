"""A metric's mean over a data loader, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpcomp.microbatch import map_tensors, num_rows

__all__ = ["Metric", "evaluating", "mean_over"]

Metric = Callable[[Tensor, Any], Any]


def mean_over(
    model: nn.Module, loader: Iterable[Any], metric: Metric, device: torch.device
) -> float | dict[str, float]:
    """The mean of ``metric`` over the rows of a loader.

    Args:
        model: called with each batch.
        loader: yields (batch, target), or (batch, target, anything else).
        metric: the mean over a batch: a number, a 0-d tensor, or a mapping of those.
        device: where targets go.

    Raises:
        ValueError: the loader is empty.
    """
    totals: dict[str, float] = {}
    rows = 0
    named = True
    with evaluating(model), torch.no_grad():
        for batch, target, *_ in loader:
            value = metric(model(batch), map_tensors(target, lambda t: t.to(device)))
            named = isinstance(value, Mapping)
            parts = dict(value) if isinstance(value, Mapping) else {"": value}
            size = num_rows(batch)
            rows += size
            for key, part in parts.items():
                totals[key] = totals.get(key, 0.0) + float(part) * size
    if not rows:
        raise ValueError("evaluate: the loader yielded no batch")
    means = {key: total / rows for key, total in totals.items()}
    return means if named else means[""]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
