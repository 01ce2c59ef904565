"""GraVAC at work: measures the gains of two compression factors in every step, and sends by one.

Both levels are selected in one pass (the second among the survivors of the first), also in steps
that go dense, as else the way back would not be found. What `Search` is gathered are sums over all
ranks: energies of all parameters, and seconds; so every rank of a whole pipeline decides alike,
however its own gradients and its own clock differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcomp.adaptive.clock import Clock
from mpcomp.adaptive.search import Branch, Search
from mpcomp.compressors import Compressor, MultiLevel, Selecting
from mpcomp.compressors.coding import Coding, Encoded
from mpcomp.compressors.multi_level import levels
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.base import Codec, Controller, Draw

__all__ = ["GraVACController"]


@dataclass
class _Seen:
    """Energies of one step, fp64: of what was wanted, and of what each level leaves out."""

    wanted: Tensor | float = 0.0
    rest_min: Tensor | float = 0.0
    rest_candidate: Tensor | float = 0.0

    def sums(self) -> list[float]:
        """The energies as numbers (from an accelerator this waits)."""
        return [float(self.wanted), float(self.rest_min), float(self.rest_candidate)]


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

    def look(self, name: str, wanted: Tensor, draw: Draw) -> None:
        self._measure(name, wanted, draw)

    def looked(self) -> list[float]:
        return self._seen.sums()

    def decide(self, sums: Sequence[float]) -> None:
        self._average(sums)
        self._branch = self.search.branch()

    def observe(self, name: str, wanted: Tensor, gradient: Tensor, draw: Draw) -> None:
        if not self.waits:
            self._measure(name, wanted, draw)

    def codec(self, name: str) -> Codec:
        if self._branch == "dense":
            return None
        return self._minimum if self._branch == "minimum" else self._candidate

    def encode(self, name: str, x: Tensor, coding: Coding) -> Encoded:
        numel, chosen = self._chosen.pop(name, (0, {}))
        if numel != x.numel() or not isinstance(coding.compressor, Selecting):
            return coding.encode(x)  # a piece of the parameter, or not a selection
        return coding.take(x, chosen[self._branch])

    def _measure(self, name: str, wanted: Tensor, draw: Draw) -> None:
        """Adds the energies of one parameter, and keeps the positions that will be sent."""
        seen, generator = self._seen, draw(self._minimum.shares_choice)
        energy = _energy(wanted)
        seen.wanted += energy
        if not isinstance(self._minimum, Selecting):
            seen.rest_min += _rest(self._minimum, wanted, draw)
            if self._minimum != self._candidate:
                seen.rest_candidate += _rest(self._candidate, wanted, draw)
            return
        positions = levels(self._minimum, self._candidate_keep, wanted, generator)
        kept: dict[str, Tensor] = dict(zip(("minimum", "candidate"), positions, strict=True))
        rests = [self._rest_of_selection(wanted, energy, at) for at in positions]
        seen.rest_min += rests[0]
        seen.rest_candidate += rests[1]
        if self.waits or self._branch != "dense":
            if not self.waits:
                kept = {self._branch: kept[self._branch]}
            self._chosen[name] = wanted.numel(), kept

    def _rest_of_selection(self, wanted: Tensor, energy: Tensor, positions: Tensor) -> Tensor:
        """The energy that a selection leaves out, the error of its values included."""
        assert isinstance(self._minimum, Selecting)
        values = wanted.index_select(0, positions)
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
        wanted, rest_min, rest_candidate = energies
        if wanted > 0 and all(map(math.isfinite, energies)):
            self.search.average(*(max(0.0, 1 - r / wanted) for r in (rest_min, rest_candidate)))

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


def _rest(compressor: Compressor, wanted: Tensor, draw: Draw) -> Tensor:
    """||x - C(x)||^2 of a method that does not select."""
    row = wanted.reshape(1, -1)
    coding = Coding(compressor, TensorMeta.of(row), partial(draw, compressor.shares_choice))
    return _energy(coding.encode(row).without(wanted))
