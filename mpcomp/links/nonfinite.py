"""Flags of NaN and Inf that a link has seen, which are read once, at the end of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mpcomp.core.side_effects import way_back
from mpcomp.core.traffic import Meter, Traffic

__all__ = ["NonfiniteNotes"]


class _Note(NamedTuple):
    """A flag of the end of a step.

    Attributes:
        traffic: whose message it is.
        flag: whether there was NaN or Inf, bool [].
        counts: whether this is the sender's, which is counted.
    """

    traffic: Traffic
    flag: Tensor
    counts: bool


class NonfiniteNotes:
    """Flags that nobody has read yet, so that an accelerator is waited for once a step.

    Args:
        meter: of the link.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.notes: list[_Note] = []

    def add(self, traffic: Traffic, flag: Tensor, *, counts: bool) -> None:
        """Notes a flag of a message.

        Args:
            traffic: whose message it is.
            flag: whether there was NaN or Inf, bool [].
            counts: whether this is the sender, which counts it.
        """
        self.notes.append(_Note(traffic, flag, counts))

    def found(self, train: bool = True) -> bool:
        """Whether training (or evaluation) saw a non-finite tensor here since the last call.

        On an accelerator this waits for it.
        """

        def ours(note: _Note) -> bool:
            return (note.traffic is self._meter.train) == train

        read = [note for note in self.notes if ours(note)]
        if not read:
            return False
        self.notes[:] = [note for note in self.notes if not ours(note)]
        flags = torch.stack([note.flag.to(read[0].flag.device) for note in read]).tolist()
        for note, flag in zip(read, flags, strict=True):
            note.traffic.nonfinite += flag and note.counts
        return any(flags)

    def way_back(self) -> Callable[[], None]:
        """A function that makes the meter forget a message that has been encoded and not sent."""
        ways = [way_back(each) for each in (vars(self._meter.train), self.notes)]

        def back() -> None:
            for each in ways:
                assert each is not None  # there is one for a dict, and for a list
                each()

        return back
