"""The tables and the plot of `recipes.bench.slow_replicas`."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tabulate import tabulate

from recipes.bench import report
from recipes.bench.replica_variants import ALONE, MPCOMP, REFERENCE, TOTALS
from recipes.bench.report import (
    GREYS,
    PREDICTION_HEADERS,
    Record,
    both,
    error_bars,
    grouped,
    mean_of_known,
    prediction_cells,
    prediction_lines,
    range_of,
    ratios,
    scaled,
    spread,
    spread_of_any,
    text,
    tidy,
    times_of,
)
from recipes.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the dense step, for the comparison to be one of communication.
LEAST_SHARE: Final = 0.8
#: Dense in 2 bytes an element.
TWO_BYTES: Final = "torch fp16"

TIME_HEADERS: Final = (
    "method",
    "ms a step, median",
    "quartiles",
    "dense / own",
    "quartiles",
    "of the ceiling",
    "quartiles",
    "n",
)
TRAFFIC_HEADERS: Final = (
    "method",
    "kB a step: message",
    "dense / own",
    "2 bytes / own",
    "counted, a host",
    "dense / own",
    "32-bit numbers",
    "encode, ms",
    "wait",
    "decode",
    "factor",
    "paths",
    "loss",
)
ACCURACY_HEADERS: Final = (
    "method",
    "reached",
    "s, median",
    "quartiles",
    "dense / own",
    f"{TWO_BYTES} / own",
    "steps, median",
    "MB: message",
    "counted, a host",
    "best accuracy",
)
LEGEND: Final = f"""\
dense / own: of times in the same repetition, or with the same seed; {REFERENCE} is dense
{TWO_BYTES} / own: of medians; 2 bytes / own: of a message of as many numbers in 16 bits
ceiling: the dense step here over the dense step on unlimited links; what a method reaches of it is
  the latter over its own step
message: what one replica hands over to be summed or gathered; counted: what a host's interface
  sent, headers included, which is parts of sums, or its message once for each of the others
encode, wait, decode: milliseconds of a step on one replica, where mpcomp counts them
factor: by which the method says that it compresses in the timed steps; a span has not settled
paths: of how many parameters the messages took which; statistics of BatchNorm are not sent"""

LABEL_CHARACTERS: Final = 38  # of a line in the plot


def summarise(turns: Sequence[Record], reference: str = REFERENCE) -> list[dict[str, Any]]:
    """One figure for each method on the limited links, in the order of measurement.

    Args:
        turns: of all methods, and of the reference on unlimited links.
        reference: the dense method, which all are compared to.
    """
    of = by_variant(turn for turn in turns if turn["limited"])
    free = by_variant(turn for turn in turns if not turn["limited"])[reference]
    figures = []
    for name, own in of.items():
        factors = [factor for turn in own for factor in turn["factors"] if factor is not None]
        figures.append(
            {
                "variant": name,
                "n": len(own),
                "seconds": spread([turn["seconds"] for turn in own]),
                "speedup": spread(ratios(of[reference], own)),
                "of_ceiling": spread(ratios(free, own)),
                "host_bytes": mean_of_known(map(host_bytes, own)),
                **{key: mean_of(own, key) for key in TOTALS},
                "paths": own[-1]["at"].get("paths", {}),
                "factors": [min(factors), max(factors)] if factors else None,
                "loss": statistics.mean(turn["loss"] for turn in own),
            }
        )
    return figures


def dense_figures(turns: Sequence[Record], reference: str = REFERENCE) -> dict[str, Any]:
    """Parts of the dense step: medians and quartiles over the repetitions."""
    limited = by_variant(turn for turn in turns if turn["limited"])[reference]
    unlimited = by_variant(turn for turn in turns if not turn["limited"])
    alone, free = unlimited[ALONE], unlimited[reference]
    return {
        "seconds": spread([turn["seconds"] for turn in limited]),
        "unlimited_s": spread([turn["seconds"] for turn in free]),
        "compute_s": spread([turn["seconds"] for turn in alone]),
        "communication_share": spread([1 - ratio for ratio in ratios(alone, limited)]),
        "ceiling": spread(ratios(limited, free)),
    }


def summarise_trainings(trainings: Sequence[Record]) -> list[dict[str, Any]]:
    """One figure for each method; times are those of the seeds that reached the accuracy."""
    of = by_variant(trainings)
    figures = []
    for name, own in of.items():
        pairs = zip(of[REFERENCE], own, strict=True)
        both_reached = [pair for pair in pairs if pair[0]["reached"] and pair[1]["reached"]]
        reached = [one for one in own if one["reached"]]
        figures.append(
            {
                "variant": name,
                "n": len(own),
                "num_reached": len(reached),
                "seconds": spread_of_any([one["seconds"] for one in reached]),
                "speedup": spread_of_any([a["seconds"] / b["seconds"] for a, b in both_reached]),
                "steps": spread_of_any([one["steps"] for one in reached]),
                "wire_bytes": spread_of_any([one["wire_bytes"] for one in reached]),
                "host_bytes": spread_of_any(
                    [one["host_bytes"] for one in reached if one["host_bytes"] is not None]
                ),
                "best": spread([one["best"] for one in own]),
            }
        )
    return figures


def host_bytes(turn: Record) -> float | None:
    """Bytes that one host sent in a step, on average; None where they are not counted."""
    sent = [host["tx_bytes"] for host in turn["interfaces"]]
    return statistics.mean(sent) / turn["steps"] if sent else None


def mean_of(turns: Sequence[Record], key: str) -> float | None:
    """Of what a method counts; None if it does not."""
    return mean_of_known(turn.get(key) for turn in turns)


def by_variant(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Name -> its records, in their order."""
    return grouped(records, lambda record: str(record["variant"]))


def tables(result: Record) -> str:
    """Times, traffic, what hangs, and the times to the accuracy."""
    rows = result["figures"]
    parts = [_title(result)]
    headers = [*TIME_HEADERS, f"{TWO_BYTES} / own"]
    times = [[*time_row(row), times_of(rows, TWO_BYTES, "seconds", row)] for row in rows]
    if any("predicted_s" in row for row in rows):
        headers += PREDICTION_HEADERS
        for cells, row in zip(times, rows, strict=True):
            cells += prediction_cells(row)
    parts.append(tabulate(times, headers, disable_numparse=True))
    parts += prediction_lines(rows)
    traffic = [_traffic(row, rows[0]) for row in rows]
    parts.append(tabulate(traffic, TRAFFIC_HEADERS, disable_numparse=True))
    for name, outcome in result["tried"].items():
        limit = result["settings"]["hang_timeout"]
        parts.append(f"{name}: {outcome} (over loopback, given {limit:g} s)")
    if result["accuracy"]:
        settings = result["settings"]
        parts.append(
            f"training to a test accuracy of {settings['accuracy']:g} ({settings['data']}), "
            f"looked at every {settings['eval_every']} steps"
        )
        shown = [_training(row, result["accuracy"]) for row in result["accuracy"]]
        parts.append(tabulate(shown, ACCURACY_HEADERS, disable_numparse=True))
    return "\n\n".join((*parts, LEGEND))


def _title(result: Record) -> str:
    settings, dense = result["settings"], result["dense"]
    title = f"{settings['replicas']} replicas of {settings['model']}, width {settings['width']}, "
    title += f"{settings['batch']} images each, {result['dense_bytes'] / 1e6:.2f} MB of gradients, "
    title += rate_text(result)
    return "\n".join((title, *dense_lines(dense)))


def rate_text(result: Record) -> str:
    """Rate of the links."""
    mbps = result["mbps"]
    return report.rate_text(mbps) + (" links" if mbps is None else "")


def dense_lines(dense: Record) -> list[str]:
    """The `dense_figures` in words."""
    share = dense["communication_share"]
    lines = [
        f"dense step {text(dense['seconds'], 1e3, '.0f')} ms, "
        f"{text(share, 100, '.1f')} % of it ({range_of(share, 100, '.1f')}) communication: without "
        f"any it is {text(dense['compute_s'], 1e3, '.0f')} ms",
        f"ceiling {text(dense['ceiling'], 1, '.2f')} ({range_of(dense['ceiling'], 1, '.2f')}): the "
        f"dense step on unlimited links is {text(dense['unlimited_s'], 1e3, '.0f')} ms",
    ]
    if share["median"] < LEAST_SHARE:
        lines.append(f"NOTE: communication is less than {LEAST_SHARE:.0%} of the dense step")
    return lines


def time_row(figure: Record) -> tuple[str, ...]:
    """A row under `TIME_HEADERS`."""
    return (
        figure["variant"],
        *both(figure["seconds"], 1e3, ".0f"),
        *both(figure["speedup"], 1, ".2f"),
        *(f"{one} %" for one in both(figure["of_ceiling"], 100, ".0f")),
        str(figure["n"]),
    )


def _traffic(figure: Record, dense: Record) -> tuple[str, ...]:
    sent, factors = [], figure["factors"]
    for name in ("wire_bytes", "host_bytes"):
        own, of_dense = figure[name], dense[name]
        sent += ["–", "–"] if own is None else [f"{own / 1e3:.1f}", f"{of_dense / own:.1f}"]
        if name == "wire_bytes":
            sent.append("–" if own is None else f"{of_dense / own / 2:.1f}")
    factor = " to ".join(f"{one:.4g}" for one in dict.fromkeys(factors)) if factors else "–"
    times = (figure[name] for name in ("encode_s", "wait_s", "decode_s"))
    paths = figure["paths"].items()
    return (
        figure["variant"],
        *sent,
        f"{figure['floats']:.0f}",
        *(scaled(seconds, 1e3, ".0f") for seconds in times),
        factor,
        ", ".join(f"{path} {num_parameters}" for path, num_parameters in paths) or "–",
        f"{figure['loss']:.3f}",
    )


def _training(figure: Record, rows: Sequence[Record]) -> tuple[str, ...]:
    return (
        figure["variant"],
        f"{figure['num_reached']} of {figure['n']}",
        *both(figure["seconds"], 1, ".1f"),
        text(figure["speedup"], 1, ".2f"),
        times_of(rows, TWO_BYTES, "seconds", figure),
        text(figure["steps"], 1, ".0f"),
        text(figure["wire_bytes"], 1e-6, ".2f"),
        text(figure["host_bytes"], 1e-6, ".2f"),
        text(figure["best"], 1, ".4f"),
    )


def plot(result: Record, path: Path) -> None:
    """Draws the step of each method, and its accuracy over time if it was trained, as a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    names = [figure["variant"] for figure in result["figures"]]
    ours = itertools.cycle(COLOURS)
    greys = itertools.cycle(GREYS)
    colours = {name: next(ours if name.startswith(MPCOMP) else greys) for name in names}
    num_panels = 2 if result["trainings"] else 1
    height = 1.3 + 0.6 * len(names)  # room for labels of three lines
    canvas = Figure(figsize=(7 * num_panels, height), dpi=100, layout="constrained")
    panels = canvas.subplots(1, num_panels, squeeze=False)[0]
    plot_steps(panels[0], result, colours)
    panels[0].set_title(f"{result['settings']['replicas']} replicas, {rate_text(result)}")
    if result["trainings"]:
        _plot_trainings(panels[1], result, colours)
    for axes in panels:
        tidy(axes)
    canvas.legend(loc="outside lower center", frameon=False)
    canvas.savefig(path)


def plot_steps(
    axes: Axes, result: Record, colours: Mapping[str, Any], reference: str = REFERENCE
) -> None:
    """Draws the time of each method's step as a bar, in its colour."""
    rows = result["figures"][::-1]  # the first on top
    medians, bars = error_bars([row["seconds"] for row in rows])
    names = [row["variant"] for row in rows]
    places = range(len(names))
    axes.barh(places, medians, color=[colours[name] for name in names], zorder=2)
    axes.errorbar(medians, places, xerr=bars, fmt="none", color="#444444", capsize=2)
    axes.set_yticks(places, [_broken(name) for name in names], fontsize="small")
    label = f"{reference}, unlimited links"
    axes.axvline(result["dense"]["unlimited_s"]["median"], color="#444444", ls=":", label=label)
    axes.set_xlabel("s a step, median and quartiles")
    axes.set_title(rate_text(result))


def _broken(name: str) -> str:
    """A spec over several lines: long ones would leave no room for the bars."""
    lines = [""]
    for part in re.split(r"(?<=[:+ ,])", name):
        if len(lines[-1]) + len(part) > LABEL_CHARACTERS:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _plot_trainings(axes: Axes, result: Record, colours: Mapping[str, str]) -> None:
    for training in result["trainings"]:
        axes.plot(
            [look["seconds"] for look in training["looks"]],
            [look["accuracy"] for look in training["looks"]],
            color=colours[training["variant"]],
        )
    target = result["settings"]["accuracy"]
    axes.axhline(target, color="#444444", ls=":", zorder=0)
    axes.set_xlabel("s of training, evaluation not counted")
    axes.set_ylabel("test accuracy of one replica")
    axes.set_title(f"to an accuracy of {target:g}, every seed; colours as on the left")
