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
    infer: Callable[[Any, Any], Tensor | None],
    loader: Iterable[Any],
    metric: Metric,
    device: torch.device,
    collect: Callable[[Any], list[Any]],
) -> float | dict[str, float]:
    """The mean of ``metric`` over the rows of a loader.

    Args:
        infer: called with each batch and target, gives the output; None on a rank without it.
        loader: yields (batch, target), or (batch, target, anything else).
        metric: the mean over a batch: a number, a 0-d tensor, or a mapping of those.
        device: where targets go.
        collect: gives what each rank has found; sums from ranks with outputs are added up.

    Raises:
        ValueError: the loader is empty.
    """
    totals: dict[str, float] = {}
    rows = 0
    named = True
    for batch, target, *_ in loader:
        output = infer(batch, target)
        if output is None:
            continue
        value = metric(output, map_tensors(target, lambda t: t.to(device)))
        named = isinstance(value, Mapping)
        parts = dict(value) if isinstance(value, Mapping) else {"": value}
        size = num_rows(batch)
        rows += size
        for key, part in parts.items():
            totals[key] = totals.get(key, 0.0) + float(part) * size
    found = [sums for sums in collect([totals, rows, named] if rows else None) if sums]
    if not found:
        raise ValueError("evaluate: the loader yielded no batch")
    all_rows = sum(rows for _, rows, _ in found)
    means = {key: sum(totals[key] for totals, *_ in found) / all_rows for key in found[0][0]}
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
