"""Reading ``sample_ids``: what AQ-SGD's buffers are found by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mpcomp.core.context import SampleIds
from mpcomp.core.microbatch import rows_of_chunks

__all__ = ["ids_of_batch", "split_sample_ids"]


def ids_of_batch(sample_ids: Any, chunks: int) -> tuple[SampleIds, ...]:
    """As `split_sample_ids`, of a batch of which only the ids are known, in ``chunks`` or fewer."""
    if sample_ids is None:
        return ()
    ids = sample_ids if isinstance(sample_ids, Tensor) else torch.as_tensor(sample_ids)
    rows = ids.shape[0] if ids.dim() else 1
    return split_sample_ids(ids, rows_of_chunks(rows, min(chunks, rows)) if rows else [])


def split_sample_ids(sample_ids: Any, sizes: Sequence[int]) -> tuple[SampleIds, ...]:
    """The ids of each microbatch.

    Args:
        sample_ids: None; whole numbers [b] or [b, k] (tensor, array or sequence), one row per
            sample; or one whole number, the index of a batch.
        sizes: rows of the microbatches.

    Raises:
        TypeError: not whole numbers.
        ValueError: another number of ids than rows, or an id twice.
    """
    if sample_ids is None:
        return ()
    ids = sample_ids if isinstance(sample_ids, Tensor) else torch.as_tensor(sample_ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"sample_ids of dtype {ids.dtype}: expected whole numbers")
    if ids.dim() == 0:
        return (int(ids),) * len(sizes)
    if ids.dim() > 2 or ids.shape[0] != sum(sizes):
        raise ValueError(
            f"sample_ids of shape {list(ids.shape)} for a batch of {sum(sizes)} rows: expected one "
            "id (or one row of numbers) per sample, or one whole number for the batch"
        )
    keys = [tuple(row) for row in ids.reshape(ids.shape[0], -1).tolist()]
    seen: set[tuple[int, ...]] = set()
    for key in keys:
        if key in seen:
            shown = key[0] if len(key) == 1 else key
            raise ValueError(
                f"sample id {shown} occurs twice in one batch: a sample's buffer can be advanced "
                "once a step; draw batches without replacement"
            )
        seen.add(key)
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(tuple(keys[a:b]) for a, b in pairwise(bounds))
