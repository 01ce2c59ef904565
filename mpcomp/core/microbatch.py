"""Cutting a batch into microbatches, and putting outputs together again.

A batch is a tensor, a tuple of tensors (positional arguments of the first stage) or a mapping
(keyword arguments). What is not a tensor goes to every microbatch as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

__all__ = ["gather", "map_tensors", "num_rows", "rows_of_chunks", "scatter"]


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """``batch`` with ``function`` applied to every tensor in it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map_tensors(value, function) for value in batch)
    return batch


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def num_rows(batch: Any) -> int:
    """Rows (samples) of a batch: the size of dim 0 that all its tensors share.

    Raises:
        TypeError: there is no tensor in it.
        ValueError: its tensors differ in dim 0, or one has none.
    """
    tensors = _tensors(batch)
    if not tensors:
        raise TypeError(
            f"batch of type {type(batch).__name__} holds no tensor; "
            "expected a tensor, a tuple of tensors or a mapping of tensors"
        )
    sizes = {tuple(t.shape[:1]) for t in tensors}
    if len(sizes) > 1 or () in sizes:
        raise ValueError(
            f"tensors of a batch differ in dim 0: {[list(t.shape) for t in tensors]}; "
            "all need one row per sample"
        )
    return tensors[0].shape[0]


def rows_of_chunks(rows: int, chunks: int) -> list[int]:
    """Rows of each of ``chunks`` microbatches: as even as can be, the longer ones first."""
    return [rows // chunks + (i < rows % chunks) for i in range(chunks)]


def scatter(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """The microbatches of ``batch``, of the given numbers of rows."""
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [map_tensors(batch, itemgetter(slice(a, b))) for a, b in pairwise(bounds)]


def gather(outputs: Sequence[Tensor]) -> Tensor:
    """Microbatch outputs as one batch."""
    return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))
