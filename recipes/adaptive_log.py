"""A log of adaptive cuts: the compression factor of each step, as a file and a picture.

One line a step in the run folder, and of it a PNG with one line per boundary and direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mpcomp
from recipes.replica_log import NewSteps

#: One color a boundary, which its two directions share.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DIRECTIONS = {"act": ("activation", "-"), "grad": ("gradient", "--")}


class AdaptiveLog(NewSteps):
    """The steps of a pipeline's adaptive links that are not in the run folder yet.

    Args:
        pipe: the pipeline.
    """

    def __init__(self, pipe: mpcomp.Pipeline) -> None:
        self._pipe = pipe
        super().__init__(pipe.adaptation.history)

    @property
    def active(self) -> bool:
        """Whether a link is adaptive."""
        return bool(self._pipe.adaptation.links)


def plot_ratios(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the compression factor of each cut over time, and the gain, into a PNG file.

    Args:
        steps: entries of a run, at least one.
        path: of the file.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(8, 6), dpi=100, layout="constrained")
    ratios, gains = figure.subplots(2, 1, sharex=True)
    numbers = [step["step"] for step in steps]
    for link in steps[-1]["links"]:
        boundary, direction = link.split(".")
        what, dashes = _DIRECTIONS[direction]
        look: dict[str, Any] = {
            "color": _COLORS[int(boundary) % len(_COLORS)],
            "linestyle": dashes,
            "linewidth": 1.2,
        }
        found = [step["links"][link] for step in steps]
        ratios.plot(
            numbers,
            [entry["cf"] for entry in found],
            drawstyle="steps-post",
            label=f"cut {boundary}, {what}",
            **look,
        )
        known = [math.nan if entry["gain"] is None else entry["gain"] for entry in found]
        gains.plot(numbers, known, **look)
    ratios.set_yscale("log", base=2)
    ratios.yaxis.set_major_formatter("{x:g}")
    ratios.set_ylabel("compression factor (1 is dense)")
    ratios.set_title("ratio chosen per cut over time", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    gains.set_ylabel("gain of what was sent")
    gains.set_ylim(0, 1.05)
    gains.set_xlabel("step")
    for axes in (ratios, gains):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
