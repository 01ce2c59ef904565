"""Flags of NaN and Inf that a link has seen, which are read once, at the end of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mpcomp.core.traffic import Traffic

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
    """Flags that nobody has read yet, so that an accelerator is waited for once a step."""

    def __init__(self) -> None:
        self.notes: list[_Note] = []

    def add(self, traffic: Traffic, flag: Tensor, *, counts: bool) -> None:
        """Notes a flag of a message.

        Args:
            traffic: whose message it is.
            flag: whether there was NaN or Inf, bool [].
            counts: whether this is the sender, which counts it.
        """
        self.notes.append(_Note(traffic, flag, counts))

    def found(self, among: Callable[[Traffic], bool]) -> bool:
        """Whether one of the flags was raised; counts and forgets them.

        Args:
            among: says whether flags of this traffic are read; others stay.
        """
        read = [note for note in self.notes if among(note.traffic)]
        self.notes[:] = [note for note in self.notes if not among(note.traffic)]
        if not read:
            return False
        flags = torch.stack([note.flag.to(read[0].flag.device) for note in read]).tolist()
        for note, flag in zip(read, flags, strict=True):
            note.traffic.nonfinite += flag and note.counts
        return any(flags)
