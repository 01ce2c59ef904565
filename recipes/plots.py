"""The curves of runs: loss and the metric, on and off, over epochs, and over bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.metric import Metric

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


def plot_curves(runs: Mapping[str, History], path: Path, metric: Metric) -> None:
    """Draws the histories, keyed by what the legend calls them, into a PNG file."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    figure = Figure(figsize=(10, 7), dpi=100, layout="constrained")
    axes = figure.subplots(2, 2, sharey="row")
    # Runs of very different traffic share a byte axis only on a logarithmic scale.
    totals = [rows[-1]["wire_bytes"] for rows in runs.values()]
    logarithmic = max(totals) > 3 * min(totals)
    scale, unit = _byte_unit(min(totals))
    for colour, (name, rows) in zip(COLOURS * len(runs), runs.items(), strict=False):
        for column in (0, 1):
            x = [row["epoch"] if column == 0 else row["wire_bytes"] / scale for row in rows]
            axes[0, column].plot(x, [row["loss"] for row in rows], ".-", color=colour, label=name)
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
    for column, label in enumerate(("epoch", f"bytes sent in training [{unit}]")):
        for row in (0, 1):
            axes[row, column].set_xlabel(label)
            axes[row, column].grid(alpha=0.3)
            axes[row, column].spines[["top", "right"]].set_visible(False)
            axis = axes[row, column].xaxis
            if column == 0:
                axis.set_major_locator(MaxNLocator(integer=True))
            elif logarithmic:
                axes[row, column].set_xscale("log")
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
    axes[0, 0].set_ylabel("training loss [nats]")
    axes[1, 0].set_ylabel(metric.axis)
    if metric.logarithmic:
        axes[1, 0].set_yscale("log")  # the other shares it
        axis = axes[1, 0].yaxis
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    # Names may be longer than an axis.
    figure.legend(
        *axes[1, 0].get_legend_handles_labels(), loc="outside upper center", frameon=False
    )
    figure.savefig(path)


def _byte_unit(num_bytes: int) -> tuple[float, str]:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= scale:
            return scale, unit
    return 1.0, "B"
