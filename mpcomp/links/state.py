"""The state of a link: its size, known before the run, and what puts back a saved one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import SpecValue
from mpcomp.feedback.memory import Side
from mpcomp.links.endpoints import endpoint_of
from mpcomp.links.link import Link

__all__ = ["restored", "state_bytes_of"]


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


def restored(
    link: Link,
    state: Mapping[str, Any],
    device: Mapping[str, torch.device],
    going_on: tuple[SpecValue, str] | None = None,
) -> Callable[[], None]:
    """Makes a new endpoint from a saved state; gives what puts it in the present one's place.

    Until that is called nothing has changed.

    Args:
        link: whose endpoint it is.
        state: of the endpoint's `state_dict`.
        device: where each role's end lives.
        going_on: the method, and its word, that take the place of the present ones.

    Raises:
        ValueError, KeyError: it is the state of another method or of other tensors.
    """
    method, chosen = going_on or (link.method, link.chosen)
    endpoint = endpoint_of(method)
    endpoint.load_state_dict(state, device)
    return partial(link.become, method, chosen, endpoint)
