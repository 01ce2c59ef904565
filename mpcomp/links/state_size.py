"""The size of a link's state, known before the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.memory import Side
from mpcomp.links.link import Link

__all__ = ["state_bytes_of"]


def state_bytes_of(
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
    if link.method.by_sample and num_samples is None:
        raise ValueError(
            f"{link.name}: {link.method} keeps a row for every training sample; "
            "pass num_samples=<size of the training set>"
        )
    for side, stage in ((Side.SENDER, link.sender_stage), (Side.RECEIVER, link.receiver_stage)):
        for size in link.endpoint.state_size(side, meta, num_samples) if stage in here else ():
            yield {
                "boundary": link.boundary,
                "direction": link.direction,
                "method": str(link.method),
                "role": side.value,
                "bytes": size.rows * size.row_bytes,
                **size._asdict(),
            }
