"""The cuts where ``auto`` compresses and those where it sends bf16, by measurements of the run.

A run begins with what was chosen for its cuts. When its first steps have been timed, its links are
measured, or taken as given, and a step is simulated with bf16 at each cut
(`mpcomp.monitor.payoff.Simulation.where_it_pays`). Cuts at which compression does not pay change to
bf16. From then on ranks compare how long steps take; where that has changed, they look again::

    4 steps │ 32 steps, timed │ look │ 32 steps, timed │ as before: stay │ 32 steps │ other: look │

Every rank has the figures of all, and does the same with them. They are in checkpoints, with the
methods that were left.

A method that is taken up, or again, begins anew at both ends: its memories are empty.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from mpcomp.compressors import Cast
from mpcomp.core.context import Step
from mpcomp.core.spec import parse
from mpcomp.core.traffic import Traffic
from mpcomp.engines.base import Engine
from mpcomp.feedback import Feedback
from mpcomp.links.boundary import Boundary
from mpcomp.links.link import ACT, Link
from mpcomp.monitor.payoff import CutTimes, Simulation
from mpcomp.monitor.step_costs import step_costs
from mpcomp.plan import Coding, Messages
from mpcomp.plan.curve import rate_text, time_text

__all__ = ["BF16", "FIRST", "WINDOW", "Paying", "sends_bf16"]

#: What goes where compression does not pay.
BF16: Final = Cast("bf16")
#: Steps before the first that is timed: they compile, and make tables.
FIRST: Final = 4
#: Steps that are timed at once.
WINDOW: Final = 32
#: Times longer or shorter that steps must become for ranks to look again.
_CHANGED: Final = 1.25


class _Way(NamedTuple):
    """One direction of a cut, for one message, as it was when it was compressed.

    Attributes:
        method: that compresses it, as a spec.
        encode_s: seconds.
        decode_s: seconds.
        wire_bytes: of it.
        bf16_bytes: of it in bf16.
    """

    method: str
    encode_s: float
    decode_s: float
    wire_bytes: float
    bf16_bytes: float

    def sized(self, bf16_bytes: float) -> _Way:
        """The same for a message of another size."""
        factor = bf16_bytes / self.bf16_bytes if self.bf16_bytes else 1.0
        return _Way(self.method, *(factor * figure for figure in self[1:]))


class Paying:
    """Measurements of the cuts where ``auto`` chooses, and what follows from them.

    Args:
        engine: runs the stages.
        boundaries: the cuts.
        link: Mbit/s and latency in seconds of every cut; None measures them. In one process there
            is nothing to measure: then all stays as it is.
        warmup_steps: that go uncompressed at first.

    Attributes:
        reason: for bf16, where that goes.
    """

    def __init__(
        self,
        engine: Engine,
        boundaries: Sequence[Boundary],
        link: tuple[float, float] | None,
        warmup_steps: int,
    ) -> None:
        self._engine = engine
        self._boundaries = list(boundaries)
        self._link = link
        self._warmup_steps = warmup_steps
        self._looks = link is not None or engine.mesh.pp_size > 1
        self._ways: dict[str, _Way] = {}
        #: Seconds of a step when ranks looked last; None where they have not, or have changed.
        self._step_s: float | None = None
        self.reason = ""
        self._begin(FIRST)

    def _begin(self, wait: int = 0) -> None:
        """Begins a window after so many steps."""
        self._wait = wait
        self._steps = 0
        self._before: list[Traffic] = []

    def _links(self) -> list[Link]:
        """Links that may change: all where ``auto`` was asked, beside a method that permits it."""
        found = []
        for boundary in self._boundaries:
            named = boundary.act.method
            needs_grad = isinstance(named, Feedback) and named.looks_at_gradients
            if boundary.act.chosen or not needs_grad:
                found += [link for link in boundary.links if link.chosen]
        return found

    def after_step(self, step: Step, times: Sequence[tuple[float, float]]) -> bool:
        """Takes a training step into account; every rank calls it.

        Args:
            step: that has ended.
            times: of the last steps on this rank: seconds, and of these waiting.

        Returns:
            Whether a cut has changed its method.
        """
        if not (self._looks and self._links()):
            return False
        compressed = step.compress_act and step.compress_grad
        if not compressed or step.index < self._warmup_steps:
            self._begin(FIRST)
        elif self._wait:
            self._wait -= 1
        else:
            self._steps += 1
        if not self._before and not self._wait:  # this step's end is the beginning
            self._before = [
                replace(link.meter.train) for each in self._boundaries for link in each.links
            ]
            self._steps = 0
        if self._steps < WINDOW:
            return False
        found = self._gathered(times)
        self._begin()
        return self._look(found)

    def _gathered(self, times: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
        """Of each rank what it has counted and timed in the window."""
        links = [link for each in self._boundaries for link in each.links]
        since = [a.meter.train.since(b) for a, b in zip(links, self._before, strict=True)]
        seconds, waited = zip(*list(times)[-self._steps :], strict=True)
        own = {
            "links": [each.to_state() for each in since],
            "times": [
                statistics.median(seconds),
                statistics.median(waited),
                sum(each.seconds for each in since) / self._steps,
            ],
            "shares": self._engine.stage_shares(),
            "steps": self._steps,
        }
        return self._engine.mesh.all_gather_object(own, "figures of steps")

    def _look(self, found: Sequence[dict[str, Any]]) -> bool:
        """Decides by the figures of all ranks."""
        step_s = max(rank["times"][0] for rank in found)
        first = not self._ways
        if not first:
            known, self._step_s = self._step_s, self._step_s or step_s
            if known is None or max(step_s / known, known / step_s) < _CHANGED:
                return False
        count = len(self._boundaries)
        costs = step_costs(
            self._engine,
            found,
            [[rank["links"][i] for rank in found] for i in range(2 * count)],
            found[0]["steps"],
            self._probe,
        )
        if costs is None:
            return False
        cuts = self._as_compressed(costs.cuts)
        simulation = Simulation(
            costs.ranks, cuts, costs.chunks, self._engine.in_flight, self._engine.connections
        )
        able = self._links()
        others = [
            cut.in_bf16(*(link in able for link in boundary.links))
            for cut, boundary in zip(cuts, self._boundaries, strict=True)
        ]
        now = [
            not any(link.method == BF16 for link in boundary.links if link in able)
            for boundary in self._boundaries
        ]
        pays = simulation.where_it_pays(others, None if first else now)
        self._step_s = step_s if pays == now else None
        self._say(simulation, others, pays)
        for here, boundary in zip(pays, self._boundaries, strict=True):
            for link in boundary.links:
                if link in able:
                    method = parse(self._ways[_key(link)].method) if here else BF16
                    if method != link.method:
                        link.become(method, link.chosen)
        return pays != now

    def _probe(self) -> Sequence[tuple[float, float] | None]:
        if self._link is None:
            return self._engine.probe()
        rate, latency = self._link
        return [(rate, 2 * latency)] * len(self._boundaries)

    def _as_compressed(self, cuts: Sequence[CutTimes]) -> list[CutTimes]:
        """The cuts as they are, or were, when all are compressed; takes note of them."""
        able, compressed = self._links(), []
        for cut, boundary in zip(cuts, self._boundaries, strict=True):
            ways = []
            for link, coding, wire, bf16 in zip(
                boundary.links, (cut.coding[:2], cut.coding[2:]), cut.wire, cut.bf16, strict=True
            ):
                way = _Way(str(link.method), *coding, wire, bf16)
                if link in able and link.method == BF16:
                    way = self._ways[_key(link)].sized(bf16)
                elif link in able:
                    self._ways[_key(link)] = way
                ways.append(way)
            act, grad = ways
            compressed.append(
                replace(
                    cut,
                    coding=Coding(act.encode_s, act.decode_s, grad.encode_s, grad.decode_s),
                    wire=Messages(act.wire_bytes, grad.wire_bytes),
                )
            )
        return compressed

    def _say(self, simulation: Simulation, others: Sequence[Any], pays: Sequence[bool]) -> None:
        rates = simulation.network.link_mbps or ()
        rate = min((rate for rate, here in zip(rates, pays, strict=True) if not here), default=0.0)
        own, all_cuts = (
            time_text(simulation.at_cuts(at, others)) for at in (pays, [True] * len(pays))
        )
        self.reason = (
            f"compression does not pay at {rate_text(rate)}: a step takes {own}, and {all_cuts} "
            "with all cuts compressed"
        )

    # -- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Measurements, as JSON holds them; the same on all ranks."""
        return {
            "step_s": self._step_s,
            "ways": {key: way._asdict() for key, way in self._ways.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`, or from nothing; links have their methods of then."""
        own = {_key(link) for link in self._links()}
        self._ways = {k: _Way(**way) for k, way in state.get("ways", {}).items() if k in own}
        self._step_s = state.get("step_s") if self._ways else None
        self.reason = "as in the checkpoint"
        self._begin(FIRST)


def sends_bf16(link: Link) -> bool:
    """Whether ``auto`` sends bf16 over a link."""
    return bool(link.chosen) and link.method == BF16


def _key(link: Link) -> str:
    return f"{link.boundary}.{'act' if link.direction == ACT else 'grad'}"
