"""The report of a pipeline: one row per boundary and direction, as a dict and as a table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from mpcomp.meters import Traffic
from mpcomp.payoff import Payoff, RankTimes

if TYPE_CHECKING:
    from mpcomp.pipe import Pipeline

__all__ = ["print_report", "report_of"]

_PHASES = {"train": "train", "eval": "eval", "eval_off": "eval, off"}
_DIRECTIONS = {
    "act": "activation ->",
    "grad": "gradient <-",
    "tie_first": "tied gradient ->",
    "tie_last": "tied gradient <-",
}


def report_of(pipe: Pipeline) -> dict[str, Any]:
    """All figures under their names; training and evaluation apart. Every rank calls it."""
    engine = pipe.engine
    own = {
        "links": [{p: t.to_state() for p, t in link.meter.phases.items()} for link in pipe.links],
        "times": _times_of(pipe),
    }
    found = engine.collect(own)
    boundaries: list[dict[str, Any]] = []
    after = [stage.block_names[-1] for stage in pipe.cut_stages[:-1]]
    after += [tie.name for tie in pipe.ties]  # numbered on, as if they were cuts
    for i, link in enumerate(pipe.links):
        states = [rank["links"][i] for rank in found]
        merged = {phase: Traffic.merged(s[phase] for s in states) for phase in _PHASES}
        boundaries.append(
            {
                "boundary": link.boundary,
                "after": after[link.boundary],
                "direction": link.direction,
                "method": str(link.method),
                "on_wire": link.on_wire,
                **{phase: traffic.to_dict() for phase, traffic in merged.items()},
            }
        )
    return {
        "engine": engine.name,
        "ranks": engine.num_ranks,
        "in_flight": engine.in_flight,
        "steps": pipe.num_steps,
        "wire_bytes": pipe.wire_bytes,
        "dense_bytes": pipe.dense_bytes,
        "wire_ratio": pipe.wire_bytes / pipe.dense_bytes if pipe.dense_bytes else None,
        "boundaries": boundaries,
        "payoff": _payoff(pipe, boundaries, [rank["times"] for rank in found]),
    }


def _times_of(pipe: Pipeline) -> list[float] | None:
    if not pipe.step_times:
        return None
    coding = sum(link.meter.train.seconds for link in pipe.links)
    step = statistics.median(times[0] for times in pipe.step_times)
    busy = statistics.median(seconds - waited for seconds, waited in pipe.step_times)
    return [step, step - busy, coding / pipe.num_steps]


def _payoff(
    pipe: Pipeline, boundaries: list[dict[str, Any]], times: list[list[float] | None]
) -> dict[str, Any] | None:
    """Whether compression pays; None for one process, which has no links to be slow."""
    known = [RankTimes(*each) for each in times if each]
    sent = [entry["train"] for entry in boundaries if entry["train"]["wire_bytes"]]
    if pipe.engine.num_ranks == 1 or not known or not sent:
        return None
    steps = pipe.num_steps * pipe.num_replicas
    busiest = max(sent, key=lambda traffic: traffic["dense_bytes"])
    rates = [link[0] for link in pipe.engine.probe() if link is not None]
    payoff = Payoff.of(
        known,
        busiest["wire_bytes"] / steps,
        busiest["dense_bytes"] / steps,
        min(rates) if rates else None,
    )
    return {**payoff.to_dict(), "says": payoff.sentences()}


def print_report(report: dict[str, Any]) -> None:
    """Prints the table of a report: training, and evaluation where there was any."""
    headers = [
        "cut",
        "after",
        "direction",
        "method",
        "phase",
        "messages",
        "wire MB",
        "dense MB",
        "ratio",
        "rel. error",
        "cosine",
        "coding s",
        "non-finite",
    ]
    rows = []
    for entry in report["boundaries"]:
        for phase, shown in _PHASES.items():
            traffic = entry[phase]
            if traffic["messages"]:
                rows.append(
                    [
                        entry["boundary"],
                        entry["after"],
                        _DIRECTIONS[entry["direction"]],
                        entry["method"],
                        shown,
                        traffic["messages"],
                        f"{traffic['wire_bytes'] / 1e6:.2f}",
                        f"{traffic['dense_bytes'] / 1e6:.2f}",
                        f"{traffic['ratio']:.4f}",
                        f"{traffic['relative_error']:.4f}",
                        f"{traffic['cosine']:.4f}",
                        f"{traffic['seconds']:.2f}",
                        traffic["nonfinite"],
                    ]
                )
    print(tabulate(rows, headers, disable_numparse=True))
    if report["wire_ratio"] is not None:
        print(
            f"training sent {report['wire_bytes'] / 1e6:.2f} MB in {report['steps']} steps, "
            f"{report['wire_ratio']:.4f} of the {report['dense_bytes'] / 1e6:.2f} MB dense"
        )
    for sentence in (report["payoff"] or {}).get("says", []):
        print(sentence)
