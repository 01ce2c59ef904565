"""One microbatch crossing one link in one step: what both ends know about it without a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Key", "SampleIds", "Visit"]

#: What a slot of a feedback method's state is found by.
Key = tuple[int, ...]
#: Ids of a microbatch's rows, or the index of a batch of fixed composition.
SampleIds = tuple[Key, ...] | int | None


@dataclass(frozen=True)
class Visit:
    """Both ends of a link are given equal visits.

    Attributes:
        step: number of the training step, skipped steps counted.
        microbatch: number of the microbatch within the step.
        draw: a fresh generator for a named part of the message; equal at both ends, and equal
            again when called again.
        sample_ids: see `SampleIds`.
        unit: factor from the units in which state is kept to those of this message's tensor:
            the loss scale, over the learning rate where a method follows it.
    """

    step: int
    microbatch: int
    draw: Callable[[str], torch.Generator]
    sample_ids: SampleIds = None
    unit: float = 1.0
