"""The tables and the plot of `recipes.bench.slow_link`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from recipes.bench.link_bound import (
    MESSAGE_HEADER_BYTES,
    PACKET_HEADER_BYTES,
    header_bytes,
    least_step_s,
)
from recipes.bench.link_worker import REFERENCE, TORCH_DTYPES
from recipes.bench.local_overhead import quartiles
from recipes.plots import COLOURS

Record = Mapping[str, Any]

# torch's own in greys, ours in colours.
GREYS = ("#000000", "#8c8c8c")
MARKERS = "osD^vP*X"

TIME_HEADERS = (
    "variant",
    "ms a step, median",
    "quartiles",
    f"times faster than {REFERENCE}",
    "quartiles",
    "over dense unlimited",
    "bound, ms",
    "n",
)
TRAFFIC_HEADERS = ("variant", "MB a step, metered", "headers", "counted", "unexplained")
LEGEND = f"""\
ratios are of steps in the same repetition; dense unlimited: {REFERENCE} on unlimited links
bound: the dense computation and the counted bytes, with fill and drain; see link_bound.py
metered: messages at the cuts, all hosts; counted: by the interfaces that sent them
headers: {PACKET_HEADER_BYTES} bytes a counted packet, acknowledgements too (Ethernet 14, IPv4 20, \
TCP 32), and {MESSAGE_HEADER_BYTES} a message (gloo)
unexplained: the rest of what was counted, such as gloo's notices, what ranks agree on, and \
packets sent twice"""


def summarise(
    steps: Sequence[Record],
    compute: Mapping[str, Sequence[Mapping[str, float]]],
    *,
    chunks: int,
    num_cores: int,
) -> list[dict[str, Any]]:
    """One figure for each number of stages, rate and variant, in the order of measurement."""
    grouped: dict[tuple[int, float | None, str], list[Record]] = {}
    for step in steps:
        key = (step["num_stages"], step["rate_mbps"], step["variant"])
        grouped.setdefault(key, []).append(step)
    figures = []
    for (num_stages, rate, name), own in grouped.items():
        seconds = [step["seconds"] for step in own]
        base = grouped[num_stages, rate, REFERENCE]
        # Nothing to compare to where the links were never without a limit.
        unlimited = grouped.get((num_stages, None, REFERENCE), [])
        figures.append(
            {
                "num_stages": num_stages,
                "rate_mbps": rate,
                "variant": name,
                "n": len(own),
                "seconds": _spread(seconds),
                "speedup": _spread(_ratios(base, own)),
                "over_unlimited": _spread(_ratios(own, unlimited)) if unlimited else None,
                "losses": sorted({step["loss"] for step in own}),
                **_traffic(own, chunks),
                "bound_s": _bound(own, compute[str(num_stages)], chunks, num_cores),
            }
        )
    return figures


def _ratios(above: Sequence[Record], below: Sequence[Record]) -> list[float]:
    """Of the times in the same repetition."""
    pairs = zip(above, below, strict=True)
    return [one["seconds"] / other["seconds"] for one, other in pairs]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "quartiles": quartiles(values)}


def _traffic(steps: Sequence[Record], chunks: int) -> dict[str, float | None]:
    """Means over the steps, in bytes; what no device counted is None."""
    metered = statistics.mean(step["metered_bytes"] for step in steps)
    if not steps[0]["interfaces"]:
        return {"metered_bytes": metered, "headers_bytes": None, "interface_bytes": None}
    packets, counted = (
        statistics.mean(sum(host[name] for host in step["interfaces"]) for step in steps)
        for name in ("tx_packets", "tx_bytes")
    )
    num_messages = 2 * (steps[0]["num_stages"] - 1) * chunks
    return {
        "metered_bytes": metered,
        "headers_bytes": header_bytes(round(packets), num_messages),
        "interface_bytes": counted,
    }


def _bound(
    steps: Sequence[Record],
    compute: Sequence[Mapping[str, float]],
    chunks: int,
    num_cores: int,
) -> float:
    """The least step time of the median step's traffic at its rate."""
    rate, hosts = steps[0]["rate_mbps"], len(compute)
    bytes_per_s = float("inf") if rate is None else rate * 1e6 / 8
    sent, received = (
        [
            statistics.median(step["interfaces"][host][name] for step in steps) / bytes_per_s
            if steps[0]["interfaces"]
            else 0.0
            for host in range(hosts)
        ]
        for name in ("tx_bytes", "rx_bytes")
    )
    return least_step_s(
        [stage["forward_s"] for stage in compute],
        [stage["backward_s"] for stage in compute],
        chunks=chunks,
        message_s=sum(sent) / (2 * (hosts - 1) * chunks),
        sent_s=sent,
        received_s=received,
        num_cores=num_cores,
    )


def tables(figures: Sequence[Record]) -> str:
    """Times and traffic for each number of stages and rate, and the ceiling of what can be won."""
    parts = []
    for (num_stages, rate), rows in _groups(figures):
        dense = next(row for row in rows if row["variant"] == REFERENCE)
        over = dense["over_unlimited"]
        title = f"{num_stages} stages, {_rate_text(rate)}"
        if rate is not None and over is not None:
            title += f"; ceiling {_text(over, 1, '.1f')} ({_range(over, 1, '.1f')}), "
            title += "the dense step here over the one on unlimited links"
        parts.append(title)
        parts.append(tabulate(map(_times, rows), TIME_HEADERS, disable_numparse=True))
        if dense["interface_bytes"] is not None:
            parts.append(tabulate(map(_bytes, rows), TRAFFIC_HEADERS, disable_numparse=True))
    return "\n\n".join((*parts, LEGEND))


def _groups(figures: Iterable[Record]) -> Iterable[tuple[tuple[int, float | None], list[Record]]]:
    grouped: dict[tuple[int, float | None], list[Record]] = {}
    for figure in figures:
        grouped.setdefault((figure["num_stages"], figure["rate_mbps"]), []).append(figure)
    return grouped.items()


def _rate_text(rate: float | None) -> str:
    return "unlimited" if rate is None else f"{rate:g} Mbit/s"


def _text(spread: Record, scale: float, form: str) -> str:
    return format(scale * spread["median"], form)


def _range(spread: Record, scale: float, form: str) -> str:
    low, high = (format(scale * quartile, form) for quartile in spread["quartiles"])
    return f"{low} to {high}"


def _times(figure: Record) -> tuple[str, ...]:
    over = figure["over_unlimited"]
    return (
        figure["variant"],
        _text(figure["seconds"], 1e3, ".0f"),
        _range(figure["seconds"], 1e3, ".0f"),
        _text(figure["speedup"], 1, ".2f"),
        _range(figure["speedup"], 1, ".2f"),
        "–" if over is None else _text(over, 1, ".2f"),
        f"{1e3 * figure['bound_s']:.0f}",
        str(figure["n"]),
    )


def _bytes(figure: Record) -> tuple[str, ...]:
    names = ("metered_bytes", "headers_bytes", "interface_bytes")
    metered, headers, counted = (figure[name] for name in names)
    unexplained = (counted - metered - headers) / counted
    shown = (f"{one / 1e6:.3f}" for one in (metered, headers, counted))
    return (figure["variant"], *shown, f"{100 * unexplained:.2f} %")


def plot_steps(figures: Sequence[Record], path: Path) -> None:
    """Draws seconds a step against the rate, a panel for each number of stages, into a PNG file."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.ticker import LogLocator

    rates = sorted({row["rate_mbps"] for row in figures if row["rate_mbps"] is not None})
    counts = sorted({row["num_stages"] for row in figures})
    names = list(dict.fromkeys(row["variant"] for row in figures))
    canvas = Figure(figsize=(1 + 4.5 * len(counts), 5.6), dpi=110, layout="constrained")
    panels = canvas.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axes, num_stages in zip(panels, counts, strict=True):
        found = {
            (row["variant"], row["rate_mbps"]): row["seconds"]
            for row in figures
            if row["num_stages"] == num_stages
        }
        colours = {True: itertools.cycle(GREYS), False: itertools.cycle(COLOURS)}
        for name, marker in zip(names, itertools.cycle(MARKERS), strict=False):
            of_torch = name in TORCH_DTYPES
            medians = [found[name, rate]["median"] for rate in rates]
            spans = [found[name, rate]["quartiles"] for rate in rates]
            below = [median - low for median, (low, _) in zip(medians, spans, strict=True)]
            above = [high - median for median, (_, high) in zip(medians, spans, strict=True)]
            axes.errorbar(
                rates,
                medians,
                yerr=(below, above),
                color=next(colours[of_torch]),
                marker=marker,
                linestyle="--" if of_torch else "-",
                markersize=5,
                capsize=2,
                label=name,
            )
        if (REFERENCE, None) in found:
            dense = found[REFERENCE, None]["median"]
            label = f"{REFERENCE}, unlimited link"
            axes.axhline(dense, color="#666666", linewidth=1, linestyle=":", zorder=0, label=label)
        axes.set(xscale="log", yscale="log", title=f"{num_stages} stages")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("Mbit/s of each host, each way")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("s a step, median and quartiles")
    handles, _ = panels[0].get_legend_handles_labels()
    handles.sort(key=lambda handle: handle.get_label() not in names)  # the curves first
    canvas.legend(handles=handles, loc="outside lower center", ncols=1 + len(counts), frameon=False)
    canvas.savefig(path)
