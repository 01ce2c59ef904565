"""The memory that the links' state will need, known before the run.

Shapes at the cuts come from fake tensors (`mpcomp.engines.shape_inference`); what a method keeps
of a row comes from an end that is made for it and never written to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

import stages as staging
from mpcomp.core.microbatch import num_rows, rows_of_chunks, scatter
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.engines.shape_inference import Planner
from mpcomp.engines.stage_runner import Autocast
from mpcomp.feedback.base import Feedback
from mpcomp.feedback.ends import end_of
from mpcomp.feedback.memory import Side
from mpcomp.links.boundary import Boundary
from mpcomp.links.link import Link
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
        batch = {name: value for name, value in batch.items() if name != "labels"}
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
        for entry in _of_link(link, meta, num_samples, here)
    ]
    return {"total": sum(entry["bytes"] for entry in entries), "per_link": entries}


def _of_link(
    link: Link, meta: TensorMeta, num_samples: int | None, here: Collection[int]
) -> Iterator[dict[str, Any]]:
    """The entries of a link's ends that are here."""
    for side, stage in ((Side.SENDER, link.sender_stage), (Side.RECEIVER, link.receiver_stage)):
        if stage not in here:
            continue
        kept = None
        if link.feedback is not None:
            kept = _rows_of(link, link.feedback, side, meta, num_samples)
        elif link.bases is not None:
            num_bytes = link.bases.num_bytes(side, meta)
            kept = {"rows": 1, "row_bytes": num_bytes, "capped": False, "location": "device"}
        if kept is not None:
            yield {
                "boundary": link.boundary,
                "direction": link.direction,
                "method": str(link.method),
                "role": side.value,
                "bytes": kept["rows"] * kept["row_bytes"],
                **kept,
            }


def _rows_of(
    link: Link, method: Feedback, side: Side, meta: TensorMeta, num_samples: int | None
) -> dict[str, Any] | None:
    """The rows that a feedback method keeps at an end; None if there are none."""
    # Without rows an end is the same on any device.
    end = end_of(method, side, meta, torch.device("cpu"))
    if not end.fields:
        return None
    if method.by_sample and num_samples is None:
        raise ValueError(
            f"{link.name}: {method} keeps a row for every training sample; "
            "pass num_samples=<size of the training set>"
        )
    wanted = num_samples if method.by_sample and num_samples is not None else meta.num_rows
    rows = wanted if end.max_rows is None else min(wanted, end.max_rows)
    return {
        "rows": rows,
        "row_bytes": end.row_bytes,
        "capped": rows < wanted,
        "location": end.location,
    }
