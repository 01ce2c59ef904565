"""The memory that the links' state will need, known before the run.

Shapes at the cuts come from fake tensors (`mpcomp.engines.shape_inference`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

import stages as staging
from mpcomp.core.context import TensorMeta
from mpcomp.core.loss import TARGETS
from mpcomp.core.microbatch import num_rows, rows_of_chunks, scatter
from mpcomp.engines.shape_inference import Planner
from mpcomp.engines.stage_runner import Autocast
from mpcomp.links.boundary import Boundary
from mpcomp.links.state import state_bytes_of
from mpcomp.links.tied_weights import TiedWeights

__all__ = ["state_bytes"]


def state_bytes(
    batch: Any,
    num_samples: int | None = None,
    *,
    cut: Sequence[staging.Stage],
    here: Collection[int],
    boundaries: Sequence[Boundary],
    ties: Sequence[TiedWeights],
    chunks: int,
    device: torch.device,
) -> dict[str, Any]:
    """Bytes that methods keep at most, at the ends of links in this process.

    Methods by place (EF, EF21, EFMixed) keep one row for each row of the largest batch, and the
    whole of a tied weight for its gradient; AQ-SGD one row for each sample, or for each (sample,
    augmentation seed). A basis (KLT) counts as one row. Nothing is run.

    A store in memory reserves its rows ahead: up to twice of them, at most 64 MiB more for each
    tensor that a row is stored as (one, with bits three). Files take what is said.

    Args:
        batch: as for ``forward_backward``; only its shapes and dtypes matter, and ``labels`` in
            it not at all.
        num_samples: of the training set (the rank's share of it, with replicas).
        cut: all stages.
        here: numbers of the stages of this process.
        boundaries: the cuts.
        ties: the parameters that two stages share.
        chunks: microbatches a batch.
        device: of this rank.

    Returns:
        ``total``: bytes in all. ``per_link``: for each end with state a dict of boundary,
        direction, method (its spec), role ("sender" or "receiver"), rows, row_bytes, bytes,
        capped (whether ``cap_bytes`` leaves rows out) and location.

    Raises:
        ValueError: fewer rows than microbatches; AQ-SGD without num_samples; a cap below one row.
        TypeError, RuntimeError: the model's stages cannot be planned for this batch.
    """
    if isinstance(batch, Mapping):
        batch = {name: value for name, value in batch.items() if name not in TARGETS}
    rows = num_rows(batch)
    if rows < chunks:
        raise ValueError(
            f"a batch of {rows} rows for chunks={chunks}: give one as large as in training"
        )
    if num_samples is not None and num_samples < 1:
        raise ValueError(f"num_samples={num_samples}: expected the size of the training set")
    microbatch = scatter(batch, rows_of_chunks(rows, chunks))[0]
    planner = Planner(cut, device)
    metas = planner.plan(microbatch, Autocast.of_caller(device))
    sent = [(b.links, meta.with_rows(rows)) for b, meta in zip(boundaries, metas, strict=True)]
    for tie in ties:
        (stage, name), _ = tie.copies
        parameter = cut[stage].get_parameter(name)
        sent.append((tie.links, TensorMeta((1, parameter.numel()))))
    entries = [
        entry
        for links, meta in sent
        for link in links
        for entry in state_bytes_of(link, meta, num_samples, here)
    ]
    return {"total": sum(entry["bytes"] for entry in entries), "per_link": entries}
