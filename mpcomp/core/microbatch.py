"""Cutting a batch into microbatches, and putting outputs together again.

A batch is a tensor, a tuple of tensors (positional arguments of the first stage) or a mapping
(keyword arguments). Its rows are dim 0 of its tensors. Beside them an array whose dim 0 has as many
rows, or a list or tuple of as many entries, has an entry a row and is cut likewise. All else goes
to every microbatch as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "check_target",
    "gather",
    "is_of_tensors",
    "join",
    "map_tensors",
    "num_rows",
    "rows_of_chunks",
    "scatter",
]


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """``batch`` with ``function`` applied to every tensor in it; lists of tensors become tuples."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if _is_sequence(batch) and _holds_tensors(batch):
        return tuple(map_tensors(value, function) for value in batch)
    return batch


def num_rows(batch: Any, name: str = "batch") -> int:
    """Rows (samples) of a batch: the size of dim 0 that all its tensors share.

    Args:
        batch: tensor, tuple or mapping.
        name: of it in messages.

    Raises:
        TypeError: there is no tensor in it.
        ValueError: its tensors differ in dim 0, or one has none.
    """
    tensors = list(_tensors(batch))
    if not tensors:
        raise TypeError(
            f"{name} of type {type(batch).__name__} holds no tensor; "
            "expected a tensor, a tuple of tensors or a mapping of tensors"
        )
    sizes = {tuple(t.shape[:1]) for t in tensors}
    if len(sizes) > 1 or () in sizes:
        raise ValueError(
            f"tensors of a {name} differ in dim 0: {[list(t.shape) for t in tensors]}; "
            "all need one row per sample"
        )
    return tensors[0].shape[0]


def check_target(target: Any, rows: int) -> None:
    """Refuses a target without an entry for each row of its batch.

    Args:
        target: tensor, tuple or mapping; or a list or array with an entry a row.
        rows: of the batch.

    Raises:
        TypeError: there is neither a tensor in it nor anything with so many entries.
        ValueError: its tensors have other rows.
    """
    if not _holds_tensors(target) and _holds_entries(target, rows):
        return
    found = num_rows(target, "target")
    if found != rows:
        raise ValueError(f"target has {found} rows, the batch {rows}: expected one each")


def rows_of_chunks(rows: int, chunks: int) -> list[int]:
    """Rows of each of ``chunks`` microbatches: as even as can be, the longer ones first."""
    return [rows // chunks + (i < rows % chunks) for i in range(chunks)]


def scatter(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """The microbatches of ``batch``, of the given numbers of rows.

    Raises:
        ValueError: it cannot be told whether a list has an entry a row.
    """
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [_part(batch, slice(a, b), bounds[-1]) for a, b in pairwise(bounds)]


def _part(value: Any, part: slice, rows: int) -> Any:
    if isinstance(value, Tensor) or _has_entries(value, rows):
        return value[part]
    if isinstance(value, Mapping):
        return {key: _part(inner, part, rows) for key, inner in value.items()}
    if _is_sequence(value) and (_holds_tensors(value) or _holds_entries(value, rows)):
        return tuple(_part(inner, part, rows) for inner in value)
    return value


def _has_entries(value: Any, rows: int) -> bool:
    """Whether it is an array, or a sequence without tensors, with an entry for each row."""
    if isinstance(value, Tensor) or not _is_sequence(value):
        shape = getattr(value, "shape", None)
        return isinstance(shape, tuple) and shape[:1] == (rows,)
    if len(value) != rows or _holds_tensors(value):
        return False
    if rows > 1 and all(_has_entries(inner, rows) for inner in value):
        raise ValueError(
            f"a {type(value).__name__} of {rows} sequences with {rows} entries each, in a batch of "
            f"{rows} rows: each may be a row, or have an entry a row. Make a tensor or an array of "
            "it, whose rows are dim 0, or a mapping with a name for each sequence"
        )
    return True


def _holds_entries(value: Any, rows: int) -> bool:
    if _has_entries(value, rows):
        return True
    inside = value.values() if isinstance(value, Mapping) else value if _is_sequence(value) else ()
    return any(_holds_entries(inner, rows) for inner in inside)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping) or _is_sequence(batch):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def _holds_tensors(batch: Any) -> bool:
    return next(_tensors(batch), None) is not None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, tuple | list) and not isinstance(value, torch.Size)


def gather(outputs: Sequence[Tensor]) -> Tensor:
    """Microbatch outputs as one batch."""
    return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))


def is_of_tensors(batch: Any) -> bool:
    """Whether nothing in it but tensors can have an entry a row, so that `join` is exact."""
    if isinstance(batch, Mapping):
        return all(map(is_of_tensors, batch.values()))
    if _is_sequence(batch):
        return _holds_tensors(batch) and all(map(is_of_tensors, batch))
    return isinstance(batch, Tensor) or not hasattr(batch, "shape")


def join(parts: Sequence[Any]) -> Any:
    """The batch of tensors (`is_of_tensors`) that these are parts of, as `scatter` gives them."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {key: join([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(join(values) for values in zip(*parts, strict=True))
    return first
