"""A comparison of runs: a table, and a page with all that their folders tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tabulate import tabulate

from mpcomp.core.sent import Sent, below_bf16_text
from mpcomp.core.traffic import FIDELITY
from mpcomp.page import write_page
from mpcomp.view.json_files import read_json
from mpcomp.view.run import OFF, ON, Run, sent_by_link

__all__ = ["figures_of", "table", "write_report"]

#: Points of a curve.
POINTS: Final = 600
#: Part of the steps whose mean is a run's last loss.
TAIL: Final = 0.05


def table(runs: Sequence[Run]) -> str:
    """A row for each run."""
    metrics = sorted({run.metric for run in runs if run.metric is not None})
    rows = []
    for run in runs:
        sent = run.sent()[-1] if run.steps else Sent()
        cuts = run.account().cuts
        last = run.epochs[-1] if run.epochs else {}
        rate = run.samples_per_second()
        rows.append(
            [
                str(run.files.path),
                run.label,
                len(run.steps),
                _number(last_loss(run), ".4f"),
                *(_number(last.get(name + end), ".4g") for name in metrics for end in (ON, OFF)),
                _number(sent.wire_bytes / 1e6 if run.steps else None, ".2f"),
                below_bf16_text(sent.below_bf16),
                below_bf16_text(cuts.below_bf16),
                _number(run.steps[-1]["time"] if run.steps else None, ".1f"),
                "" if rate is None else f"{rate:.4g} {run.about['samples']}",
            ]
        )
    headers = ["run", "compression", "steps", "loss"]
    headers += [f"{name} {word}" for name in metrics for word in ("on", "off")]
    headers += ["MB sent", "below bf16", "cuts alone", "seconds", "a second"]
    return tabulate(rows, headers, disable_numparse=True)


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Writes the page of runs.

    Args:
        folders: of the runs, at least one.
        path: of the file.

    Raises:
        ValueError: a folder has no run with steps.
        OSError: the file cannot be written.
    """
    runs = [Run.read(folder) for folder in folders]
    labels = [run.label for run in runs]
    write_page(
        path,
        "mpcomp.view",
        {
            "runs": [
                _of_run(run, run.label if labels.count(run.label) == 1 else str(run.files.path))
                for run in runs
            ]
        },
    )


def figures_of(run: Run, last: int | None = None) -> dict[str, Any]:
    """The figures of a run, as JSON can hold them.

    Args:
        run: with steps or before the first.
        last: windows of steps that figures of links and ranks are means of; None for all.
    """
    windows = [window for _, window in run.windows[-(last or 0) :]]
    sent, account = run.sent(), run.account()
    whole = sent[-1] if sent else Sent()
    at_end = run.epochs[-1] if run.epochs else {}
    return {
        "folder": str(run.files.path),
        "label": run.label,
        "finished": run.finished,
        "about": run.about,
        "config": run.config,
        "steps": len(run.steps),
        "seconds": run.steps[-1]["time"] if run.steps else 0.0,
        "samples_per_second": run.samples_per_second(),
        "last_loss": last_loss(run),
        "metric": run.metric,
        "metric_on": at_end.get(f"{run.metric}{ON}"),
        "metric_off": at_end.get(f"{run.metric}{OFF}"),
        "wire_bytes": whole.wire_bytes,
        "below_bf16": whole.below_bf16,
        "cuts_below_bf16": account.cuts.below_bf16,
        "says": account.summary(),
        "link_names": [run.link_name(i) for i in range(len(run.about["links"]))],
        "links": run.link_figures(windows),
        "ranks": run.rank_times(windows),
    }


def last_loss(run: Run) -> float | None:
    """Mean loss of the last steps; None where none of them is finite."""
    count = max(1, round(TAIL * len(run.steps)))
    known = [row["loss"] for row in run.steps[-count:] if row["loss"] is not None]
    return sum(known) / len(known) if known else None


def _of_run(run: Run, name: str) -> dict[str, Any]:
    """All that the page shows of one run."""
    sent = run.sent()
    places = [
        {"step": row["step"] + 1, "time": row["time"], "bytes": so_far.wire_bytes}
        for row, so_far in zip(run.steps, sent, strict=True)
    ]
    losses = [{**place, "loss": row["loss"]} for row, place in zip(run.steps, places, strict=True)]
    fidelity = [
        {**place, **_of_links(row["figures"])}
        for row, place in zip(run.steps, places, strict=True)
        if "figures" in row
    ]
    return {
        **figures_of(run),
        "name": name,
        "losses": _thinned(losses),
        "epochs": _epochs(run),
        "fidelity": _thinned(fidelity),
        "timeline": _timeline(
            read_json(run.files.trace), run.about["ranks"] // run.about["replicas"]
        ),
    }


def _of_links(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Curves of each link."""
    links = figures["links"]
    return {
        # Older logs have fewer of them.
        **{name: links.get(name, [None] * len(links["cosine"])) for name in FIDELITY},
        "below_bf16": [sent.below_bf16 for sent in sent_by_link(figures)],
    }


def _thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `POINTS` rows, each the mean of some, at the place of the last of them."""
    size = math.ceil(len(rows) / POINTS) or 1
    return [_mean(rows[i : i + size]) for i in range(0, len(rows), size)]


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = dict(rows[-1])
    for key, value in found.items():
        if key in ("step", "time", "bytes"):
            continue
        if isinstance(value, list):
            found[key] = [_mean_of([row[key][i] for row in rows]) for i in range(len(value))]
        else:
            found[key] = _mean_of([row[key] for row in rows])
    return found


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _epochs(run: Run) -> list[dict[str, Any]]:
    """The metric of each epoch that was evaluated, and where it stands on each axis."""
    if run.metric is None:
        return []
    num_epochs, total = run.config["epochs"], run.about["total_steps"]
    return [
        {
            "step": row["epoch"] * total // num_epochs,
            "time": row["seconds"],
            "bytes": row["wire_bytes"],
            "on": row[run.metric + ON],
            "off": row[run.metric + OFF],
        }
        for row in run.epochs
        if row[run.metric + ON] is not None
    ]


def _timeline(trace: Mapping[str, Any] | None, pp_size: int) -> dict[str, Any] | None:
    """The last step of a trace.

    Its spans are [rank, stage, kind, microbatch, start, end, link, replica, whether it is beside
    the stage].

    Args:
        trace: the file's content, if there is one.
        pp_size: ranks of a replica.
    """
    if trace is None:
        return None
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    step = max(event["args"]["step"] for event in spans)
    own = [event for event in spans if event["args"]["step"] == step]
    start = min(event["ts"] for event in own)
    return {
        "step": step,
        "clock_error_s": max(trace["otherData"]["clock_error_us"]) / 1e6,
        "spans": [
            [
                event["pid"],
                event["args"].get("stage"),
                event["args"]["kind"],
                event["args"].get("microbatch"),
                (event["ts"] - start) / 1e6,
                (event["ts"] + event["dur"] - start) / 1e6,
                event["args"].get("link", ""),
                event["pid"] // pp_size,
                event["args"].get("beside", False),
            ]
            for event in own
        ],
    }


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
