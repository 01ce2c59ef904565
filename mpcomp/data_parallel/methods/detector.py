"""Accordion's detector of critical phases of training, layer by layer, as numbers.

A layer's gradient is accumulated over a span of steps, and the norm of the sum is compared with
that of the span before. Where it has changed by at least ``threshold`` of itself, the layer is in a
critical phase, and is compressed little until the next comparison::

    steps      0 ... span ..... interval ... interval + span ..... 2 interval ...
    sums       |-----|          |------------------|               |---
    compares         . first norms: nothing to compare with        .
    critical   |== all ===============================|= as found =====

Agarwal et al., MLSys 2021. They accumulate over one epoch of every ten. Where their words and their
code leave a choice, it is made here:

1. Until two norms can be compared all layers are critical, and so is one whose norm before was 0.
2. A learning rate that falls makes all layers critical until the next comparison; one that falls
   in the very step of a comparison, until the one after, as the norms are from before the fall.
   So a schedule that falls in every step keeps all critical for ever: use one with milestones.
3. All replicas have to decide alike. There rank 0 decides by its own gradient and tells the others;
   here the norms are of numbers that all of them share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["Detector"]


class Detector:
    """The layers in a critical phase. The calls of a step, in this order::

        detector.note_lr(lr)                      # where it is known
        detector.is_critical(name)                # for each layer
        if detector.accumulating: ...             # the caller adds this step's gradient to its sums
        if detector.due: detector.compare(norms)  # of the sums, which then start again from zero
        detector.end_step()

    A skipped step adds nothing, and makes all other calls.

    Args:
        interval: steps between two comparisons.
        span: steps, the first ones of an interval, whose gradients are accumulated; None for all.
        threshold: relative change of a norm from which on a layer is critical.

    Attributes:
        steps: number of steps so far.
    """

    def __init__(self, interval: int, *, span: int | None = None, threshold: float = 0.5) -> None:
        self.interval = interval
        self.span = interval if span is None else span
        self.threshold = threshold
        assert 1 <= self.span <= self.interval and threshold > 0
        self.steps = 0
        self._norms: dict[str, float] = {}
        self._critical: dict[str, bool] = {}
        self._all_critical = True
        self._lr: float | None = None
        self._lr_fell = False

    @property
    def accumulating(self) -> bool:
        """Whether this step's gradient belongs to the sums."""
        return self.steps % self.interval < self.span

    @property
    def due(self) -> bool:
        """Whether norms are compared in this step."""
        return self.steps % self.interval == self.span - 1

    def is_critical(self, name: str) -> bool:
        """Whether the layer is to be compressed little; so is one that was never compared."""
        return self._all_critical or self._critical.get(name, True)

    def note_lr(self, lr: float) -> None:
        """Takes note of this step's learning rate."""
        if self._lr is not None and lr < self._lr:
            self._lr_fell = True
            self._all_critical = True
        self._lr = lr

    def compare(self, norms: Mapping[str, float]) -> dict[str, bool]:
        """Decides about all layers, until the next comparison.

        Args:
            norms: of the accumulated gradients, by layer.

        Returns:
            Whether each is critical.

        Raises:
            ValueError: a norm that is no number of at least 0.
        """
        assert self.due, "norms are compared in the last step of a span"
        for name, norm in norms.items():
            if not (norm >= 0 and math.isfinite(norm)):
                raise ValueError(
                    f"norm {norm} of {name!r}: expected a finite number, 0 or more; leave steps "
                    "whose gradient is not finite out of the sums"
                )
        self._all_critical = self._lr_fell
        self._critical = {name: self._changed(name, norm) for name, norm in norms.items()}
        self._norms = dict(norms)
        return {name: self.is_critical(name) for name in norms}

    def _changed(self, name: str, norm: float) -> bool:
        before = self._norms.get(name, 0.0)
        return before == 0 or abs(before - norm) >= self.threshold * before

    def end_step(self) -> None:
        """Counts a step, skipped or not."""
        self.steps += 1
        self._lr_fell = False

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON can hold it: enough to go on exactly, between two steps."""
        return {
            "interval": self.interval,
            "span": self.span,
            "steps": self.steps,
            "norms": dict(self._norms),
            "critical": dict(self._critical),
            "all_critical": self._all_critical,
            "lr": self._lr,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave.

        Raises:
            ValueError: the state is of a detector with another interval or span.
        """
        for name in ("interval", "span"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state is of a detector with {name}={state[name]}, and this one has "
                    f"{getattr(self, name)}: resume with the same settings"
                )
        self.steps = state["steps"]
        self._norms = dict(state["norms"])
        self._critical = dict(state["critical"])
        self._all_critical = state["all_critical"]
        self._lr = state["lr"]
        self._lr_fell = False
