"""The tables and the plot of `recipes.bench.slow_link`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tabulate import tabulate

from mpcomp.plan import Coding, Compute, CutCost, Messages, Network, predict
from mpcomp.plan.network import FIRST_WINDOW
from mpcomp.plan.planner import tie_s
from recipes.bench.link_bound import MESSAGE_HEADER_BYTES, PACKET_HEADER_BYTES, least_step_s
from recipes.bench.link_worker import METHODS, REFERENCE, TORCH_DTYPES
from recipes.bench.report import (
    PREDICTION_HEADERS,
    Record,
    both,
    counted,
    error_bars,
    grouped,
    prediction_cells,
    prediction_lines,
    range_of,
    rate_text,
    ratios,
    scaled,
    spread,
    spread_of_any,
    text,
    tidy,
    times_of,
)
from recipes.plots import COLOURS

# torch's own in greys, ours in colours.
GREYS = ("#000000", "#8c8c8c")
MARKERS = "osD^vP*X"

# Dense in 2 bytes an element, which all that is compressed has to be faster than.
TWO_BYTES = "torch bf16"

TIME_HEADERS = (
    "variant",
    "ms a step, median",
    "quartiles",
    f"times faster than {REFERENCE}",
    "quartiles",
    f"than {TWO_BYTES}",
    "over dense unlimited",
    "bound, ms",
    *PREDICTION_HEADERS,
    "n",
)
TRAFFIC_HEADERS = ("variant", "MB a step, metered", "headers", "counted", "unexplained")
LEGEND = f"""\
ratios are of steps in the same repetition, those to {TWO_BYTES} of medians
dense unlimited: {REFERENCE} on unlimited links
bound: the dense computation and the counted bytes, with fill and drain; see link_bound.py
predicted: by mpcomp.plan, from computing and coding measured between the steps, side by side, and \
the metered bytes; error: of that, against the median
metered: messages at the cuts and of the tie, all hosts; counted: by the interfaces that sent them
headers: {PACKET_HEADER_BYTES} bytes a counted packet, acknowledgements too (Ethernet 14, IPv4 20, \
TCP 32), and {MESSAGE_HEADER_BYTES} a message (gloo), with x4 four times
unexplained: the rest of what was counted, such as gloo's notices, what ranks agree on, and \
packets sent twice"""


def cores_shared(settings: Mapping[str, Any], num_cores: int) -> int:
    """Cores that stages compute on: the machine's, or one each where all have accelerators."""
    return max(settings["stages"]) if settings.get("accelerator_ms") else num_cores


def summarise(
    steps: Sequence[Record],
    compute: Mapping[str, Sequence[Mapping[str, float]]],
    coding: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    chunks: int,
    num_cores: int,
    latency_ms: float = 0.0,
    steps_before: int = 0,
    tie_coding: Mapping[str, Mapping[str, Sequence[float]]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """One figure for each number of stages, rate and variant, in the order of measurement."""
    groups = grouped(steps, lambda step: (step["num_stages"], step["rate_mbps"], step["variant"]))
    figures = []
    for (num_stages, rate, name), own in groups.items():
        base = groups[num_stages, rate, REFERENCE]
        # Nothing to compare to where the links were never without a limit.
        unlimited = groups.get((num_stages, None, REFERENCE), [])
        figures.append(
            {
                "num_stages": num_stages,
                "rate_mbps": rate,
                "variant": name,
                "n": len(own),
                "seconds": spread([step["seconds"] for step in own]),
                "speedup": spread(ratios(base, own)),
                "over_unlimited": spread_of_any(ratios(own, unlimited) if unlimited else []),
                "losses": sorted({step["loss"] for step in own}),
                **_traffic(own, chunks),
                "bound_s": _bound(own, compute[str(num_stages)], chunks, num_cores),
            }
        )
        # torch's own pipeline is another one, and of some earlier results no coding is known.
        if times := coding.get(str(num_stages), {}).get(name):
            figures[-1]["predicted_s"] = _predicted(
                own,
                compute[str(num_stages)],
                Coding(*times),
                Coding(*tie_coding.get(str(num_stages), {}).get(name, ())),
                latency_ms,
                # After a pause windows are small again.
                math.inf if steps_before else FIRST_WINDOW,
                chunks=chunks,
                num_cores=num_cores,
            )
    return figures


def _traffic(steps: Sequence[Record], chunks: int) -> dict[str, float | None]:
    """Means over the steps, in bytes; what no device counted is None."""
    metered = statistics.mean(step["metered_bytes"] for step in steps)
    num_sent = _connections(steps) * _num_messages(steps, chunks)
    sent, headers = counted(steps, num_sent) or (None, None)
    return {"metered_bytes": metered, "headers_bytes": headers, "interface_bytes": sent}


def _ties(steps: Sequence[Record]) -> str | None:
    """The place of a tied weight; records from before there were such models do not say it."""
    place: str | None = steps[0].get("ties")
    return place


def _num_cuts(steps: Sequence[Record]) -> int:
    """Cuts of the pipeline: one more leads back to the first host where it has the head."""
    return int(steps[0]["num_stages"]) - 1 + (_ties(steps) == "together")


def _num_messages(steps: Sequence[Record], chunks: int) -> int:
    """Messages of a step, both ways: at all cuts, and of a tied weight that two hosts have."""
    return 2 * (_num_cuts(steps) * chunks + (_ties(steps) == "apart"))


def _connections(steps: Sequence[Record]) -> int:
    """Connections of each direction of a cut; a message has a header of gloo's on each."""
    setting = METHODS.get(steps[0]["variant"])
    # Records from before ranks chose do not say it, and need not.
    given = 1 if setting is None else setting.connections
    return int(steps[0].get("connections", given))


def _updates(steps: Sequence[Record]) -> int:
    """Steps in a call, between which the pipeline does not drain."""
    setting = METHODS.get(steps[0]["variant"])
    return 1 if setting is None else setting.updates


def _bound(
    steps: Sequence[Record],
    compute: Sequence[Mapping[str, float]],
    chunks: int,
    num_cores: int,
) -> float | None:
    """The least step time of the median step's traffic at its rate; None of a tied model."""
    if _ties(steps) is not None:
        return None
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
    updates = _updates(steps)
    call = least_step_s(
        [stage["forward_s"] for stage in compute],
        [stage["backward_s"] for stage in compute],
        chunks=chunks * updates,
        message_s=sum(sent) / (2 * (hosts - 1) * chunks),
        sent_s=[updates * seconds for seconds in sent],
        received_s=[updates * seconds for seconds in received],
        num_cores=num_cores,
    )
    return call / updates


def _predicted(
    steps: Sequence[Record],
    compute: Sequence[Mapping[str, float]],
    coding: Coding,
    tie_coding: Coding,
    latency_ms: float,
    window_bytes: float,
    *,
    chunks: int,
    num_cores: int,
) -> float:
    """Seconds of a step of mpcomp's with the bytes that were metered."""
    num_stages, rate, name = (steps[0][key] for key in ("num_stages", "rate_mbps", "variant"))
    metered = statistics.mean(step["metered_bytes"] for step in steps)
    # Of each host; records from before there were tied models do not say it.
    tied = [
        statistics.mean(sent)
        for sent in zip(*(step.get("tie_bytes", (0, 0)) for step in steps), strict=True)
    ]
    num_cuts = _num_cuts(steps)
    one = (metered - sum(tied)) / (2 * num_cuts * chunks)
    one += _connections(steps) * MESSAGE_HEADER_BYTES
    depth = METHODS[name].in_flight
    network = Network.alike(
        num_stages,
        math.inf if rate is None else rate,
        latency_ms / 1e3,
        window_bytes=window_bytes,
        connections=_connections(steps),
    )
    pipelined = predict(
        _stage_compute(compute, num_cuts + 1),
        [CutCost(coding, Messages(one, one))] * num_cuts,
        network,
        chunks=chunks,
        updates=_updates(steps),
        in_flight=None if depth is None else depth(num_stages, chunks),
        num_cores=num_cores,
    )
    if _ties(steps) != "apart":
        return pipelined.step_s
    exchange = CutCost(tie_coding, Messages(tied[0], tied[-1]))
    ties = [(0, num_stages - 1, exchange)]
    return pipelined.step_s + tie_s(ties, network, pipelined.timeline)


def _stage_compute(compute: Sequence[Mapping[str, float]], num_stages: int) -> list[Compute]:
    """Computing of each stage; the head of a tied model was measured alone."""
    own = [Compute(each["mean_forward_s"], each["mean_backward_s"]) for each in compute]
    last = Compute(*map(sum, zip(*own[num_stages - 1 :], strict=True)))
    return [*own[: num_stages - 1], last]


def tables(figures: Sequence[Record]) -> str:
    """Times and traffic for each number of stages and rate, and the ceiling of what can be won."""
    parts = []
    groups = grouped(figures, lambda figure: (figure["num_stages"], figure["rate_mbps"]))
    for (num_stages, rate), rows in groups.items():
        dense = next(row for row in rows if row["variant"] == REFERENCE)
        over = dense["over_unlimited"]
        title = f"{num_stages} stages, {rate_text(rate)}"
        if rate is not None and over is not None:
            title += f"; ceiling {text(over, 1, '.1f')} ({range_of(over, 1, '.1f')}), "
            title += "the dense step here over the one on unlimited links"
        parts.append(title)
        times = [_times(row, rows) for row in rows]
        parts.append(tabulate(times, TIME_HEADERS, disable_numparse=True))
        if dense["interface_bytes"] is not None:
            parts.append(tabulate(map(_bytes, rows), TRAFFIC_HEADERS, disable_numparse=True))
    return "\n\n".join((*parts, *prediction_lines(figures), LEGEND))


def table_by_rate(figures: Sequence[Record]) -> str:
    """Milliseconds a step, a table for each number of stages and a column for each rate."""
    parts = []
    for num_stages, rows in grouped(figures, lambda figure: figure["num_stages"]).items():
        at_rate = grouped(rows, lambda figure: figure["rate_mbps"])
        of = {(row["variant"], row["rate_mbps"]): row for row in rows}
        lines = [
            (name, *(_in_brief(of.get((name, rate)), own) for rate, own in at_rate.items()))
            for name in dict.fromkeys(row["variant"] for row in rows)
        ]
        headers = ("ms a step", *map(rate_text, at_rate))
        parts += [f"{num_stages} stages", tabulate(lines, headers, disable_numparse=True)]
    compared = f"{TWO_BYTES}, by medians"
    if not any(figure["variant"] == TWO_BYTES for figure in figures):
        compared = f"{REFERENCE}, in the same repetition"
    sizes = ", ".join(map(str, sorted({figure["n"] for figure in figures})))
    return "\n\n".join((*parts, f"in brackets: times faster than {compared}; n = {sizes}"))


def _in_brief(figure: Record | None, rows: Sequence[Record]) -> str:
    """A step, and how many times faster than bf16 it is; than fp32 where that was not measured."""
    if figure is None:
        return "–"
    faster = times_of(rows, TWO_BYTES, "seconds", figure)
    if faster == "–":
        faster = text(figure["speedup"], 1, ".2f")
    return f"{text(figure['seconds'], 1e3, '.0f')} ({faster})"


def _times(figure: Record, rows: Sequence[Record]) -> tuple[str, ...]:
    return (
        figure["variant"],
        *both(figure["seconds"], 1e3, ".0f"),
        *both(figure["speedup"], 1, ".2f"),
        times_of(rows, TWO_BYTES, "seconds", figure),
        text(figure["over_unlimited"], 1, ".2f"),
        scaled(figure["bound_s"], 1e3, ".0f"),
        *prediction_cells(figure),
        str(figure["n"]),
    )


def _bytes(figure: Record) -> tuple[str, ...]:
    names = ("metered_bytes", "headers_bytes", "interface_bytes")
    metered, headers, sent = (figure[name] for name in names)
    unexplained = (sent - metered - headers) / sent
    shown = (f"{one / 1e6:.3f}" for one in (metered, headers, sent))
    return (figure["variant"], *shown, f"{100 * unexplained:.2f} %")


def changes_of(steps: Sequence[Record]) -> list[dict[str, Any]]:
    """Medians of the changes at each cut, for each number of stages and variant."""
    groups = grouped(steps, lambda step: (step["num_stages"], step["variant"]))
    return [
        {
            "num_stages": num_stages,
            "variant": name,
            "changes": [
                statistics.median(at_cut)
                for at_cut in zip(*(step["changes"] for step in own), strict=True)
            ],
        }
        for (num_stages, name), own in groups.items()
    ]


def table_of_changes(changes: Sequence[Record]) -> str:
    """Changes as per cent of the energy, one row for each number of stages and variant."""
    rows = [
        (row["num_stages"], row["variant"], *(f"{100 * change:.2f}" for change in row["changes"]))
        for row in changes
    ]
    cuts = [f"cut {i}" for i in range(max(len(row["changes"]) for row in changes))]
    title = "change from one step to the next (last microbatch, median), % of activations' energy"
    return f"{title}\n{tabulate(rows, ('stages', 'variant', *cuts), disable_numparse=True)}"


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
            medians, bars = error_bars([found[name, rate] for rate in rates])
            axes.errorbar(
                rates,
                medians,
                yerr=bars,
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
        tidy(axes)
    panels[0].set_ylabel("s a step, median and quartiles")
    handles, _ = panels[0].get_legend_handles_labels()
    handles.sort(key=lambda handle: handle.get_label() not in names)  # the curves first
    canvas.legend(handles=handles, loc="outside lower center", ncols=1 + len(counts), frameon=False)
    canvas.savefig(path)
