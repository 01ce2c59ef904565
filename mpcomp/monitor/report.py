"""The report of a pipeline: one row per boundary and direction, as a dict and as a table.

The table compares with bf16, whatever dtypes a run has; the dict has the ratio to the tensors' own
dtype as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from mpcomp.core.account import Account
from mpcomp.core.sent import Sent, below_bf16_text
from mpcomp.core.traffic import AMOUNTS, LAGS, SECONDS, Traffic
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.engines.base import Engine
from mpcomp.links.adaptation import Adaptation
from mpcomp.links.link import Link
from mpcomp.links.tied_weights import TiedWeights
from mpcomp.monitor.payoff import PayOff
from mpcomp.monitor.step_costs import step_costs
from stages import Stage

__all__ = ["names_of_crossings", "print_report", "report_of"]

_PHASES = {"train": "train", "eval": "eval", "eval_off": "eval, off"}
_DIRECTIONS = {
    "act": "activation ->",
    "grad": "gradient <-",
    "tie_first": "tied gradient ->",
    "tie_last": "tied gradient <-",
}


def names_of_crossings(cut: Sequence[Stage], ties: Sequence[TiedWeights]) -> list[str]:
    """Of each cut the block before it, then of each tied weight its name.

    Ties are numbered on, as if they were cuts.
    """
    return [*(stage.block_names[-1] for stage in cut[:-1]), *(tie.name for tie in ties)]


def report_of(
    engine: Engine,
    links: Sequence[Link],
    *,
    after: Sequence[str],
    adaptation: Adaptation,
    exchange: Exchange | None,
    step_times: Sequence[tuple[float, float]],
    num_steps: int,
    account: Account,
    of_step: Account,
    chosen: str,
) -> dict[str, Any]:
    """All figures under their names; training and evaluation apart. Every rank calls it.

    Args:
        engine: runs the stages.
        links: all links of the pipeline.
        after: see `names_of_crossings`.
        adaptation: of the adaptive links.
        exchange: of the replicas' gradients, if they are compressed.
        step_times: of the last steps on this rank: seconds, and of these waiting for messages.
        num_steps: training steps so far.
        account: of all training so far, of all ranks.
        of_step: the mean of a step.
        chosen: what ``auto`` is, in a sentence.
    """
    mesh = engine.mesh
    own = {
        "links": [{p: t.to_state() for p, t in link.meter.phases.items()} for link in links],
        "times": _times_of(links, step_times, num_steps),
        "replicas": _replicas_of(exchange),
        "shares": engine.stage_shares(),
    }
    found = mesh.all_gather_object(own)
    boundaries: list[dict[str, Any]] = []
    for i, link in enumerate(links):
        states = [rank["links"][i] for rank in found]
        merged = {phase: Traffic.merged(s[phase] for s in states) for phase in _PHASES}
        boundaries.append(
            {
                "boundary": link.boundary,
                "after": after[link.boundary],
                "direction": link.direction,
                "method": str(link.method),
                "adaptive": adaptation.report(link),
                "on_wire": link.on_wire,
                **{phase: traffic.to_dict() for phase, traffic in merged.items()},
            }
        )
    sent = account.whole
    return {
        "engine": engine.name,
        "ranks": mesh.num_ranks,
        "in_flight": engine.in_flight,
        "steps": num_steps,
        **sent.to_dict(),
        "wire_ratio": sent.wire_ratio if sent.dense_bytes else None,
        "below_bf16": sent.below_bf16,
        "step": {**of_step.to_dict(), "says": of_step.summary()},
        "auto": chosen,
        "boundaries": boundaries,
        "replicas": _replicas([rank["replicas"] for rank in found]),
        "payoff": _payoff(engine, boundaries, found, num_steps),
    }


def _replicas_of(exchange: Exchange | None) -> dict[str, Any] | None:
    """This rank's totals of the exchange with its replicas; elements of what may be compressed."""
    if exchange is None:
        return None
    return {"num_compressible": exchange.num_compressible, **exchange.report()}


def _replicas(ranks: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The exchange between replicas, from the figures of all ranks; None where there is none."""
    known = [rank for rank in ranks if rank is not None]
    if not known:
        return None
    # The method's own figures are the same on all ranks, or are those of a rank's stages.
    derived = ("num_compressible", "ratio", "below_bf16")
    figures = {k: v for k, v in known[0].items() if k not in derived}
    for name in AMOUNTS:
        figures[name] = sum(rank[name] for rank in known)
    for name in SECONDS:
        figures[name] = max(rank[name] for rank in known)
    num_replicas = figures["replicas"]
    figures["traffic_bytes_per_replica"] = figures["traffic_bytes"] / num_replicas
    sent = Sent.from_dict(figures)
    figures["ratio"] = sent.wire_ratio if figures["steps"] else None
    figures["below_bf16"] = sent.below_bf16
    figures["num_elements"] = sent.to_dict()["num_elements"]
    for name in ("density", "critical"):  # of each rank's elements
        weighed = [
            (rank[name], rank["num_compressible"])
            for rank in known
            if math.isfinite(rank.get(name, math.nan))
        ]
        total = sum(count for _, count in weighed)
        if total:
            figures[name] = sum(value * count for value, count in weighed) / total
    if not math.isfinite(figures["density"]):
        figures["density"] = None  # nothing has been looked at yet
    if "parameters" in figures:
        each = [rank["parameters"] for rank in known]
        figures["parameters"] = {
            name: (max if name in ("gathers", "seconds") else sum)(one[name] for one in each)
            for name in each[0]
        }
    paths: dict[str, int] = {}
    for rank in known:
        for path, count in rank["paths"].items():
            paths[path] = paths.get(path, 0) + count
    figures["paths"] = {path: count // num_replicas for path, count in sorted(paths.items())}
    return figures


def _times_of(
    links: Sequence[Link], step_times: Sequence[tuple[float, float]], num_steps: int
) -> list[float] | None:
    if not step_times:
        return None
    coding = sum(link.meter.train.seconds for link in links)
    step = statistics.median(times[0] for times in step_times)
    busy = statistics.median(seconds - waited for seconds, waited in step_times)
    return [step, step - busy, coding / num_steps]


def _payoff(
    engine: Engine,
    boundaries: Sequence[dict[str, Any]],
    found: Sequence[dict[str, Any]],
    num_steps: int,
) -> dict[str, Any] | None:
    """Whether compression pays; None where there is nothing to say (`step_costs`)."""
    directions = [i for i, entry in enumerate(boundaries) if entry["direction"] in ("act", "grad")]
    links = [[rank["links"][i]["train"] for rank in found] for i in directions]
    alone = engine.mesh.pp_size == 1
    costs = step_costs(engine, found, links, num_steps, engine.probe)
    if costs is None:
        return None
    model = PayOff.of(
        costs.ranks,
        costs.cuts,
        chunks=costs.chunks,
        in_flight=engine.in_flight,
        connections=engine.connections,
        alone_s=found[0]["times"][0] if alone else None,
    )
    return {**model.to_dict(), "says": model.summary()}


def print_report(report: dict[str, Any]) -> None:
    """Prints the table of a report: training, and evaluation where there was any."""
    headers = [
        "cut",
        "after",
        "direction",
        "method",
        "phase",
        "messages",
        "MB sent",
        "below bf16",
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
                        below_bf16_text(traffic["below_bf16"]),
                        f"{traffic['relative_error']:.4f}",
                        f"{traffic['cosine']:.4f}",
                        f"{traffic['seconds']:.2f}",
                        traffic["nonfinite"],
                    ]
                )
    for sentence in report["step"]["says"]:
        print(sentence)
    if report["auto"]:
        print(report["auto"])
    if report["boundaries"]:
        print(tabulate(rows, headers, disable_numparse=True))
    if report["wire_ratio"] is not None:
        print(
            f"training sent {report['wire_bytes'] / 1e6:.2f} MB in {report['steps']} steps, "
            f"{report['dense_bytes'] / 1e6:.2f} MB uncompressed"
            + _in_bf16(report["num_elements"], report["below_bf16"])
        )
    _print_memories(report["boundaries"])
    _print_adaptive(report["boundaries"])
    if report["replicas"] is not None:
        _print_replicas(report["replicas"])
    for sentence in (report["payoff"] or {}).get("says", []):
        print(sentence)


def _in_bf16(num_elements: float | None, below: float | None) -> str:
    if num_elements is None or below is None:
        return ""
    return f", {2 * num_elements / 1e6:.2f} MB in bf16: {below_bf16_text(below)} times below bf16"


def _print_memories(boundaries: list[dict[str, Any]]) -> None:
    """Prints how memories of samples follow them, where samples have come again."""
    rows = [
        [entry["boundary"], entry["after"], _DIRECTIONS[entry["direction"]]]
        + [f"{entry['train'][name]:.4f}" for name in LAGS]
        for entry in boundaries
        if all(entry["train"][name] is not None for name in LAGS)
    ]
    if rows:
        headers = ["cut", "after", "memory", "drift", "lag", "stayed"]
        print(tabulate(rows, headers, disable_numparse=True))


def _print_adaptive(boundaries: list[dict[str, Any]]) -> None:
    """Prints what links that choose their compression factor have come to."""
    rows = []
    for entry in boundaries:
        if (chosen := entry["adaptive"]) is not None:
            gain = dict(map(tuple, chosen["gains"])).get(chosen["cf"])
            rows.append(
                [
                    entry["boundary"],
                    entry["after"],
                    _DIRECTIONS[entry["direction"]],
                    "dense" if chosen["dense"] else f"{chosen['cf']:.4g}",
                    "" if gain is None else f"{gain:.4f}",
                    chosen["changes"],
                ]
            )
    if rows:
        headers = ["cut", "after", "direction", "factor now", "gain", "changes"]
        print(tabulate(rows, headers, disable_numparse=True))


def _print_replicas(figures: dict[str, Any]) -> None:
    """Prints the table of what replicas have exchanged, in one row."""
    if not figures["steps"]:
        return
    shown = {
        "replicas": figures["replicas"],
        "method": figures["method"],
        "steps": figures["steps"],
        "MB sent": f"{figures['wire_bytes'] / 1e6:.2f}",
        "below bf16": below_bf16_text(figures["below_bf16"]),
        "traffic MB a replica": f"{figures['traffic_bytes_per_replica'] / 1e6:.2f}",
        "density": "" if figures["density"] is None else f"{figures['density']:.4f}",
        "paths": ", ".join(f"{count} {path}" for path, count in figures["paths"].items()),
        "encode s": f"{figures['encode_s']:.2f}",
        "wait s": f"{figures['wait_s']:.2f}",
        "decode s": f"{figures['decode_s']:.2f}",
    }
    for name in ("cf", "gain", "critical"):  # of methods that adapt
        if figures.get(name) is not None:
            shown[name] = f"{figures[name]:.4g}"
    print(tabulate([list(shown.values())], list(shown), disable_numparse=True))
    gathered = figures.get("parameters")
    if gathered and gathered["dense_bytes"]:
        shown = {
            "parameters gathered": gathered["gathers"],
            "MB sent": f"{gathered['wire_bytes'] / 1e6:.2f}",
            "below bf16": below_bf16_text(Sent.from_dict(gathered).below_bf16),
            "traffic MB a replica": f"{gathered['traffic_bytes'] / figures['replicas'] / 1e6:.2f}",
            "s": f"{gathered['seconds']:.2f}",
        }
        print(tabulate([list(shown.values())], list(shown), disable_numparse=True))
