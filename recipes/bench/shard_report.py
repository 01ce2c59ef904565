"""The tables and the plot of `recipes.bench.slow_shards`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tabulate import tabulate

from recipes.bench import replica_report
from recipes.bench.replica_report import TIME_HEADERS
from recipes.bench.report import Record, scaled, tidy
from recipes.bench.shard_worker import REFERENCE, TOTALS, specs_of
from recipes.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAFFIC_HEADERS: Final = (
    "variant",
    "kB a step, a host",
    "dense / own",
    "below bf16",
    "gradients",
    "weights",
    "encode, ms",
    "wait",
    "decode",
    "gather",
    "memory, kB",
)
TRAINING_HEADERS: Final = (
    "variant",
    "training loss",
    "– dense",
    "held-out",
    "– dense",
    "MB, a host",
)
#: Sends fp32, each gradient once: about half of its bytes is what bf16 would take.
UNCOMPRESSED: Final = "mpcomp none"
LEGEND: Final = f"""\
dense / own: of times in the same repetition, and of bytes; {REFERENCE} is dense
below bf16: half of what {UNCOMPRESSED} sends, over own; bf16 itself was not measured
ceiling: the dense step here over the dense step on unlimited links; what a variant reaches of it is
  the latter over its own step
kB a step, a host: what its interface sent, headers included; gradients, weights: what mpcomp handed
  over for the others, of which it counts the weights only where it compresses them
encode, wait, decode: of gradients on one rank; gather: all of it for weights, waiting included
memory: of the error, on one rank; the model is {{model:.0f}} kB, of which a rank has {{part:.0f}}
without communication: every rank computes and updates the whole model, alone"""

# Weights: dense, the first compressor, the second, and so on.
STYLES: Final = ("-", "--", ":", "-.")
STRENGTHS: Final = (1.0, 0.65, 0.4, 0.25)
DENSE_COLOUR: Final = "#000000"


def summarise(turns: Sequence[Record]) -> list[dict[str, Any]]:
    """One figure for each variant on the limited links, in the order of measurement."""
    of = replica_report.by_variant(turn for turn in turns if turn["limited"])
    figures = []
    for figure in replica_report.summarise(turns, REFERENCE):
        own = of[figure["variant"]]
        names = ("variant", "n", "seconds", "speedup", "of_ceiling", "host_bytes", "loss")
        figures.append(
            {
                **{name: figure[name] for name in names},
                **{key: replica_report.mean_of(own, key) for key in TOTALS},
                "memory_bytes": own[-1]["at"].get("memory_bytes"),
            }
        )
    return figures


def tables(result: Record) -> str:
    """Times, traffic and memory, and the losses of training."""
    settings, rows = result["settings"], result["figures"]
    kilobytes = result["dense_bytes"] / 1e3
    title = (
        f"{settings['ranks']} ranks, {settings['blocks']} blocks of width {settings['width']}, "
        f"{kilobytes / 1e3:.2f} MB of weights, {settings['batch']} sequences of "
        f"{settings['context']} tokens each, {replica_report.rate_text(result)}"
    )
    parts = ["\n".join((title, *replica_report.dense_lines(result["dense"])))]
    parts.append(tabulate(map(replica_report.time_row, rows), TIME_HEADERS, disable_numparse=True))
    plain = next((row for row in rows if row["variant"] == UNCOMPRESSED), None)
    traffic = [_traffic(row, rows[0], plain) for row in rows]
    parts.append(tabulate(traffic, TRAFFIC_HEADERS, disable_numparse=True))
    if result["trainings"]:
        parts.append(
            f"{settings['train_steps']} steps on {settings['data']}, nats a token; training: mean "
            f"of the last {settings['loss_every']} steps or less"
        )
        shown = [_training(one, result["trainings"][0]) for one in result["trainings"]]
        parts.append(tabulate(shown, TRAINING_HEADERS, disable_numparse=True))
    legend = LEGEND.format(model=kilobytes, part=kilobytes / settings["ranks"])
    return "\n\n".join((*parts, legend))


def _traffic(figure: Record, dense: Record, plain: Record | None) -> tuple[str, ...]:
    sent, of_dense = figure["host_bytes"], dense["host_bytes"]
    of_bf16 = None if plain is None or sent is None else plain["host_bytes"] / 2
    times = ("encode_s", "wait_s", "decode_s", "gather_s")
    return (
        figure["variant"],
        scaled(sent, 1e-3, ".0f"),
        "–" if sent is None else f"{of_dense / sent:.2f}",
        "–" if of_bf16 is None else f"{of_bf16 / sent:.1f}",
        scaled(figure["traffic_bytes"], 1e-3, ".0f"),
        scaled(figure["gather_traffic_bytes"], 1e-3, ".0f"),
        *(scaled(figure[name], 1e3, ".0f") for name in times),
        scaled(figure["memory_bytes"], 1e-3, ".0f"),
    )


def _training(training: Record, dense: Record) -> tuple[str, ...]:
    last, of_dense = (one["losses"][-1]["loss"] for one in (training, dense))
    return (
        training["variant"],
        f"{last:.4f}",
        f"{last - of_dense:+.4f}",
        f"{training['held_out']:.4f}",
        f"{training['held_out'] - dense['held_out']:+.4f}",
        scaled(training["host_bytes"], 1e-6, ".1f"),
    )


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Style of each variant: a colour for gradients, a line and a strength for weights."""
    colours = {"": DENSE_COLOUR}
    codecs: dict[str | None, int] = {None: 0}
    drawn = {REFERENCE: {"color": DENSE_COLOUR, "ls": STYLES[0], "alpha": 1.0}}
    for name in names:
        if name == REFERENCE:
            continue
        method, codec = specs_of(name)
        colour = colours.setdefault(method, COLOURS[(len(colours) - 1) % len(COLOURS)])
        place = codecs.setdefault(codec, len(codecs)) % len(STYLES)
        drawn[name] = {"color": colour, "ls": STYLES[place], "alpha": STRENGTHS[place]}
    return drawn


def plot(result: Record, path: Path) -> None:
    """Draws the step of each variant, and its losses if it was trained, as a PNG."""
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    drawn = looks([figure["variant"] for figure in result["figures"]])
    num_panels = 3 if result["trainings"] else 1
    canvas = Figure(figsize=(6 * num_panels, 5.5), dpi=100, layout="constrained")
    panels = canvas.subplots(1, num_panels, squeeze=False)[0]
    bars = {name: to_rgba(look["color"], look["alpha"]) for name, look in drawn.items()}
    replica_report.plot_steps(panels[-1], result, bars, REFERENCE)
    panels[-1].set_title(f"{result['settings']['ranks']} ranks, {panels[-1].get_title()}")
    if result["trainings"]:
        _plot_losses(panels[0], panels[1], result, drawn)
    for axes in panels:
        tidy(axes)
    canvas.legend(loc="outside lower center", frameon=False, ncols=num_panels)
    canvas.savefig(path)


def _plot_losses(
    losses: Axes, differences: Axes, result: Record, drawn: Mapping[str, Mapping[str, Any]]
) -> None:
    """The losses, and what they have more than the dense ones; all on the same batches."""
    dense = [one["loss"] for one in result["trainings"][0]["losses"]]
    for training in result["trainings"]:
        name = training["variant"]
        look = {**drawn[name], "alpha": 1.0}
        steps = [one["step"] for one in training["losses"]]
        own = [one["loss"] for one in training["losses"]]
        losses.plot(steps, own, label=name, **look)
        more = [loss - base for loss, base in zip(own, dense, strict=True)]
        differences.plot(steps, more, **look)
    every = result["settings"]["loss_every"]
    losses.set_ylabel(f"training loss, nats a token, mean of {every} steps")
    losses.set_title(f"training on {Path(result['settings']['data']).name}")
    differences.set_ylabel("– that of dense FSDP2")
    differences.set_title("the same batches, in the same order")
    for axes in (losses, differences):
        axes.set_xlabel("step")
