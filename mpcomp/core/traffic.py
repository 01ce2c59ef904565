"""Counting what crosses a cut: bytes, how well it arrived, how long it took.

Energies are summed on the tensors' own device in fp64 and read only when somebody asks, so that
metering never makes an accelerator wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Meter", "Traffic"]


@dataclass
class Traffic:
    """Traffic of one link in training, or in evaluation.

    Attributes:
        messages: number of messages.
        wire_bytes: bytes of the messages, headers included.
        dense_bytes: bytes of the tensors in their own dtype.
        seconds: host time spent encoding and decoding.
        nonfinite: messages whose tensor had NaN or Inf.
    """

    messages: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    nonfinite: int = 0
    # ||x||^2, <x, y>, ||y||^2, ||x - y||^2 over all messages
    _energies: Tensor | None = field(default=None, repr=False)

    def count(self, wire_bytes: int, dense_bytes: int) -> None:
        """Counts one message handed to the transport."""
        self.messages += 1
        self.wire_bytes += wire_bytes
        self.dense_bytes += dense_bytes

    def compare(self, x: Tensor, y: Tensor) -> None:
        """Adds the fidelity of ``y``, which arrived for ``x``; nothing if one is not finite."""
        a, b = x.detach().flatten().float(), y.detach().flatten().float()
        difference = a - b
        sums = [
            torch.dot(a, a),
            torch.dot(a, b),
            torch.dot(b, b),
            torch.dot(difference, difference),
        ]
        energies = torch.stack(sums).double()
        # A step that a loss scaler skips would make the figures of the whole run NaN.
        energies = torch.where(energies.isfinite().all(), energies, 0.0)
        held = self._energies
        self._energies = energies if held is None else held.to(energies.device) + energies

    @property
    def ratio(self) -> float:
        """Wire bytes over dense bytes; NaN before the first message."""
        return self.wire_bytes / self.dense_bytes if self.dense_bytes else math.nan

    @property
    def relative_error(self) -> float:
        """||x - y|| / ||x|| over the messages of a compressing link; 0 where all went dense."""
        if self._energies is None:
            return 0.0 if self.messages else math.nan
        xx, _, _, dd = self._energies.tolist()
        return math.sqrt(dd / xx) if xx else math.sqrt(dd)

    @property
    def cosine(self) -> float:
        """<x, y> / (||x|| ||y||) over the same messages; 1 where all went dense."""
        if self._energies is None:
            return 1.0 if self.messages else math.nan
        xx, xy, yy, _ = self._energies.tolist()
        return xy / math.sqrt(xx * yy) if xx * yy else math.nan

    def to_dict(self) -> dict[str, Any]:
        """All figures under their names."""
        return {
            "messages": self.messages,
            "wire_bytes": self.wire_bytes,
            "dense_bytes": self.dense_bytes,
            "ratio": self.ratio,
            "relative_error": self.relative_error,
            "cosine": self.cosine,
            "seconds": self.seconds,
            "nonfinite": self.nonfinite,
        }

    def to_state(self) -> dict[str, Any]:
        """State for a checkpoint, so that a resumed run counts on."""
        counts = ("messages", "wire_bytes", "dense_bytes", "seconds", "nonfinite")
        energies = None if self._energies is None else self._energies.tolist()
        return {**{name: getattr(self, name) for name in counts}, "energies": energies}

    @classmethod
    def merged(cls, states: Iterable[dict[str, Any]]) -> Traffic:
        """The traffic of several `to_state`s together: the two ends of a link, or replicas."""
        total = cls()
        for state in states:
            for name, value in state.items():
                if name != "energies":
                    setattr(total, name, getattr(total, name) + value)
                elif value is not None:
                    energies = torch.tensor(value, dtype=torch.float64)
                    held = total._energies
                    total._energies = energies if held is None else held + energies
        return total

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores `to_state`."""
        for name, value in state.items():
            if name == "energies":
                self._energies = None if value is None else torch.tensor(value, dtype=torch.float64)
            else:
                setattr(self, name, value)


class Meter:
    """The traffic of one link: training, evaluation, and evaluation with compression off."""

    def __init__(self) -> None:
        self.train = Traffic()
        self.eval = Traffic()
        self.eval_off = Traffic()
        #: Passes that measure a loss (`mpcomp.api.loss_probe`): in no phase, and never kept.
        self.probe = Traffic()

    def of(self, train: bool, compressed: bool = True) -> Traffic:
        """The traffic of a phase; training counts as one, compressed or not."""
        return self.train if train else self.eval if compressed else self.eval_off

    @property
    def phases(self) -> dict[str, Traffic]:
        """All traffic under the names that reports and checkpoints use."""
        return {"train": self.train, "eval": self.eval, "eval_off": self.eval_off}
