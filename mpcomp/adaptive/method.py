"""`Adaptive`: a method for a cut whose compression ratio follows its gain."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from mpcomp.adaptive.clock import Clock, modelled_clock
from mpcomp.adaptive.search import between, check_search, checked_cfs, ladder
from mpcomp.compressors.base import Compressor
from mpcomp.core.spec import SpecValue, of_inner, shown
from mpcomp.feedback.base import Feedback

__all__ = ["GAINS", "Adaptive"]

#: What a gain is the gain of.
GAINS: Final = ("energy", "centred")
#: Weight of a new gain in its average, where one is measured in every step.
SMOOTHING: Final = 0.1


@dataclass(frozen=True)
class Adaptive(SpecValue):
    """Chooses the compression factor of a cut's compressor while training; ``adaptive+topk:0.1``.

    A compression factor (CF) is elements of the tensor per element sent. Each link, a direction of
    a cut, decides for itself, by the rule of GraVAC (`mpcomp.adaptive.search`), between steps, and
    alike on all ranks and replicas: it sends with its candidate CF if the average gain of that is
    at least ``eps``, else with its minimum if the gain of that is, else dense; so the first step is
    dense. The gain is measured in every step on one microbatch. Evaluation sends as the next step
    of training would.

    With a ``budget`` links share bytes instead. All links that are given an equal value are one
    group, both directions and all cuts. Once a window each of them measures its gain at all CFs
    between the two, and bytes go where the gain rises most for them, until the budget is spent.
    EF21's first messages, which go raw, and warm-up come on top of it.

    As a spec: ``adaptive:cf=2-50:eps=0.9:window=20+topk:0.1``.

    * Source: GraVAC (Tyagi & Swany, IEEE CLOUD 2023, Algorithm 1) for the search; its use at cuts
      and the shared budget are this project's own.
    * State: averages of gains and throughputs and the place of the search, a few numbers a link,
      equal on all ranks, in checkpoints; beside it that of ``inner``.
    * Theory: none; thresholds are heuristics. Each message is one of ``inner``, with what is known
      of it.

    Args:
        inner: compressor that a CF can be set of (one that selects, or `Quantize`), or
            `ErrorFeedback` or `EF21` round one. Its own fraction, or number of bits, is not used.
        cf: smallest and largest CF, 1 or more.
        eps: least gain that is sent, in (0, 1). Without effect with a budget.
        window: steps between decisions.
        omega: relative difference within which gains, or throughputs, are the same, in (0, 1).
            Without effect with a budget.
        policy: how candidates ascend from the smallest CF: "exponential" (times 2^1, 2^2, 2^4, 2^8
            ...) or "geometric" (times 2, 4, 8 ...). With a budget each is 2^(1/2) times the one
            before, or one bit less, whatever this says, or too much of it would be left over.
        smoothing: weight of a new gain in its average, in (0, 1]; None for 0.1, and with a budget,
            whose gains are measured once a window, for 1.
        gain: "energy", 1 - ||x - C(x)||^2 / ||x||^2; or "centred", with ||x - mean||^2 below, where
            each channel has its own mean: channels of nearly constant value dominate the energy of
            some activations.
        budget: part of the dense bytes of the group that its messages may have, in (0, 1).
        bandwidth_mbps: megabits a second of links of which the time of a step is computed, so that
            runs repeat exactly; None measures it. Each link is then taken to be alone: a step is
            ``compute_ms``, and the link's own messages one after the other.
        latency_ms: of a message on such links.
        compute_ms: of a step without its messages, on such links.

    Raises:
        TypeError: ``inner`` is neither, or has no CF.
        ValueError: a setting outside those, or CFs that leave nothing to choose.
    """

    inner: Compressor | Feedback
    cf: tuple[float, float] = (2.0, 50.0)
    eps: float = 0.9
    window: int = 100
    omega: float = 0.01
    policy: str = "exponential"
    smoothing: float | None = None
    gain: str = "energy"
    budget: float | None = None
    bandwidth_mbps: float | None = None
    latency_ms: float = 0.0
    compute_ms: float = 0.0
    spec: ClassVar[str] = "adaptive"
    spec_inner: ClassVar[str | None] = "inner"
    at_cuts = True
    adapts = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "cf", checked_cfs(self.cf, like=(2, 50)))
        self._check_inner()
        check_search(self, smoothing="to leave it to the budget")
        if self.budget is not None and not between(self.budget, 0, 1):
            raise ValueError(f"budget={self.budget!r}: expected a number in (0, 1)")
        if self.gain not in GAINS:
            raise ValueError(f"gain={self.gain!r}: expected {', '.join(GAINS)}")
        if self.bandwidth_mbps is not None and self.budget is not None:
            raise ValueError(
                f"bandwidth_mbps={self.bandwidth_mbps} with budget={self.budget}: a budget is "
                "shared out by gains and bytes, whatever the time of a step; leave out one of them"
            )
        self.clock()  # raises for links that cannot be

    def _check_inner(self) -> None:
        inner: Any = self.inner
        if isinstance(inner, Feedback) and not inner.adaptable:
            raise TypeError(
                f"inner={inner}: of feedback methods the ratio may change under ErrorFeedback and "
                f"EF21 alone; use ef+{inner.inner} or ef21+{inner.inner}"
            )
        if not (isinstance(inner, Compressor | Feedback) and inner.adaptable):
            raise TypeError(
                f"inner={shown(inner)}: Adaptive goes round a compressor such as TopK(0.1), or "
                "ErrorFeedback or EF21 round one; give any other method to the cut itself"
            )
        lowest, highest = self.cf
        if self.compressor(lowest) == self.compressor(highest):
            raise ValueError(
                f"cf={self.cf}: {self.compressor(lowest)} at both ends, which leaves nothing to "
                "choose; set them further apart, or use that compressor itself"
            )

    def check_place(self, argument: str) -> None:
        if argument == "tie_comp":
            raise ValueError(
                f"tie_comp={self}: adaptive ratios are for cuts; give a tie a fixed one, such as "
                f"{self.inner}"
            )
        self.inner.check_place(argument)

    def at(self, cf: float) -> Compressor | Feedback:
        """``inner`` at a CF."""
        if isinstance(self.inner, Compressor):
            return self.inner.with_cf(cf)
        inner = self.inner.inner.with_cf(cf)
        return dataclasses.replace(self.inner, inner=inner)  # type: ignore[type-var]

    def compressor(self, cf: float) -> Compressor:
        """The compressor at a CF, without feedback."""
        method = self.at(cf)
        return method if isinstance(method, Compressor) else method.inner

    selects = of_inner("selects")

    @property
    def rungs(self) -> tuple[float, ...]:
        """The CFs between the two ends, ascending; of those that are the same the first."""
        if self.budget is None:
            steps = ladder(self.cf, self.policy)
        else:
            steps = self.compressor(self.cf[0]).cf_ladder(*self.cf)
        found: dict[Compressor, float] = {}
        for cf in steps:
            found.setdefault(self.compressor(cf), cf)
        return tuple(found.values())

    @property
    def weight(self) -> float:
        """Weight of a new gain in its average."""
        if self.smoothing is not None:
            return self.smoothing
        return SMOOTHING if self.budget is None else 1.0

    def clock(self) -> Clock | None:
        """The clock of the links described; None where steps are measured."""
        return modelled_clock(self)
