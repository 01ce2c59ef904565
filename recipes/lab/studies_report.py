"""Tables of the trainings at full size, from the lines of their results file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from recipes.lab.account import account_of
from recipes.lab.full_size import STUDIES, Study
from recipes.lab.study import Line
from recipes.lab.study_table import PAIRED, Results, Run, interval, spread
from recipes.metric import PERPLEXITY

__all__ = ["render"]

NOTHING = "No training has been run on a GPU yet."


def render(lines: Sequence[Line]) -> str:
    """A table for each study that has lines, and how its runs ended that have none."""
    parts = []
    for name, study in STUDIES.items():
        own = [line for line in lines if line["study"] == name]
        finished = [line for line in own if "stopped" not in line]
        if not own:
            continue
        parts.append(f"{name}: {study.question}.")
        if finished:
            results = Results.of(finished, order=list(study.rows))
            parts.append(_table(study, results))
            if course := _course(study, results):
                parts.append(course)
            parts.append(_notes(finished))
        if stopped := _stopped(own, finished):
            parts.append(stopped)
    return "\n\n".join(parts) if parts else NOTHING


def _table(study: Study, results: Results) -> str:
    metric = study.metric
    in_percent = metric is PERPLEXITY
    value: Callable[[Run], float] = (
        (lambda run: 100 * math.log(run[metric.on]))
        if in_percent
        else (lambda run: metric.scale * run[metric.on])
    )

    def cells(row: str, runs: Sequence[Run]) -> list[Any]:
        on, off = (
            spread([metric.scale * run[key] for run in runs], between="+-")
            for key in (metric.on, metric.off)
        )
        apart = results.differences(row, study.reference, value) if row != study.reference else []
        return [
            on,
            off,
            interval(apart).replace("±", "+-") if apart else "",
            _mean(runs, lambda run: run.get("below_bf16")),
            _mean(runs, lambda run: account_of(run).cuts.below_bf16),
            statistics.median(run["seconds"] for run in runs),
            "counted" if any(run["counted"] for run in runs) else "",
        ]

    unit = "%" if in_percent else "points"
    headers = (
        *("row", "n", metric.title("on"), metric.title("off")),
        f"on, less {study.reference}, {unit}",
        *("below bf16, whole step", "cuts alone", "seconds", "bytes"),
    )
    formats = ("", "d", "", "", "", ".1f", ".1f", ".0f", "")
    rows = results.table({row: row for row in results.runs}, cells)
    return tabulate(rows, headers, floatfmt=formats, disable_numparse=[2, 3, 4])


def _course(study: Study, results: Results) -> str:
    """The metric against what was trained on, where a run was judged more than once."""
    metric = study.metric
    rows, headers = [], list[str]()
    for row in results.runs:
        runs = results.of_row(row)
        judged = [
            [epoch for epoch in run["history"] if epoch.get(metric.on) is not None] for run in runs
        ]
        if not judged or min(map(len, judged)) < 2:
            continue
        headers = [_trained_on(runs[0], epoch["epoch"]) for epoch in judged[0]]
        means = (
            statistics.mean(metric.scale * epoch[metric.on] for epoch in epochs)
            for epochs in zip(*judged, strict=True)
        )
        rows.append([row, *means])
    return tabulate(rows, [metric.title("on, after"), *headers], floatfmt=".2f") if rows else ""


def _trained_on(run: Run, epoch: int) -> str:
    """The number of tokens after an epoch, or the epoch of what has none."""
    settings, of_epoch = run["settings"], run["steps"] / run["epochs"]
    if "seq_len" not in settings:
        return f"epoch {epoch}"
    return f"{epoch * of_epoch * settings['batch_size'] * settings['seq_len'] / 1e6:.1f} M tokens"


def _mean(runs: Sequence[Run], value: Callable[[Run], float | None]) -> float | None:
    found = [number for run in runs if (number := value(run)) is not None]
    return statistics.mean(found) if found else None


def _notes(lines: Sequence[Line]) -> str:
    places = dict.fromkeys(_place(line["from"]) for line in lines)
    return f"{PAIRED} Made by {'; '.join(places)}."


def _place(origin: Mapping[str, Any]) -> str:
    return (
        f"{origin['gpu'] or 'a CPU'}, torch {origin['torch']}, commit "
        f"{origin['commit'] or 'unknown'}"
    )


def _stopped(own: Sequence[Line], finished: Sequence[Line]) -> str:
    """The last words of runs that have not ended, a line each."""
    done = {(line["row"], line["seed"]) for line in finished}
    last = {(line["row"], line["seed"]): line for line in own if "stopped" in line}
    said = []
    for (row, seed), line in last.items():
        if (row, seed) in done:
            continue
        history = line.get("history") or []
        reached = f" after {len(history)} epochs, loss {history[-1]['loss']:.3f}" if history else ""
        said.append(f"{row}, seed {seed}: not finished{reached}; {line['stopped']}.")
    return "\n".join(said)
