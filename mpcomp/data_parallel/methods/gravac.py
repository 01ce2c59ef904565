"""GraVAC: a compression factor that follows what compression costs and what it saves.

Its controller measures the gains of two compression factors in every step, and sends by one. Both
levels are selected in one pass (the second among the survivors of the first), also in steps that go
dense, as else the way back would not be found. What `Search` is told are sums over all ranks:
energies of all parameters, and seconds; so every rank of a whole pipeline decides alike, however
its own gradients and its own clock differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpcomp.adaptive.clock import Clock, WallClock, modelled_clock
from mpcomp.adaptive.search import Branch, Search, check_search, checked_cfs
from mpcomp.compressors import Compressor, MultiLevel, Selecting
from mpcomp.compressors.base import Coding, Encoded, check_contractive
from mpcomp.compressors.multi_level import levels
from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import shown
from mpcomp.data_parallel.base import Codec, Controller, Draw, ReplicaMethod, RunInfo
from mpcomp.feedback.memory import NO_MEMORY, Memory, Residual
from mpcomp.feedback.momentum import check_momentum, momentum_memory, refuse_momentum

__all__ = ["GraVAC", "GraVACController"]


@dataclass(frozen=True)
class GraVAC(ReplicaMethod):
    """Searches the compression factor of a compressor while training; ``gravac+topk:0.1``.

    A compression factor (CF) is elements of the gradient per element sent. In each step the
    gradient, with the residual in it, is compressed by two CFs, and sent with the larger one whose
    gain ||C(g)||^2 / ||g||^2 is at least ``eps``; with none of them it goes as it is. `Search` has
    the rules by which the two move.

    As a spec: ``gravac:cf=10-1000:eps=0.9:window=200+topk:0.1``. Defaults are those of the paper's
    evaluation, which has DGC's threshold inside (`SampledTopK`).

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
        check_search(self, smoothing="for the number of replicas / 100")
        check_momentum(self.momentum)
        if not self.masking and not self.momentum:
            raise ValueError(
                "masking=False without momentum: there is no velocity to clear; give momentum=0.9 "
                "as well, or leave it out"
            )
        self.clock()  # raises for links that cannot be

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
        return modelled_clock(self) or WallClock()

    def controller(self, run: RunInfo) -> Controller:
        return GraVACController(
            self.inner,
            self.search(run.num_replicas),
            self.clock(),
            exact=self.exact,
            modelled=self.bandwidth_mbps is not None,
            num_replicas=run.num_replicas,
        )

    def memory(self, *, compressed: bool) -> Memory:
        if self.momentum:
            return momentum_memory(self.momentum, compressed=compressed, masking=self.masking)
        return Residual() if compressed else NO_MEMORY

    def second_stage_memory(self) -> Memory:
        return Residual()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.momentum:
            refuse_momentum(self, optimizer)


@dataclass
class _Seen:
    """Energies of one step, fp64: of targets, and of what each level leaves out."""

    target: Tensor | float = 0.0
    rest_min: Tensor | float = 0.0
    rest_candidate: Tensor | float = 0.0

    def sums(self) -> list[float]:
        """The energies as numbers (from an accelerator this waits)."""
        return [float(self.target), float(self.rest_min), float(self.rest_candidate)]


class GraVACController(Controller):
    """The controller of `GraVAC`.

    Args:
        inner: compressor that a CF is set of.
        search: decides.
        clock: says how long steps take.
        exact: whether a step is decided by its own gradient.
        modelled: whether the clock computes a lap from the bytes of a step.
        num_replicas: of the run.

    Attributes:
        search: as given.
        clock: as given.
    """

    def __init__(
        self,
        inner: Compressor,
        search: Search,
        clock: Clock,
        *,
        exact: bool,
        modelled: bool,
        num_replicas: int,
    ) -> None:
        self._inner = inner
        self.search = search
        self.clock = clock
        self.waits = exact
        self._modelled = modelled
        self._rounds = 2 * (num_replicas - 1)
        self._branch: Branch = "dense"
        self._last: dict[str, Any] = {}

    def begin(self, step: int, lr: float | None) -> None:
        self._seen = _Seen()
        #: Of each parameter its number of elements, and the positions that were chosen, by branch.
        self._chosen: dict[str, tuple[int, dict[str, Tensor]]] = {}
        inner, low, high = self._inner, self.search.cf_min, self.search.cf_candidate
        self._minimum = inner.with_cf(low)
        self._candidate: Compressor = inner.with_cf(high)
        if isinstance(self._minimum, Selecting):
            self._candidate = MultiLevel(self._minimum, keep=1 / high)
        self._candidate_keep = 1 / high
        if not self.waits:
            self._branch = self.search.branch()

    # With exact=True all gradients are looked at first, and then sent. Otherwise each is looked at
    # when it is there, and sent by what the steps before have shown.

    def look(self, name: str, target: Tensor, draw: Draw) -> None:
        self._measure(name, target, draw)

    def looked(self) -> list[float]:
        return self._seen.sums()

    def decide(self, sums: Sequence[float]) -> None:
        self._average(sums)
        self._branch = self.search.branch()

    def observe(self, name: str, target: Tensor, gradient: Tensor, draw: Draw) -> None:
        if not self.waits:
            self._measure(name, target, draw)

    def codec(self, name: str) -> Codec:
        if self._branch == "dense":
            return None
        return self._minimum if self._branch == "minimum" else self._candidate

    def encode(self, name: str, x: Tensor, coding: Coding) -> Encoded:
        numel, chosen = self._chosen.pop(name, (0, {}))
        if numel != x.numel() or not isinstance(coding.compressor, Selecting):
            return coding.encode(x)  # a piece of the parameter, or not a selection
        return coding.take(x, chosen[self._branch])

    def _measure(self, name: str, target: Tensor, draw: Draw) -> None:
        """Adds the energies of one parameter, and keeps the positions that will be sent."""
        seen, generator = self._seen, draw(self._minimum.shares_choice)
        energy = _energy(target)
        seen.target += energy
        if not isinstance(self._minimum, Selecting):
            seen.rest_min += _rest(self._minimum, target, draw)
            if self._minimum != self._candidate:
                seen.rest_candidate += _rest(self._candidate, target, draw)
            return
        positions = levels(self._minimum, self._candidate_keep, target, generator)
        kept: dict[str, Tensor] = dict(zip(("minimum", "candidate"), positions, strict=True))
        rests = [self._rest_of_selection(target, energy, at) for at in positions]
        seen.rest_min += rests[0]
        seen.rest_candidate += rests[1]
        if self.waits or self._branch != "dense":
            if not self.waits:
                kept = {self._branch: kept[self._branch]}
            self._chosen[name] = target.numel(), kept

    def _rest_of_selection(self, target: Tensor, energy: Tensor, positions: Tensor) -> Tensor:
        """The energy that a selection leaves out, the error of its values included."""
        assert isinstance(self._minimum, Selecting)
        values = target.index_select(0, positions)
        rest = energy - _energy(values)
        coder = self._minimum.values
        if coder is None or not values.numel():
            return rest
        row = values.reshape(1, -1)
        coded = coder.decompress(coder.compress(row), TensorMeta.of(row))
        return rest + _energy((row - coded).reshape(-1))

    def figures(self) -> list[float]:
        # Read here, before ranks wait for each other: a lap is this rank's own time.
        lap = math.nan if self._modelled else self.clock.lap(0.0, 0)
        known = math.isfinite(lap)
        return [1.0, float(known), lap if known else 0.0, *self._seen.sums()]

    def end(self, sums: Sequence[float], *, finite: bool, traffic_bytes: float) -> None:
        ranks, laps, seconds, *energies = sums
        if energies[0] == 0:  # nothing was compressed, as the step was to go dense
            self._branch = "dense"
        if self._modelled:
            lap = self.clock.lap(traffic_bytes, self._rounds)
        else:
            lap = seconds / laps if laps == ranks else math.nan
        self._last = {"branch": self._branch, "cf": self.search.cf_of(self._branch)}
        if finite:
            if not self.waits:
                self._average(energies)
            if 0 < lap < math.inf:  # of one replica alone a modelled step takes no time
                self.search.record(self._branch, lap)
                self._last["throughput"] = self._gain() / lap
        self._last["gain"] = self._gain()
        self.search.end_step()
        self._chosen.clear()

    def _average(self, energies: Sequence[float]) -> None:
        target, rest_min, rest_candidate = energies
        if target > 0 and all(map(math.isfinite, energies)):
            self.search.average(*(max(0.0, 1 - r / target) for r in (rest_min, rest_candidate)))

    def _gain(self) -> float:
        """The average gain of what was sent."""
        search = self.search
        gains = {"minimum": search.gain_min, "candidate": search.gain_candidate}
        gain = gains.get(self._branch, 1.0)
        return math.nan if gain is None else gain

    def report(self) -> dict[str, Any]:
        search = self.search
        return {
            **self._last,
            "cf_min": search.cf_min,
            "cf_candidate": search.cf_candidate,
            "gain_min": search.gain_min,
            "gain_candidate": search.gain_candidate,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.search.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.search.load_state_dict(state)


def _energy(x: Tensor) -> Tensor:
    """||x||^2, summed up in fp32 and added up in fp64."""
    return torch.dot(x, x).double()


def _rest(compressor: Compressor, target: Tensor, draw: Draw) -> Tensor:
    """||x - C(x)||^2 of a method that does not select."""
    row = target.reshape(1, -1)
    coding = Coding(compressor, TensorMeta.of(row), partial(draw, compressor.shares_choice))
    return _energy(coding.encode(row).without(target))
