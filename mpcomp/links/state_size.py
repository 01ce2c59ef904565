"""The size of a link's state, known before the run.

What a method keeps of a row comes from an end that is made for it and never written to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.base import Feedback
from mpcomp.feedback.ends import end_of
from mpcomp.feedback.memory import Side
from mpcomp.links.link import Link

__all__ = ["state_of_link"]


def state_of_link(
    link: Link, meta: TensorMeta, num_samples: int | None, here: Collection[int]
) -> Iterator[dict[str, Any]]:
    """The entries of a link's ends that are here, one for each end that keeps something.

    Args:
        link: of a cut or of a tied weight.
        meta: of a whole batch at the cut, or of the weight.
        num_samples: of the training set, for methods that keep a row for each sample.
        here: numbers of the stages of this process.

    Yields:
        boundary, direction, method (its spec), role ("sender" or "receiver"), rows, row_bytes,
        bytes, capped (whether ``cap_bytes`` leaves rows out) and location.

    Raises:
        ValueError: a method keeps a row for each sample, and their number is not given.
    """
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
