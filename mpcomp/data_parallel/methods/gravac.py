"""GraVAC: a compression factor that follows what compression costs and what it saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from mpcomp.adaptive.clock import Clock, ModelledClock, WallClock
from mpcomp.adaptive.search import POLICIES, Search, checked_cfs
from mpcomp.compressors.base import Compressor, check_contractive
from mpcomp.core.spec import shown
from mpcomp.data_parallel.base import Controller, ReplicaMethod, Setting
from mpcomp.data_parallel.methods.gravac_controller import GraVACController
from mpcomp.feedback.memory import NO_MEMORY, Memory
from mpcomp.feedback.momentum import check_momentum, momentum_memory, refuse_momentum
from mpcomp.feedback.residual import Residual

__all__ = ["PAPER", "GraVAC"]

#: The settings of the paper's evaluation, see `GraVAC.paper`.
PAPER: Final[Mapping[str, Mapping[str, Any]]] = {
    "resnet101": {"cf": (10.0, 1000.0), "eps": 0.7, "window": 500, "omega": 0.01},
    "vgg16": {"cf": (10.0, 1000.0), "eps": 0.7, "window": 500, "omega": 0.01},
    "lstm": {"cf": (10.0, 1000.0), "eps": 0.7, "window": 500, "omega": 0.01},
    "geometric": {
        "cf": (10.0, 2000.0),
        "eps": 0.7,
        "window": 2000,
        "omega": 0.01,
        "policy": "geometric",
    },
    "randomk": {
        "cf": (1.5, 1000.0),
        "eps": 0.7,
        "window": 2000,
        "omega": 0.01,
        "policy": "geometric",
    },
}


@dataclass(frozen=True)
class GraVAC(ReplicaMethod):
    """Searches the compression factor of a compressor while training; ``gravac+topk:0.1``.

    A compression factor (CF) is elements of the gradient per element sent. In each step the
    gradient, with the residual in it, is compressed by two CFs, and sent with the larger one whose
    gain ||C(g)||^2 / ||g||^2 is at least ``eps``; with none of them it goes as it is. `Search` has
    the rules by which the two move.

    As a spec: ``gravac:cf=10-1000:eps=0.9:window=200+topk:0.1``.

    * Source: Tyagi & Swany, IEEE CLOUD 2023, Algorithm 1; ``momentum`` from DGC.
    * State: a residual of each parameter on each replica (with ``momentum`` its velocity and sum);
      averages of gains and throughputs, the same on all.
    * Theory: error feedback whose contraction changes from step to step; that the gain is a measure
      of what training bears is a heuristic.

    Args:
        inner: compressor that a CF can be set of: one that selects, or `Quantize`. Its own
            fraction, or number of bits, is not used.
        cf: smallest and largest CF, 1 or more; equal ones leave nothing but dense steps below
            ``eps``.
        eps: least gain that is sent, in (0, 1).
        window: steps between decisions.
        omega: relative difference within which gains, or throughputs, are the same, in (0, 1).
        policy: how candidates ascend from the smallest CF: "exponential" (times 2^1, 2^2, 2^4, 2^8
            ...) or "geometric" (times 2, 4, 8 ...).
        smoothing: weight of a step's gain in its moving average, in (0, 1]; None for the paper's
            number of replicas / 100.
        exact: decide a step by its own gradient, as Algorithm 1 does: then nothing is sent before
            the last gradient is there. Otherwise by the averages up to the step before, so that
            sending overlaps with the backward pass; the first step then is dense.
        momentum: of each replica's own gradient, in [0, 1), as DGC has it (`MomentumCorrection`);
            the optimizer then must have none, and its weight decay wants to be 1 / (1 - momentum)
            times as large (see `DGC`). 0 is error feedback, as in the paper.
        masking: clear the momentum of what was sent, as DGC does. Where much is sent this takes
            most of the momentum away, and a dense step all of it; without, what is sent adds up to
            momentum SGD.
        bandwidth_mbps: megabits a second of links of which the time of a step is computed, so that
            runs repeat exactly; None measures it.
        latency_ms: of a message on such links.
        compute_ms: of a step without its messages, on such links.

    Raises:
        TypeError: ``inner`` is no compressor (GraVAC keeps the residual itself), or has no CF.
        ValueError: a setting outside those.
    """

    inner: Compressor
    cf: tuple[float, float] = (10.0, 1000.0)
    eps: float = 0.7
    window: int = 500
    omega: float = 0.01
    policy: str = "exponential"
    smoothing: float | None = None
    exact: bool = False
    momentum: float = 0.0
    masking: bool = True
    bandwidth_mbps: float | None = None
    latency_ms: float = 0.0
    compute_ms: float = 0.0
    spec: ClassVar[str] = "gravac"
    spec_inner: ClassVar[str | None] = "inner"
    adapts = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "cf", checked_cfs(self.cf, like=(10, 1000)))
        self._check_inner()
        for name in ("eps", "omega"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number in (0, 1)")
        whole = isinstance(self.window, int) and not isinstance(self.window, bool)
        if not (whole and self.window >= 1):
            raise ValueError(f"window={self.window!r}: expected a number of steps, 1 or more")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: expected {' or '.join(POLICIES)}")
        if self.smoothing is not None and not 0 < self.smoothing <= 1:
            raise ValueError(
                f"smoothing={self.smoothing}: expected a weight in (0, 1], or None for the number "
                "of replicas / 100"
            )
        check_momentum(self.momentum)
        if not self.masking and not self.momentum:
            raise ValueError(
                "masking=False without momentum: there is no velocity to clear; give momentum=0.9 "
                "as well, or leave it out"
            )
        if self.bandwidth_mbps is None and (self.latency_ms or self.compute_ms):
            raise ValueError(
                f"latency_ms={self.latency_ms}, compute_ms={self.compute_ms} without "
                "bandwidth_mbps: give it as well, or leave them out to measure the time of a step"
            )
        self.clock()  # raises for a bandwidth or a time that cannot be

    def _check_inner(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise TypeError(
                f"inner={shown(self.inner)}: GraVAC goes round a compressor such as TopK(0.1), and "
                "keeps what that leaves out itself; leave out other methods"
            )
        check_contractive(self.inner, "with a residual")
        self.inner.with_cf(self.cf[0])  # a TypeError says which compressors have a CF

    @property
    def own_momentum(self) -> float:  # type: ignore[override]
        return self.momentum

    @classmethod
    def paper(cls, name: str, inner: Compressor, **changes: Any) -> GraVAC:
        """A setting of the paper's evaluation (32 workers).

        ============  =====================================================================
        "resnet101"   CIFAR-10; 163 times less traffic, with eps=0.9 19 times
        "vgg16"       CIFAR-100; 80 times less, with eps=0.9 13.5 times
        "lstm"        Penn Treebank; 289 times less, with eps=0.9 279 times
        "geometric"   ResNet101 with RedSync's threshold inside: ends at CF 1280; 76 times less
        "randomk"     ResNet101 with random-k inside: CFs of 1.5 to 48; 18 times less
        ============  =====================================================================

        The first three have DGC's threshold inside, and are the same setting. The traffic is the
        paper's. Its code divides by the energy of the gradient without the residual, by which
        random-k gains about 1 at any CF once the residual has grown; by Algorithm 1, which is
        followed here, it gains about 1 / CF, so that "randomk" sends nothing but dense steps
        unless eps is far lower.

        Args:
            name: of the setting.
            inner: compressor.
            changes: arguments to replace, such as eps=0.9.

        Raises:
            ValueError: an unknown name.
        """
        if name not in PAPER:
            raise ValueError(f"unknown setting {name!r} (known: {', '.join(PAPER)})")
        return cls(inner, **{**PAPER[name], **changes})

    def search(self, num_replicas: int) -> Search:
        """A new search among so many replicas."""
        smoothing = self.smoothing
        if smoothing is None:
            smoothing = min(1.0, num_replicas / 100)
        return Search(
            self.cf,
            eps=self.eps,
            window=self.window,
            omega=self.omega,
            policy=self.policy,
            smoothing=smoothing,
        )

    def clock(self) -> Clock:
        """A new clock: of the links described, or on the wall."""
        if self.bandwidth_mbps is None:
            return WallClock()
        return ModelledClock(self.compute_ms, self.bandwidth_mbps, self.latency_ms)

    def controller(self, setting: Setting) -> Controller:
        return GraVACController(
            self.inner,
            self.search(setting.num_replicas),
            self.clock(),
            exact=self.exact,
            modelled=self.bandwidth_mbps is not None,
            num_replicas=setting.num_replicas,
        )

    def memory(self, *, compressed: bool) -> Memory:
        if self.momentum:
            return momentum_memory(self.momentum, compressed=compressed, masking=self.masking)
        return Residual() if compressed else NO_MEMORY

    def mean_memory(self) -> Memory:
        return Residual()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.momentum:
            refuse_momentum(self, optimizer)
