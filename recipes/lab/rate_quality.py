"""Rate against quality: bits an element of every method, and what they cost, as table and picture.

    python -m recipes.lab.rate_quality docs/results/smollm2_inference.jsonl --plot inference.png
    python -m recipes.lab.rate_quality docs/results/cifar10_study.jsonl --dense-bits 16
    python -m recipes.lab.rate_quality docs/results/smollm2_finetune.jsonl --epochs

Reads the results file of `recipes.lab.lm_inference`, `cifar10_study`, `gpt2_study` or
`wikitext_study`, and those of `finetune_study` that have the bytes of each epoch, with LoRA or
without. The rate is the mean over all cuts, epochs and both directions that were used,
an element of bf16 has 16 bits. The cost is what the method's runs lose, seed by seed, against the
runs in bf16 with compression on (LoRA's against LoRA's; at inference, and in results that have
a row `none`, uncompressed in their own dtype, against that): per cent of perplexity, or points of
accuracy. A method is on the *front* if none other held to the same runs has fewer bits at a smaller
or equal cost. With --divergence the cost at inference is not of the text but of the uncompressed
model's predictions: exp(KL) - 1, per cent of the perplexity of what that model itself would write.
With --epochs a fine-tuning's table says what each epoch sent, and the cost by training loss and
with compression off, too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from tabulate import tabulate

from mpcomp.core.sent import below_bf16_text
from mpcomp.links.auto import AUTO
from recipes.lab.account import FORMER, account_of, reference_among, reference_note
from recipes.lab.study_table import PERCENT, half_interval
from recipes.metric import ACCURACY, OWN_TEXT, PERPLEXITY, Metric
from recipes.plots import COLOURS
from recipes.run_folder import read_json_lines

BF16_BITS: Final = 16
UNCOMPRESSED: Final = FORMER
#: Methods of `auto:memory` in results of 27 steps.
WITH_DEAD_ZONES: Final = (
    "aqsgd:first=step/0.4/centre=true/spikes=16:eval=step/0.15/centre=true/spikes=16"
    ":along=bf16+step:0.4:spikes=16:dead_zone=0.7",
    "aqsgd:first=step/1.05/scale=tensor/dead_zone=0.6+step:0.9:scale=tensor:dead_zone=0.6",
)
#: Costs below are drawn here: noise of the data decides about smaller ones.
SMALLEST_COST: Final = 0.1
MARKERS: Final = "os^Dv<>Ph*X"


class Run(NamedTuple):
    """A line of a results file.

    Attributes:
        method: its name.
        family: of methods that share a colour.
        metric: by which it is judged.
        quality: by that, with compression on.
        bits: an element.
        last_bits: the same of the last epoch; None where the file does not tell.
        seed: of the run.
        base: the uncompressed method that it is held to.
        half_width: of the interval of its own cost, over the batches of the text; None where the
            file does not tell.
        num_batches: of the text, where it does.
        whole: times below bf16 of all that a step sends; None where the file does not tell.
    """

    method: str
    family: str
    metric: Metric
    quality: float
    bits: float
    last_bits: float | None = None
    seed: int = 0
    base: str = UNCOMPRESSED
    half_width: float | None = None
    num_batches: int = 1
    whole: float | None = None


@dataclass(frozen=True)
class Point:
    """A method's rate and cost.

    Attributes:
        method: its name.
        family: of methods that share a colour.
        bits: an element.
        cost: mean of its runs; below 0 where they did better than uncompressed.
        half_width: of the cost's interval (`PERCENT`) by t; None of fewer than three runs.
        num_runs: with a seed that an uncompressed run has too; at inference the batches of the
            text, each held to the same one uncompressed.
        last_bits: an element of the last epoch; None where that is not known.
        base: the uncompressed method that it is held to.
        whole: times below bf16 of all that a step sends; None where that is not known.
    """

    method: str
    family: str
    bits: float
    cost: float
    half_width: float | None
    num_runs: int
    last_bits: float | None = None
    base: str = UNCOMPRESSED
    whole: float | None = None


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, and draws the picture."""
    options = _parse(argv)
    try:
        rows = [row for path in options.results for row in read_json_lines(path)]
        metric, points = points_of(
            rows, dense_bits=options.dense_bits, divergence=options.divergence
        )
        if unknown := set(options.mark) - {point.method for point in points}:
            raise ValueError(f"no method to mark is called {' or '.join(sorted(unknown))}")
        text = table_of_epochs(rows) if options.epochs else table(points, metric)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(text)
    if options.plot is not None:
        scale = "log" if options.log else "linear"
        plot(points, metric, options.plot, marked=options.mark, most=options.most, scale=scale)
        print(f"\ndrawn into {options.plot}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "rate_quality", description="Bits an element against what they cost in quality."
    )
    add = parser.add_argument
    add("results", type=Path, nargs="+", metavar="FILE",
        help="results (.jsonl) of lm_inference, of a study or of fine-tuning")  # fmt: skip
    add("--dense-bits", type=int, default=32, choices=(16, 32), help="of an element that goes "
        "uncompressed in these runs (default 32; 16 of runs in bf16)")  # fmt: skip
    add("--divergence", action="store_true", help="from the uncompressed predictions, not the text")
    add("--epochs", action="store_true", help="the table of fine-tuning, epoch by epoch")
    add("--plot", type=Path, metavar="PNG", help="draws the picture")
    add("--mark", nargs="*", default=[], metavar="METHOD", help="methods with a ring: the defaults")
    add("--log", action="store_true", help="rates on a logarithmic axis too")
    add("--most", type=float, metavar="BITS", help="rate at the right end of the picture")
    return parser.parse_args(argv)


def points_of(
    rows: Iterable[Mapping[str, Any]], *, dense_bits: int = 32, divergence: bool = False
) -> tuple[Metric, list[Point]]:
    """The metric of results, and their methods by rate.

    Args:
        rows: lines of files.
        dense_bits: of an element without compression.
        divergence: whether the metric is `OWN_TEXT`.

    Raises:
        ValueError: a line is of another program or there twice, nothing is uncompressed, or
            metrics differ.
    """
    runs: dict[tuple[str, int], Run] = {}
    read = _of_divergence if divergence else _read
    for run in (read(row, dense_bits) for row in rows if "diverged" not in row):
        if (run.method, run.seed) in runs:
            raise ValueError(f"two lines are of {run.method}, seed {run.seed}; pass one of the two")
        runs[run.method, run.seed] = run
    metrics = {run.metric.name: run.metric for run in runs.values()}
    if len(metrics) != 1:
        found = " and ".join(metrics) or "no run that ended"
        raise ValueError(f"pass results of one metric; here is {found}")
    pairs: dict[str, list[tuple[Run, Run]]] = {}
    names = {run.method for run in runs.values()}
    for run in runs.values():
        run = _held_to_reference(run, names)
        if not any(method == run.base for method, _ in runs):
            raise ValueError(f"there is no row {run.base}, which is what the others are held to")
        if run.method != run.base and (run.base, run.seed) in runs:
            pairs.setdefault(run.method, []).append((run, runs[run.base, run.seed]))
    return metrics.popitem()[1], sorted(map(_point, pairs.values()), key=lambda point: point.bits)


def _held_to_reference(run: Run, names: Collection[str]) -> Run:
    """The run, held to the row that the results have for that."""
    return run._replace(base=reference_among(names, run.base.removesuffix(UNCOMPRESSED)))


def _read(row: Mapping[str, Any], dense_bits: int) -> Run:
    for field, read in READERS.items():
        if field in row:
            return read(row, dense_bits)
    raise ValueError("these are not results of lm_inference, of a study of cuts, or of fine-tuning")


def _of_inference(row: Mapping[str, Any], dense_bits: int) -> Run:
    return Run(
        row["method"],
        family_of(row["method"]),
        metric=PERPLEXITY,
        quality=row[PERPLEXITY.name],
        bits=dense_bits * row["wire_ratio"],
        half_width=None if (half := row.get("times_half_interval")) is None else 100 * half,
        num_batches=len(row.get("losses", [0])),
    )


def _of_divergence(row: Mapping[str, Any], dense_bits: int) -> Run:
    if "divergence" not in row:
        raise ValueError("--divergence is for results of lm_inference, which have one")
    times = math.exp(row["divergence"])
    half = row["divergence_half_interval"]
    return _of_inference(row, dense_bits)._replace(
        metric=OWN_TEXT, quality=times, half_width=None if half is None else 100 * times * half
    )


def _of_study(row: Mapping[str, Any], dense_bits: int) -> Run:
    metric = ACCURACY if ACCURACY.on in row else PERPLEXITY
    trained = "LoRA, " if row.get("lora") else ""  # which its row is called, too
    return Run(
        row["row"],
        family_of(row["row"]),
        metric=metric,
        quality=row[metric.on],
        # Bytes sent over cuts ÷ dense ones; a study of text has the tie's beside them.
        bits=dense_bits * row.get("cut_ratio_overall", row["wire_ratio"]),
        seed=row["seed"],
        base=trained + UNCOMPRESSED,
        whole=account_of(row, dense_bits).below_bf16,
    )


def _of_fine_tuning(row: Mapping[str, Any], dense_bits: int) -> Run:
    act, grad = (each if isinstance(each, str) else each[0] for each in (row["act"], row["grad"]))
    defaults = {(pair["act_comp"], pair["grad_comp"]): word for word, pair in AUTO.items()}
    if "memories" not in row:  # of before memories were gauged, when the word stood for this
        defaults[WITH_DEAD_ZONES] = "auto:memory"
    if isinstance(row["act"], str):
        method = defaults.get((act, grad), _both(act, grad))
    else:
        method = row["row"]  # of each cut another
    epochs = [BF16_BITS * sent / row["bf16_bytes_an_epoch"] for sent in row["cut_bytes_by_epoch"]]
    trained = "LoRA, " if row.get("lora") else ""
    return Run(
        trained + method,
        family_of(trained) or _both(family_of(act), family_of(grad)),
        metric=PERPLEXITY,
        quality=row[PERPLEXITY.on],
        bits=statistics.mean(epochs),
        last_bits=epochs[-1],
        seed=row["seed"],
        base=trained + UNCOMPRESSED,
        whole=account_of(row).below_bf16,
    )


def _both(act: str, grad: str) -> str:
    return act if act == grad else f"{act} / {grad}"


#: How a line is read, by a field that those of one kind have and those further down have not.
READERS: Final[Mapping[str, Callable[[Mapping[str, Any], int], Run]]] = {
    "times_uncompressed": _of_inference,
    "cut_bytes_by_epoch": _of_fine_tuning,
    "row": _of_study,
}


def _point(pairs: Sequence[tuple[Run, Run]]) -> Point:
    """A method by its runs, each beside the uncompressed one of its seed."""
    first = pairs[0][0]
    costs = [_cost(run.metric, run.quality, plain.quality) for run, plain in pairs]
    last_bits = [run.last_bits for run, _ in pairs if run.last_bits is not None]
    return Point(
        first.method,
        first.family,
        statistics.mean(run.bits for run, _ in pairs),
        statistics.mean(costs),
        half_interval(costs, PERCENT) if len(costs) > 2 else first.half_width,
        max(len(costs), first.num_batches),
        statistics.mean(last_bits) if last_bits else None,
        first.base,
        _mean_known(run.whole for run, _ in pairs),
    )


def _mean_known(values: Iterable[float | None]) -> float | None:
    """The mean, if all are known."""
    found = list(values)
    return None if None in found else statistics.mean(one for one in found if one is not None)


def family_of(name: str) -> str:
    """Compressors in the spec's order, or the first word of a row that is named in words."""
    heads = [part.partition(":")[0] for part in name.split("+")]
    return "+".join(heads).split(" ")[0].rstrip(",")


def _cost(metric: Metric, value: float, plain: float) -> float:
    if metric.higher_is_better:
        return metric.scale * (plain - value)
    return 100 * (value / plain - 1)


def front(points: Iterable[Point]) -> list[Point]:
    """The methods that no other of the same base surpasses, by rate."""
    found: list[Point] = []
    least: dict[str, float] = {}
    for point in sorted(points, key=lambda point: (point.bits, point.cost)):
        if point.base not in least or point.cost < least[point.base]:
            least[point.base] = point.cost
            found.append(point)
    return found


def table(points: Sequence[Point], metric: Metric) -> str:
    """One row for each method."""
    best = front(points)
    columns: dict[str, list[Any]] = {
        "method": [point.method for point in points],
        "bits": [f"{point.bits:.2f}" for point in points],
    }
    cuts = [f"{BF16_BITS / point.bits:.1f}" for point in points]
    if any(point.whole is not None for point in points):
        columns["below bf16, whole step"] = [below_bf16_text(point.whole) for point in points]
        columns["cuts alone"] = cuts
    else:
        columns["below bf16, cuts alone"] = cuts
    if any(point.last_bits for point in points):
        columns["bits, last epoch"] = [
            f"{point.last_bits:.2f}" if point.last_bits else "" for point in points
        ]
    columns[_axis(metric)] = [
        f"{point.cost:+.2f}" + (f" ± {point.half_width:.2f}" if point.half_width else "")
        for point in points
    ]
    columns["n"] = [point.num_runs for point in points]
    columns["front"] = ["yes" if point in best else "" for point in points]
    return tabulate(columns, headers="keys", tablefmt="pipe", disable_numparse=True)


def table_of_epochs(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row for each method of fine-tuning: what each epoch sent, and all that it cost.

    Raises:
        ValueError: a line is of another program, or lacks its uncompressed run.
    """
    if any("cut_bytes_by_epoch" not in row for row in rows):
        raise ValueError("--epochs is for results of fine-tuning, which have the bytes of epochs")
    of: dict[str, list[Mapping[str, Any]]] = {}
    plain: dict[tuple[str, int], Mapping[str, Any]] = {}
    base_of: dict[str, str] = {}
    for row in rows:
        run = _of_fine_tuning(row, BF16_BITS)
        of.setdefault(run.method, []).append(row)
        plain[run.method, run.seed] = row
        base_of[run.method] = run.base
    base_of = {
        method: reference_among(of, base.removesuffix(UNCOMPRESSED))
        for method, base in base_of.items()
    }
    qualities: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
        "training loss, last epoch": lambda row: row["losses"][-1],
        "perplexity on": lambda row: row[PERPLEXITY.on],
        "perplexity off": lambda row: row[PERPLEXITY.off],
    }
    num_epochs = len(rows[0]["cut_bytes_by_epoch"])
    lines = []
    for method, own in of.items():
        base = base_of[method]
        if missing := [row["seed"] for row in own if (base, row["seed"]) not in plain]:
            raise ValueError(f"{method} has seed {missing[0]}, of which there is no row {base}")
        sent = [
            statistics.mean(
                one["bf16_bytes_an_epoch"] / one["cut_bytes_by_epoch"][i] for one in own
            )
            for i in range(num_epochs)
        ]
        costs = [
            f"{statistics.mean(map(read, own)):.{3 if 'loss' in name else 2}f}"
            if method == base
            else _per_cent([100 * (read(r) / read(plain[base, r["seed"]]) - 1) for r in own])
            for name, read in qualities.items()
        ]
        whole = below_bf16_text(_mean_known(account_of(one).below_bf16 for one in own))
        lines.append([method, whole, *(f"{one:.1f}" for one in sent), *costs, len(own)])
    epochs = [f"cuts alone, epoch {i + 1}" for i in range(num_epochs)]
    headers = ["method", "below bf16, whole steps", *epochs, *qualities, "n"]
    text = tabulate(lines, headers, tablefmt="pipe", disable_numparse=True)
    notes = dict.fromkeys(map(reference_note, base_of.values()))
    return "\n\n".join([text, *notes])


def _per_cent(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):+.1f}"
    return f"{mean} ± {half_interval(values, PERCENT):.1f} %" if len(values) > 2 else f"{mean} %"


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
    scale: str = "linear",
) -> None:
    """Draws the points of each family, the fronts, and rings round what is marked, into a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.ticker import LogLocator, NullLocator

    most = most or max(point.bits for point in points)
    shown = [point for point in points if point.bits <= most]
    figure = Figure(figsize=(9, 5.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    best = front(shown)
    for base in dict.fromkeys(point.base for point in best):
        axes.plot(
            [point.bits for point in best if point.base == base],
            [max(point.cost, SMALLEST_COST) for point in best if point.base == base],
            color="0.8",
            linewidth=6,
            solid_capstyle="round",
            zorder=0,
            label="front" if base == best[0].base else None,
        )
    families = list(dict.fromkeys(point.family for point in shown))
    for i, family in enumerate(families):
        own = [point for point in shown if point.family == family]
        costs, lows, highs = (
            np.array([point.cost + side * (point.half_width or 0) for point in own]).clip(
                SMALLEST_COST
            )
            for side in (0, -1, 1)
        )
        axes.errorbar(
            [point.bits for point in own],
            costs,
            yerr=[costs - lows, highs - costs],
            marker=MARKERS[i % len(MARKERS)],
            linestyle="none",
            elinewidth=1,
            markersize=7,
            color=COLOURS[i % len(COLOURS)],
            label=family,
        )
        for point in own:
            if point.last_bits is not None:
                axes.plot(
                    [point.bits, point.last_bits],
                    [max(point.cost, SMALLEST_COST)] * 2,
                    color=COLOURS[i % len(COLOURS)],
                    linewidth=1,
                    linestyle=":",
                    marker="|",
                    markevery=[1],
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
                xytext=(10, -18 if point.cost > SMALLEST_COST else 10),  # not over the axis
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.6},
                zorder=1,  # behind all points, above the front
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(f"{_axis(metric)}; {SMALLEST_COST:g} and less at the bottom")
    dotted = "; dotted: to the last epoch's" if any(p.last_bits for p in shown) else ""
    axes.set_xlabel(f"bits an element (bf16: 16){dotted}")
    if scale == "log":
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
