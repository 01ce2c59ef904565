"""The curves of runs: loss and the metric, on and off, over epochs, bytes sent, and seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpcomp.view.run import Run
from recipes.metric import Metric
from recipes.run_folder import RunFolder

History = Sequence[Mapping[str, Any]]

# Told apart by all eyes.
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)


#: Where curves stand, and what those axes are called.
AXES = {"epoch": "epoch", "wire_bytes": "bytes sent in training", "seconds": "seconds"}


def losses_of_steps(folder: RunFolder, iterations_per_epoch: int) -> History:
    """The loss of each iteration of a run, and where it stands on each axis."""
    run = Run.read(folder.path)
    return [
        {
            "epoch": (row["step"] + 1) / iterations_per_epoch,
            "wire_bytes": sent.wire_bytes,
            "seconds": row["time"],
            "loss": math.nan if row["loss"] is None else row["loss"],
        }
        for row, sent in zip(run.steps, run.sent(), strict=True)
    ]


def plot_curves(
    runs: Mapping[str, History],
    path: Path,
    metric: Metric,
    *,
    losses: Mapping[str, History],
) -> None:
    """Draws histories into a PNG file.

    Args:
        runs: entries of epochs, by what the legend calls them.
        path: of the file.
        metric: that they were judged by.
        losses: those of steps, of `losses_of_steps`, by the same names.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    figure = Figure(figsize=(13, 7), dpi=100, layout="constrained")
    axes = figure.subplots(2, len(AXES), sharex="col", sharey="row")
    # Runs of very different traffic share a byte axis only on a logarithmic scale.
    totals = [rows[-1]["wire_bytes"] for rows in runs.values()]
    logarithmic = max(totals) > 3 * min(totals)
    scale, unit = _byte_unit(min(totals))
    for colour, (name, rows) in zip(COLOURS * len(runs), runs.items(), strict=False):
        for column, place in enumerate(AXES):
            by = scale if place == "wire_bytes" else 1.0
            at_steps = [step[place] / by for step in losses[name]]
            own = [step["loss"] for step in losses[name]]
            axes[0, column].plot(at_steps, own, color=colour, linewidth=0.8, alpha=0.35)
            axes[0, column].plot(at_steps, _smooth(own), color=colour)
            x = [row[place] / by for row in rows]
            kinds = ((metric.on, "-", "on"), (metric.off, "--", "off"))
            for key, style, word in kinds[:1] if name == "uncompressed" else kinds:
                points = [
                    (at, metric.scale * row[key])
                    for at, row in zip(x, rows, strict=True)
                    if row[key] is not None
                ]
                text = name if name == "uncompressed" else f"{name}, {word} at inference"
                axes[1, column].plot(
                    [at for at, _ in points],
                    [value for _, value in points],
                    f".{style}",
                    color=colour,
                    label=text,
                )
    for column, (place, label) in enumerate(AXES.items()):
        axes[1, column].set_xlabel(f"{label} [{unit}]" if place == "wire_bytes" else label)
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        axis = axes[1, column].xaxis
        if place == "wire_bytes" and logarithmic:
            axes[1, column].set_xscale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        elif place == "epoch":
            axis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_ylabel("training loss [nats]")
    axes[1, 0].set_ylabel(metric.axis)
    if metric.logarithmic:
        axes[1, 0].set_yscale("log")  # the others share it
        axis = axes[1, 0].yaxis
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    # Names may be longer than an axis.
    figure.legend(
        *axes[1, 0].get_legend_handles_labels(), loc="outside upper center", frameon=False
    )
    figure.savefig(path)


def _smooth(values: Sequence[float]) -> list[float]:
    """Means of neighbours, as single steps hide where it goes."""
    reach = round(len(values) / 60)
    return [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def _byte_unit(num_bytes: int) -> tuple[float, str]:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= scale:
            return scale, unit
    return 1.0, "B"
