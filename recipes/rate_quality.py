"""Rate against quality: bits an element of every method, and what they cost, as table and picture.

    python -m recipes.rate_quality docs/results/smollm2_inference.jsonl --plot inference.png
    python -m recipes.rate_quality docs/results/cifar10_study.jsonl --dense-bits 16

Reads the results file of `recipes.lm_inference`, `recipes.cifar10_study`, `recipes.gpt2_study` or
`recipes.wikitext_study`. The rate is the mean over all cuts and both directions that were used, an
element of bf16 has 16 bits. The cost is what the method's runs lose, seed by seed, against the
uncompressed ones with compression on: per cent of perplexity, or points of accuracy. A method is on
the *front* if none other has fewer bits at a smaller or equal cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tabulate import tabulate

from recipes.metric import ACCURACY, PERPLEXITY, Metric
from recipes.plots import COLOURS
from recipes.run_folder import read_json_lines
from recipes.study_table import half_interval

BF16_BITS: Final = 16
UNCOMPRESSED: Final = "none"
#: Costs below are drawn here: noise of the data decides about smaller ones.
SMALLEST_COST: Final = 0.1
MARKERS: Final = "os^Dv<>Ph*X"


@dataclass(frozen=True)
class Point:
    """A method's rate and cost.

    Attributes:
        method: its name in the file.
        bits: an element.
        cost: mean of its runs; below 0 where they did better than uncompressed.
        half_width: of the cost's interval of 95 % by t; None of fewer than three runs.
        num_runs: with a seed that an uncompressed run has too.
    """

    method: str
    bits: float
    cost: float
    half_width: float | None
    num_runs: int

    @property
    def family(self) -> str:
        """Compressors in the spec's order, or the first word of a row that is named in words."""
        heads = [part.partition(":")[0] for part in self.method.split("+")]
        return "+".join(heads).split(" ")[0].rstrip(",")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, and draws the picture."""
    options = _parse(argv)
    try:
        rows = read_json_lines(options.results)
        metric, points = points_of(rows, dense_bits=options.dense_bits)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(table(points, metric))
    if options.plot is not None:
        plot(points, metric, options.plot, marked=options.mark, most=options.most)
        print(f"\ndrawn into {options.plot}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "rate_quality", description="Bits an element against what they cost in quality."
    )
    add = parser.add_argument
    add("results", type=Path, help="results file (.jsonl) of lm_inference or of a study")
    add("--dense-bits", type=int, default=32, choices=(16, 32), help="of an element that goes "
        "uncompressed in these runs (default 32; 16 of runs in bf16)")  # fmt: skip
    add("--plot", type=Path, metavar="PNG", help="draws the picture")
    add("--mark", nargs="*", default=[], metavar="METHOD", help="methods with a ring: the defaults")
    add("--most", type=float, metavar="BITS", help="rate at the right end of the picture")
    return parser.parse_args(argv)


def points_of(
    rows: Sequence[Mapping[str, Any]], *, dense_bits: int = 32
) -> tuple[Metric, list[Point]]:
    """The metric of a results file, and its methods by rate.

    Args:
        rows: lines of the file.
        dense_bits: of an element without compression.

    Raises:
        ValueError: no row is uncompressed, or the file is of another program.
    """
    of_inference = bool(rows) and "times_uncompressed" in rows[0]
    of_study = bool(rows) and "row" in rows[0]
    if not of_inference and not of_study:
        raise ValueError("these are not results of lm_inference, or of a study of cuts")
    metric = ACCURACY if f"{ACCURACY.name}_compressed" in rows[0] else PERPLEXITY
    key, name = (PERPLEXITY.name, "method") if of_inference else (metric.on, "row")
    runs: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if "diverged" not in row:
            runs.setdefault(row[name], {})[row.get("seed", 0)] = row
    plain = runs.pop(UNCOMPRESSED, None)
    if not plain:
        raise ValueError(f"there is no row {UNCOMPRESSED}, which is what the others are held to")
    points = []
    for method, found in runs.items():
        seeds = sorted(found.keys() & plain.keys())
        if not seeds:
            continue
        costs = [_cost(metric, found[seed][key], plain[seed][key]) for seed in seeds]
        bits = statistics.mean(dense_bits * _ratio(found[seed]) for seed in seeds)
        half_width = half_interval(costs, 95) if len(costs) > 2 else None
        points.append(Point(method, bits, statistics.mean(costs), half_width, len(costs)))
    return metric, sorted(points, key=lambda point: point.bits)


def _ratio(row: Mapping[str, Any]) -> float:
    """Bytes sent over cuts ÷ dense ones; a study of text has the tie's beside them."""
    return float(row.get("cut_ratio_overall", row["wire_ratio"]))


def _cost(metric: Metric, value: float, plain: float) -> float:
    if metric.higher_is_better:
        return metric.scale * (plain - value)
    return 100 * (value / plain - 1)


def front(points: Iterable[Point]) -> list[Point]:
    """The methods that no other surpasses, by rate."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bits, point.cost)):
        if not found or point.cost < found[-1].cost:
            found.append(point)
    return found


def table(points: Sequence[Point], metric: Metric) -> str:
    """One row for each method."""
    best = front(points)
    lines = [
        (
            point.method,
            f"{point.bits:.2f}",
            f"{BF16_BITS / point.bits:.1f}",
            f"{point.cost:+.2f}" + (f" ± {point.half_width:.2f}" if point.half_width else ""),
            point.num_runs,
            "yes" if point in best else "",
        )
        for point in points
    ]
    headers = ("method", "bits", "times below bf16", _axis(metric), "n", "front")
    return tabulate(lines, headers, tablefmt="pipe", disable_numparse=True)


def _axis(metric: Metric) -> str:
    unit = "points" if metric.higher_is_better else "%"
    return f"{metric.name} lost [{unit}]"


def plot(
    points: Sequence[Point],
    metric: Metric,
    path: Path,
    *,
    marked: Sequence[str] = (),
    most: float | None = None,
) -> None:
    """Draws the points of each family, the front, and rings round what is marked, into a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    most = most or max(point.bits for point in points)
    shown = [point for point in points if point.bits <= most]
    figure = Figure(figsize=(9, 5.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    best = front(shown)
    axes.plot(
        [point.bits for point in best],
        [max(point.cost, SMALLEST_COST) for point in best],
        color="0.8",
        linewidth=6,
        solid_capstyle="round",
        zorder=0,
        label="front",
    )
    families = list(dict.fromkeys(point.family for point in shown))
    for i, family in enumerate(families):
        own = [point for point in shown if point.family == family]
        costs = [max(point.cost, SMALLEST_COST) for point in own]
        widths = [point.half_width or 0 for point in own]
        axes.errorbar(
            [point.bits for point in own],
            costs,
            yerr=[[min(w, c - SMALLEST_COST) for w, c in zip(widths, costs, strict=True)], widths],
            marker=MARKERS[i % len(MARKERS)],
            linestyle="none",
            elinewidth=1,
            markersize=7,
            color=COLOURS[i % len(COLOURS)],
            label=family,
        )
    for point in shown:
        if point.method in marked:
            axes.plot(
                point.bits,
                max(point.cost, SMALLEST_COST),
                marker="o",
                markersize=16,
                fillstyle="none",
                color="black",
            )
            axes.annotate(
                point.method,
                (point.bits, max(point.cost, SMALLEST_COST)),
                textcoords="offset points",
                xytext=(10, -18),
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(f"{_axis(metric)}; {SMALLEST_COST:g} and less at the bottom")
    axes.set_xlabel("bits an element (bf16: 16)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
