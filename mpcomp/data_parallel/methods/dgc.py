"""Deep Gradient Compression: few elements of each replica's accumulated momentum."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from mpcomp.compressors import Compressor, SampledTopK, Selecting
from mpcomp.compressors.base import check_keep, check_values
from mpcomp.data_parallel.base import Codec, Controller, ReplicaMethod, RunInfo
from mpcomp.feedback.memory import Memory
from mpcomp.feedback.momentum import check_momentum, momentum_memory, refuse_momentum

__all__ = ["DGC", "MomentumMethod"]

WARMUPS: Final = ("paper", "code")
#: Published: the fraction kept in the first stage of warm-up, and of that in each later one.
_FIRST_KEEP = 0.25
_CODE_STAGES = 5


class _ByStep(Controller):
    """A codec that follows from the step's number and the parameter's name."""

    def __init__(self, codec: Callable[[int, str], Codec]) -> None:
        self._codec = codec
        self._step = 0

    def begin(self, step: int, lr: float | None) -> None:
        self._step = step

    def codec(self, name: str) -> Codec:
        return self._codec(self._step, name)


@dataclass(frozen=True)
class MomentumMethod(ReplicaMethod):
    """Settings of `DGC` and `RedSync`: a fraction to keep, and momentum on each replica."""

    keep: float
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_momentum(self.momentum)
        if self.clip is not None and not (self.clip > 0 and math.isfinite(self.clip)):
            raise ValueError(f"clip={self.clip}: expected a norm above 0, or None")

    @property
    def own_momentum(self) -> float:  # type: ignore[override]
        return self.momentum

    @abstractmethod
    def codec(self, step: int, name: str, run: RunInfo) -> Codec:
        """The codec of a parameter in a step."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        refuse_momentum(self, optimizer)

    def controller(self, run: RunInfo) -> Controller:
        return _ByStep(lambda step, name: self.codec(step, name, run))

    def memory(self, *, compressed: bool) -> Memory:
        return momentum_memory(
            self.momentum, compressed=compressed, nesterov=self.nesterov, masking=self.masking
        )


@dataclass(frozen=True)
class DGC(MomentumMethod):
    """Deep Gradient Compression. Spec ``dgc:0.001``, ``dgc:0.001:warmup_steps=500+fp16``.

    u <- m u + g, v <- v + u, the largest elements of v are sent, and v and u are set to zero there.

    So each replica clips its gradient, accumulates its momentum, sends the largest elements of the
    sum and clears them there and in the momentum (`MomentumCorrection`). **The optimizer must have
    no momentum**: torch.optim.SGD(..., momentum=0). Its weight decay then acts without momentum:
    for the effect that decay has in momentum SGD give it 1 / (1 - m) times as much (the authors'
    code has a velocity for the decay alone). Parameters of one dimension go as they are and get the
    same momentum here. With keep=1 this is SGD without momentum, since all of the velocity is
    cleared.

    * Source: Lin et al., ICLR 2018.
    * State: velocity u and sum v of each compressed parameter, on each replica; the velocity alone
      of what goes as it is.
    * Theory: no theorem that we know of; the evidence is the paper's experiments, with SGD.
      Adam-type optimizers are outside both.

    Args:
        keep: fraction of the elements to send after warm-up, in (0, 1].
        momentum: m, in [0, 1).
        nesterov: Nesterov's momentum.
        masking: clear the momentum of what was sent (momentum factor masking).
        clip: norm that the mean gradient of the whole model is held to: each replica's own is
            scaled down to clip * sqrt(replicas) before it is accumulated. (The paper's replica adds
            g / N to a sum, and clips that to clip / sqrt(N): independent gradients of that norm add
            up to one of norm ``clip``. Here g is clipped, and N of them are averaged.)
        warmup_steps: steps in which the fraction falls to ``keep``, in equal stages.
        warmup: "paper": 0.25, 0.0625, 0.015625, 0.004 ... ; "code": keep^(i/6) for i = 1 ... 5, as
            the authors' code computes it.
        sample: fraction of the elements that the threshold is found from.
        values: compressor of the values sent.

    Raises:
        ValueError: a setting outside those.
    """

    warmup_steps: int = 0
    warmup: str = "paper"
    sample: float = 0.01
    values: Compressor | None = None
    spec: ClassVar[str] = "dgc"
    spec_inner: ClassVar[str | None] = "values"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.warmup_steps) is not int or self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps!r}: expected 0 or more steps")
        if self.warmup not in WARMUPS:
            raise ValueError(f"warmup={self.warmup!r}: expected {' or '.join(WARMUPS)}")
        check_values(self.values)
        self.compressor(self.keep)  # raises for a bad sample

    def compressor(self, keep: float) -> Selecting:
        """The selection that keeps so many."""
        return SampledTopK(keep, sample=self.sample, values=self.values)

    def stages(self) -> list[float]:
        """The fractions kept in the stages of warm-up."""
        if self.warmup == "code":
            count = _CODE_STAGES + 1
            return [self.keep ** (i / count) for i in range(1, count)]
        kept: list[float] = []
        while (keep := _FIRST_KEEP ** (len(kept) + 1)) > self.keep:
            kept.append(keep)
        return kept

    def keep_at(self, step: int) -> float:
        """The fraction kept in a step."""
        stages = self.stages()
        if step >= self.warmup_steps or not stages:
            return self.keep
        return stages[step * len(stages) // self.warmup_steps]

    def codec(self, step: int, name: str, run: RunInfo) -> Codec:
        return self.compressor(self.keep_at(step))
