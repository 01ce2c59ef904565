"""Accordion at work: accumulates gradients, and switches each parameter between two methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.core.spec import SpecValue
from mpcomp.data_parallel.base import Codec, Controller, Draw, Factored, Setting
from mpcomp.data_parallel.methods.detector import Detector

__all__ = ["AccordionController"]


class AccordionController(Controller):
    """The controller of `Accordion`.

    Args:
        low: method of low compression, for critical phases.
        high: method of high compression.
        detector: tells which parameters are in one.
        setting: of the run.
    """

    among_replicas = True

    def __init__(
        self, low: SpecValue, high: SpecValue, detector: Detector, setting: Setting
    ) -> None:
        self._low, self._high = low, high
        self.detector = detector
        self._names = list(setting.metas)
        self._num_replicas = setting.num_replicas
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

    def observe(self, name: str, wanted: Tensor, gradient: Tensor, draw: Draw) -> None:
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


def _square(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.dot(x))
