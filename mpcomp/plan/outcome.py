"""The outcome of a plan: its rows, what it recommends, and why, for programs and for readers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from mpcomp.comm.connections import CONNECTIONS
from mpcomp.core.sent import below_bf16_text
from mpcomp.plan.curve import LONGEST, RATES, break_even_mbps, rate_text, step_times, time_text
from mpcomp.plan.known_quality import UNITS
from mpcomp.plan.planner import BASELINE, DENSE, Pair, PlannedStep, Planner
from mpcomp.plan.replica_cost import ReplicaCost

__all__ = ["Outcome", "plan"]

#: Times faster than bf16 that a setting has to be, to be recommended.
RECOMMENDED = 1.05
#: Within a call, where the pipeline need not drain between them.
UPDATES = 16


@dataclass(frozen=True)
class Outcome:
    """A plan that has been made.

    Attributes:
        steps: of every pair of methods, the uncompressed ones first.
        best: what to start with.
        floor: that its loss of quality is below, in `UNITS`.
        task: in `known_quality.TASKS`.
        times: of every step at each of `RATES`; None of a step that takes too long to simulate.
        replicas: what methods between replicas cost, if any were asked for.
        striped_s: seconds of the best step over `CONNECTIONS`; None where they gain less than is
            `RECOMMENDED`, links have several as it is, or a step takes too long to simulate.
        asynchronous_s: seconds of the best step with `UPDATES` in a call; None likewise, or where
            ranks must wait for tied weights or replicas.
    """

    steps: tuple[PlannedStep, ...]
    best: PlannedStep
    floor: float
    task: str
    times: tuple[tuple[float, ...], ...] | None
    replicas: tuple[ReplicaCost, ...]
    striped_s: float | None
    asynchronous_s: float | None

    @property
    def baseline(self) -> PlannedStep:
        """The step that sends bf16."""
        return next(step for step in self.steps if step.pair == BASELINE)

    @property
    def compresses(self) -> bool:
        """Whether it is worth while to send less than bf16."""
        return self.best.pair not in (DENSE, BASELINE)

    def break_even(self, step: PlannedStep) -> float | None:
        """Mbit/s above which a step gains nothing over bf16; None where that is not known."""
        if self.times is None:
            return None
        of = dict(zip((each.pair for each in self.steps), self.times, strict=True))
        return break_even_mbps(of[step.pair], of[BASELINE])

    def to_dict(self) -> dict[str, Any]:
        """All figures under their names, as JSON can hold them."""
        return {
            "recommended": {
                "act": self.best.pair[0],
                "grad": self.best.pair[1],
                "split": list(self.best.counts),
                "compress": self.compresses,
                "ties": self.best.uses,
                "connections": None if self.striped_s is None else CONNECTIONS,
                "step_s_over_connections": self.striped_s,
                "updates": None if self.asynchronous_s is None else UPDATES,
                "step_s_with_updates": self.asynchronous_s,
                "says": self.summary(),
            },
            "task": self.task,
            "floor": self.floor,
            "unit": UNITS[self.task],
            "least_gain": RECOMMENDED,
            "steps": [self._row(step) for step in self.steps],
            "rates_mbps": list(RATES),
            "timelines": [self._spans(step) for step in self.steps],
            "replicas": [{**asdict(one), "below_bf16": one.below_bf16} for one in self.replicas],
        }

    def _row(self, step: PlannedStep) -> dict[str, Any]:
        even = self.break_even(step)
        known = step.known
        times = None if self.times is None else list(self.times[self.steps.index(step)])
        return {
            "act": step.pair[0],
            "grad": step.pair[1],
            "split": list(step.counts),
            "step_s": step.step_s,
            "exchange_s": step.exchange_s,
            "bubble": step.prediction.timeline.bubble,
            "wire_bytes": step.wire_bytes,
            "tie_comp": step.tie_comp,
            "tie_bytes": step.tie_bytes,
            "tie_s": step.tie_s,
            "dense_bytes": step.account.cuts.dense_bytes,
            "step_bytes": step.account.whole.wire_bytes,
            "below_bf16": step.account.below_bf16,
            "cuts_below_bf16": step.account.cuts.below_bf16,
            "times_faster_than_bf16": self.baseline.step_s / step.step_s,
            "coding_s": [sum(cut.coding) for cut in step.cuts],
            "state_bytes": step.state_bytes,
            # JSON knows no infinity.
            "break_even_mbps": None if even is None or math.isinf(even) else even,
            "gains_at_any_rate": None if even is None else math.isinf(even),
            "loss": None if known is None else known.loss,
            "loss_half_width": None if known is None else known.half_width,
            "known_from": None if known is None else known.study or None,
            "step_s_at_rates": times,
        }

    def _spans(self, step: PlannedStep) -> list[list[Any]] | None:
        """A step's work as [stage, kind, microbatch, start, end]; None of more than can be seen."""
        spans = step.prediction.timeline.spans
        if len(spans) > 2 * LONGEST:
            return None
        return [[*span[:3], round(span.start_s, 6), round(span.end_s, 6)] for span in spans]

    def table(self) -> str:
        """The table of all methods."""
        headers = (
            *(
                "activations / gradients",
                "s a step",
                "x bf16",
                "x none",
                "MB a step",
                "below bf16",
            ),
            *(
                "MB at cuts",
                "cuts alone",
                "MB tied",
                "bubble",
                "state MB",
                f"costs, {UNITS[self.task]}",
                "pays below",
            ),
        )
        dense = next((step for step in self.steps if step.pair == DENSE), self.baseline)
        rows = []
        for step in self.steps:
            rows.append(
                [
                    f"{'* ' if step is self.best else ''}{_pair(step.pair)}",
                    time_text(step.step_s),
                    f"{self.baseline.step_s / step.step_s:.2f}",
                    f"{dense.step_s / step.step_s:.2f}",
                    f"{step.account.whole.wire_bytes / 1e6:.2f}",
                    below_bf16_text(step.account.below_bf16),
                    f"{step.wire_bytes / 1e6:.2f}",
                    below_bf16_text(step.account.cuts.below_bf16),
                    f"{step.tie_bytes / 1e6:.2f}",
                    f"{step.prediction.timeline.bubble:.0%}",
                    "by samples" if step.state_bytes is None else f"{step.state_bytes / 1e6:.1f}",
                    _loss(step),
                    self._pays(step),
                ]
            )
        return tabulate(rows, headers, disable_numparse=True)

    def _pays(self, step: PlannedStep) -> str:
        even = self.break_even(step)
        if even is None or step.pair in (DENSE, BASELINE):
            return ""
        if math.isinf(even):
            return "any rate"
        return rate_text(even) if even else "no rate"

    def replica_table(self) -> str:
        """The table of methods between replicas."""
        headers = ("between replicas", "MB a step", "below bf16", "coding", "on the links")
        rows = [
            [
                one.method,
                f"{one.wire_bytes / 1e6:.2f}",
                below_bf16_text(one.below_bf16),
                time_text(one.coding_s),
                time_text(one.link_s),
            ]
            for one in self.replicas
        ]
        return tabulate(rows, headers, disable_numparse=True)

    def summary(self) -> list[str]:
        """Sentences for a reader: what to do."""
        best, base = self.best, self.baseline
        gain = base.step_s / best.step_s
        split = ",".join(map(str, best.counts)) if len(best.counts) <= 16 else "as the JSON says"
        if not self.compresses:
            name = "as it is" if best.pair == DENSE else "in bf16"
            lines = [
                f"do not compress: within {self.floor:g} {UNITS[self.task]} nothing is more than "
                f"{RECOMMENDED - 1:.0%} faster here than to send {name} "
                f"({time_text(best.step_s)} a step)"
            ]
        else:
            known = best.known
            assert known is not None
            lines = [
                f"start with act_comp={best.pair[0]!r}, grad_comp={best.pair[1]!r}"
                f"{f', tie_comp={best.tie_comp!r}' if best.ties else ''}: "
                f"{time_text(best.step_s)} a step, {gain:.2f} times less than bf16 takes",
                f"it cost {_loss(best)} {UNITS[self.task]} in the project's own study "
                f"({known.study}, n = {known.n}); look at both evaluations of your own run",
            ]
        if best.uses == "together":
            lines.append(
                "ties='together', as by default: the first machine has the last stage as well, and "
                "the tied weight once; nothing is exchanged, and one cut more leads back to it"
            )
        elif best.uses == "apart":
            lines.append(
                "ties='apart': two machines have copies of the tied weight, and exchange "
                f"{best.tie_bytes / 1e6:.2f} MB of its gradients a step"
            )
        if self.striped_s is not None:
            lines.append(
                f"with connections={CONNECTIONS} it takes {time_text(self.striped_s)}, "
                f"{best.step_s / self.striped_s:.2f} times less: TCP begins a step with small "
                "windows"
            )
        if self.asynchronous_s is not None:
            lines.append(
                f"asynchronously, with updates={UPDATES} in a call of forward_backward, it takes "
                f"{time_text(self.asynchronous_s)}, {best.step_s / self.asynchronous_s:.2f} times "
                "less: no rank waits for the last gradient, but weights lack some updates, which "
                "takes another optimizer (docs/guide/asynchronous.md)"
            )
        lines += best.account.summary()
        return [*lines, f"split=[{split}]" if len(best.counts) <= 16 else f"split: {split}"]


def plan(
    planner: Planner,
    pairs: Sequence[Pair],
    *,
    task: str,
    floor: float,
    replicas: Sequence[ReplicaCost] = (),
) -> Outcome:
    """Plans steps with all pairs of methods.

    Args:
        planner: of the model and the hosts.
        pairs: of methods; bf16 is added, as it is what others are compared with.
        task: in `known_quality.TASKS`.
        floor: the most that what is recommended may have cost in quality, in `UNITS`.
        replicas: costs of methods between them.

    Raises:
        ValueError: no such methods, or two that do not go together.
    """
    wanted = list(dict.fromkeys([DENSE, BASELINE, *pairs]))
    steps = tuple(planner.step(pair) for pair in wanted)
    size = len(planner.network.host_mbps) * planner.chunks
    times = striped_s = asynchronous_s = None
    if size <= LONGEST:
        times = tuple(tuple(each) for each in step_times(planner, steps))
    allowed = [step for step in steps if step.known is not None and step.known.loss <= floor]
    uncompressed = [step for step in steps if step.pair in (DENSE, BASELINE)]
    least = min(uncompressed, key=lambda step: step.step_s)
    best = min(allowed, key=lambda step: step.step_s)
    if least.step_s < RECOMMENDED * best.step_s:
        best = least
    network = planner.network
    waits = network.connections == 1 and math.isfinite(network.window_bytes)
    if size <= LONGEST and waits and any(network.latency_s):
        seconds = planner.on(dataclasses.replace(network, connections=CONNECTIONS), best)
        striped_s = seconds if RECOMMENDED * seconds < best.step_s else None
    # Where a weight is used by the first stage and the last, such steps did not learn as measured.
    if size * UPDATES <= LONGEST and not replicas and best.uses != "together":
        found = planner.asynchronous_s(best, UPDATES)
        gains = found is not None and RECOMMENDED * found < best.step_s
        asynchronous_s = found if gains else None
    return Outcome(steps, best, floor, task, times, tuple(replicas), striped_s, asynchronous_s)


def _pair(pair: Pair) -> str:
    return pair[0] if pair[0] == pair[1] else f"{pair[0]} / {pair[1]}"


def _loss(step: PlannedStep) -> str:
    if step.known is None:
        return "unknown"
    if not step.known.study:
        return "0"
    digits = 0 if step.known.loss >= 10 else 1
    half = step.known.half_width
    return f"{step.known.loss:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")
