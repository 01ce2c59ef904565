"""Accordion: little compression in critical phases of training, much in the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from mpcomp.compressors.base import Compressor
from mpcomp.core.spec import SpecValue, shown
from mpcomp.data_parallel.base import Controller, Factored, ReplicaMethod, Setting
from mpcomp.data_parallel.methods.accordion_controller import AccordionController
from mpcomp.data_parallel.methods.detector import Detector
from mpcomp.feedback.memory import NO_MEMORY, Memory
from mpcomp.feedback.residual import Residual

__all__ = ["Accordion"]


@dataclass(frozen=True)
class Accordion(ReplicaMethod):
    """Switches each parameter between two methods, by the phase of its training.

    With the sum D of a parameter's gradients over a span, and D' of the one before, it is critical
    if ``| ||D'|| - ||D|| | >= threshold ||D'||``. It is sent with ``low`` while its accumulated
    gradient changes much, at first, and after the learning rate falls; else with ``high``.
    `Detector` has the rules.

    As a spec: ``accordion:low=topk/0.99:high=topk/0.1:interval=1000``.

    The paper's pairs are PowerSGD of rank 2 (or 4) and 1, and top-k of 0.99 and 0.1 (CIFAR-10),
    0.25 (CIFAR-100) or 0.02 (WikiText-2); it compares every 10 epochs (language models: 5), and
    accumulates over one of them. Its code sends top-k without a residual, and the sum of the
    replicas instead of their mean; here ``feedback=False`` gives the former.

    * Source: Agarwal et al., MLSys 2021.
    * State: a residual of each parameter on each replica (none with ``feedback=False``), the
      gradient accumulated in the interval, and the norm of the one before; decisions are the same
      on all.
    * Theory: none of the switching, a heuristic; each step is one of ``low`` or ``high``.

    Args:
        low: method of low compression, for critical phases.
        high: method of high compression.
        interval: steps between two comparisons.
        span: steps, the first ones of an interval, whose gradients are accumulated; None for all.
        threshold: relative change of a norm from which on a phase is critical.
        feedback: keep what was not sent and add it to the next gradient.

    Raises:
        TypeError: ``low`` or ``high`` is no method that sends a gradient by itself.
        ValueError: a setting outside those.
    """

    low: SpecValue
    high: SpecValue
    interval: int
    span: int | None = None
    threshold: float = 0.5
    feedback: bool = True
    spec: ClassVar[str] = "accordion"
    adapts = True

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            method = getattr(self, name)
            if not isinstance(method, SpecValue):
                raise TypeError(
                    f"{name}={method!r}: expected a method such as TopK(0.1) or PowerSGD(1)"
                )
            if not isinstance(method, Compressor | Factored):
                raise TypeError(
                    f"{name}={shown(method)}: Accordion switches between two compressors such as "
                    "TopK(0.1), and keeps what they leave out itself (feedback=True)"
                )
        assert isinstance(self.low, Compressor | Factored)
        assert isinstance(self.high, Compressor | Factored)
        if self.low.by_matrix != self.high.by_matrix:
            raise ValueError(
                f"low={shown(self.low)}, high={shown(self.high)}: both have to work by matrix, as "
                "onebit and lowrank do, or neither"
            )
        if not _count(self.interval):
            raise ValueError(f"interval={self.interval!r}: expected a number of steps, 1 or more")
        if self.span is not None and not (_count(self.span) and self.span <= self.interval):
            raise ValueError(
                f"span={self.span!r}: expected a number of steps, 1 to interval={self.interval}, "
                "or None for all of them"
            )
        if not (self.threshold > 0 and math.isfinite(self.threshold)):
            raise ValueError(
                f"threshold={self.threshold}: expected a relative change of a norm, more than 0; "
                "the paper has 0.5"
            )

    def detector(self) -> Detector:
        """A new detector."""
        return Detector(self.interval, span=self.span, threshold=self.threshold)

    def controller(self, setting: Setting) -> Controller:
        return AccordionController(self.low, self.high, self.detector(), setting)

    def memory(self, *, compressed: bool) -> Memory:
        return Residual() if compressed and self.feedback else NO_MEMORY


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
