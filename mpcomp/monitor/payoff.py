"""The pay-off of compression: a run's own step, simulated with and without it.

What stages compute, what cuts code and send, and how fast the links are has been measured while the
run went on. With that a step is simulated (`mpcomp.plan`) as it is, as it would be with bf16 at the
cuts, and as it would be without any compression. Simulated times are compared with each other, so
that what a simulation leaves out (the engine's own work, a busy machine) is in both.

One process has no links to be slow. There the question is on which links the same stages, each on
a machine like this one, would gain by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from mpcomp.plan import Coding, Compute, CutCost, Messages, Network, predict
from mpcomp.plan.curve import (
    LONGEST,
    RATES,
    WORTHWHILE,
    break_even_mbps,
    rate_text,
    time_text,
)
from mpcomp.plan.network import FIRST_WINDOW
from mpcomp.plan.planner import at_rate

__all__ = ["CutTimes", "PayOff", "RankTimes", "Simulation"]

#: What a step has to be times shorter by another choice, for a run to change to that.
_CHANGES: Final = 1.05
#: A backward takes about twice as long as its forward.
_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one step on one rank, on average.

    Attributes:
        step_s: from call to return.
        waited_s: of these, waiting for messages.
        coding_s: of these, encoding and decoding.
        last_share: of its computing, the last stage's, if it has that beside the first.
    """

    step_s: float
    waited_s: float
    coding_s: float
    last_share: float = 0.0

    @property
    def computed_s(self) -> float:
        """Seconds of computing; clocks overlap a little, but no time is below 0."""
        return max(0.0, self.step_s - self.waited_s - self.coding_s)


@dataclass(frozen=True)
class CutTimes:
    """One cut of one step.

    Attributes:
        coding: of a microbatch, seconds.
        wire: bytes of a microbatch's messages.
        dense: what they would be uncompressed.
        bf16: what they would be in bf16, or dense where that is less.
        link: (Mbit/s, round trip in seconds) as measured; None where it is not known.
    """

    coding: Coding
    wire: Messages
    dense: Messages
    bf16: Messages
    link: tuple[float, float] | None

    def in_bf16(self, act: bool = True, grad: bool = True) -> CutCost:
        """The cost where activations, gradients or both go in bf16, which is hardly coded."""
        coding, wire, bf16 = self.coding, self.wire, self.bf16
        return CutCost(
            Coding(
                *((0.0, 0.0) if act else coding[:2]),
                *((0.0, 0.0) if grad else coding[2:]),
            ),
            Messages(
                bf16.act_bytes if act else wire.act_bytes,
                bf16.grad_bytes if grad else wire.grad_bytes,
            ),
        )


@dataclass(frozen=True)
class PayOff:
    """Time and bytes of a step, with compression and without.

    Attributes:
        step_s: measured, the slowest rank's.
        busy_s: computing and coding of the busiest rank.
        coding_s: the most that a rank spends encoding and decoding; of one process, all of it.
        wire_bytes: of the busiest link in one direction.
        dense_bytes: what that link would carry uncompressed.
        bandwidth_mbps: of the slowest link, measured; None if unknown.
        uncompressed_step_s: what a step without compression would take; None if the bandwidth is
            unknown.
        bf16_step_s: what a step that sends bf16 would take; None likewise.
        break_even_mbps: bandwidth above which compression gains nothing over bf16; None if that is
            above all rates that occur, or the pipeline is too long to simulate at all of them.
        in_one_process: whether the stages have only been simulated as on machines of their own.
    """

    step_s: float
    busy_s: float
    coding_s: float
    wire_bytes: float
    dense_bytes: float
    bandwidth_mbps: float | None
    uncompressed_step_s: float | None
    bf16_step_s: float | None
    break_even_mbps: float | None
    in_one_process: bool = False

    @classmethod
    def of(
        cls,
        ranks: Sequence[RankTimes],
        cuts: Sequence[CutTimes],
        *,
        chunks: int,
        in_flight: int | None = None,
        connections: int = 1,
        alone_s: float | None = None,
    ) -> PayOff:
        """The estimate.

        Args:
            ranks: in order, a stage on each.
            cuts: between them; as many as ranks where the first has the last stage, too.
            chunks: microbatches of a step.
            in_flight: microbatches under way on the first stage.
            connections: of each link, each way.
            alone_s: seconds of a step where all stages are in one process.
        """
        step = alone_s or max(times.step_s for times in ranks)
        # Dense bytes and those on the wire of the direction that has most to carry.
        busiest = max(pair for cut in cuts for pair in zip(cut.dense, cut.wire, strict=True))
        rates = [cut.link[0] for cut in cuts if cut.link is not None]
        simulation = Simulation(ranks, cuts, chunks, in_flight, connections)
        dense = bf16 = None
        if rates:
            own = simulation.seconds(simulation.network, simulation.compressed)
            dense, bf16 = (
                step * simulation.seconds(simulation.network, sent) / own
                for sent in (simulation.dense, simulation.bf16)
            )
        return cls(
            step_s=step,
            busy_s=max(times.step_s - times.waited_s for times in ranks),
            coding_s=(max if alone_s is None else sum)(times.coding_s for times in ranks),
            wire_bytes=chunks * busiest[1],
            dense_bytes=chunks * busiest[0],
            bandwidth_mbps=min(rates) if rates else None,
            uncompressed_step_s=dense,
            bf16_step_s=bf16,
            break_even_mbps=simulation.break_even_mbps(),
            in_one_process=alone_s is not None,
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures under their names."""
        return asdict(self)

    def summary(self) -> list[str]:
        """Sentences for a reader."""
        lines = [
            f"a step takes {time_text(self.step_s)}, of which {time_text(self.coding_s)} go into "
            f"coding; the busiest link carries {self.wire_bytes / 1e6:.3f} MB a step one way, "
            f"{self.dense_bytes / 1e6:.3f} MB dense"
        ]
        if self.in_one_process:
            lines += self._of_machines()
        if self.bandwidth_mbps is None:
            return lines
        assert self.uncompressed_step_s is not None and self.bf16_step_s is not None
        verdict = "compression pays" if self.bf16_step_s > self.step_s else "it does not pay"
        above = self.break_even_mbps
        lines.append(
            f"at the measured {rate_text(self.bandwidth_mbps)} a step without compression would "
            f"take {time_text(self.uncompressed_step_s)} "
            f"({self.uncompressed_step_s / self.step_s:.2f} times as long), "
            f"with bf16 at the cuts {time_text(self.bf16_step_s)} "
            f"({self.bf16_step_s / self.step_s:.2f} times): {verdict}"
            + ("" if above is None else f"; it gains nothing on links above {rate_text(above)}")
        )
        return lines

    def _of_machines(self) -> list[str]:
        """A sentence on the same stages on machines of their own, where it is known."""
        above = self.break_even_mbps
        if above is None:
            return []
        gains = f"links below {rate_text(above)}" if above else "no link"
        return [
            "in one process no link is slow; with each stage on a machine like this one this "
            f"compression gains over bf16 at the cuts on {gains}"
        ]


class Simulation:
    """A run's step, to be simulated with other messages and on other links."""

    def __init__(
        self,
        ranks: Sequence[RankTimes],
        cuts: Sequence[CutTimes],
        chunks: int,
        in_flight: int | None,
        connections: int = 1,
    ) -> None:
        self._chunks, self._in_flight = chunks, in_flight
        seconds = [(1 - times.last_share) * times.computed_s for times in ranks]
        if len(cuts) == len(ranks):
            seconds.append(ranks[0].last_share * ranks[0].computed_s)
        self._compute = [
            Compute(_FORWARD_SHARE * each / chunks, (1 - _FORWARD_SHARE) * each / chunks)
            for each in seconds
        ]
        self.compressed = [CutCost(cut.coding, cut.wire) for cut in cuts]
        self.dense = [CutCost(Coding(), cut.dense) for cut in cuts]
        self.bf16 = [cut.in_bf16() for cut in cuts]
        links = [cut.link or (math.inf, 0.0) for cut in cuts]
        rates = [rate for rate, _ in links]
        # A host can do what its faster link can; both share that.
        between, around = rates[: len(ranks) - 1], max(rates[len(ranks) - 1 :], default=0.0)
        ways = zip([around, *between], [*between, around], strict=True)
        self.network = Network(
            host_mbps=tuple(max(both) for both in ways),
            latency_s=tuple(round_trip / 2 for _, round_trip in links),
            link_mbps=tuple(rates),
            window_bytes=FIRST_WINDOW,
            connections=connections,
        )

    def seconds(self, network: Network, cuts: Sequence[CutCost]) -> float:
        return predict(
            self._compute, cuts, network, chunks=self._chunks, in_flight=self._in_flight
        ).step_s

    def at_cuts(self, pays: Sequence[bool], others: Sequence[CutCost]) -> float:
        """Seconds of a step that is compressed at the cuts where it pays.

        Args:
            pays: of each cut.
            others: costs of the cuts where nothing is compressed.
        """
        each = zip(pays, self.compressed, others, strict=True)
        return self.seconds(self.network, [own if here else other for here, own, other in each])

    def where_it_pays(
        self, others: Sequence[CutCost], now: Sequence[bool] | None = None
    ) -> list[bool]:
        """Of each cut whether compression pays there.

        One cut after the other goes without, the one with the fastest link first, unless the step
        then is worthwhile longer; and all of them do where that is no worse.

        Args:
            others: costs of the cuts where nothing is compressed.
            now: of a run that has chosen: it changes only for what is well worth it.
        """
        count = len(others)
        pays = [True] * count
        least = self.at_cuts(pays, others)
        rates = self.network.link_mbps or ()
        tried = [{cut} for cut in sorted(range(count), key=lambda cut: -rates[cut])]
        for cuts in [
            *(tried if len(self._compute) * self._chunks <= LONGEST else []),
            set(range(count)),
        ]:
            without = [here and cut not in cuts for cut, here in enumerate(pays)]
            seconds = self.at_cuts(without, others)
            if seconds <= WORTHWHILE * least:
                pays, least = without, min(least, seconds)
        if now is not None and _CHANGES * self.at_cuts(pays, others) > self.at_cuts(now, others):
            return list(now)
        return pays

    def break_even_mbps(self) -> float | None:
        if len(self._compute) * self._chunks > LONGEST:
            return None
        networks = [at_rate(self.network, rate) for rate in RATES]
        own, bf16 = (
            [self.seconds(network, cuts) for network in networks]
            for cuts in (self.compressed, self.bf16)
        )
        found = break_even_mbps(own, bf16)
        return found if math.isfinite(found) else None
