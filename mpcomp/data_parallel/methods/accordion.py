"""Accordion: little compression in critical phases of training, much in the others.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.core.spec import SpecValue, shown
from mpcomp.data_parallel.base import Codec, Controller, Draw, Factored, ReplicaMethod, RunInfo
from mpcomp.feedback.memory import NO_MEMORY, Memory, Residual

__all__ = ["Accordion", "AccordionController", "Detector"]


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

    def controller(self, run: RunInfo) -> Controller:
        return AccordionController(self.low, self.high, self.detector(), run)

    def memory(self, *, compressed: bool) -> Memory:
        return Residual() if compressed and self.feedback else NO_MEMORY


class AccordionController(Controller):
    """The controller of `Accordion`.

    Args:
        low: method of low compression, for critical phases.
        high: method of high compression.
        detector: tells which parameters are in one.
        run: what it is for.
    """

    sum_over_replicas_only = True

    def __init__(self, low: SpecValue, high: SpecValue, detector: Detector, run: RunInfo) -> None:
        self._low, self._high = low, high
        self.detector = detector
        self._names = list(run.metas)
        self._num_replicas = run.num_replicas
        self._sums: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}

    def begin(self, step: int, lr: float | None) -> None:
        self._new = {}
        if lr is not None:
            self.detector.note_lr(lr)

    def codec(self, name: str) -> Codec:
        chosen = self._low if self.detector.is_critical(name) else self._high
        assert isinstance(chosen, Compressor | Factored)
        return chosen

    def observe(self, name: str, target: Tensor, gradient: Tensor, draw: Draw) -> None:
        if self.detector.accumulating:
            before = self._sums.get(name)
            # A new tensor: a step that is not finite must not be in the sum.
            self._new[name] = gradient.clone() if before is None else before + gradient

    def figures(self) -> list[float]:
        if not self.detector.due:
            return []
        sums = {**self._sums, **self._new}
        return [_square(sums.get(name)) for name in self._names]

    def end(self, sums: Sequence[float], *, finite: bool, traffic_bytes: float) -> None:
        if finite:
            self._sums.update(self._new)
        if self.detector.due:
            if all(map(math.isfinite, sums)):
                norms = [math.sqrt(square / self._num_replicas) for square in sums]
                self.detector.compare(dict(zip(self._names, norms, strict=True)))
            self._sums = {}
        self._new = {}
        self.detector.end_step()

    def report(self) -> dict[str, Any]:
        critical = sum(self.detector.is_critical(name) for name in self._names)
        return {"critical": critical / max(1, len(self._names))}

    def state_dict(self) -> dict[str, Any]:
        return self.detector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.detector.load_state_dict(state)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._sums)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._sums = dict(tensors)


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


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _square(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.dot(x))
