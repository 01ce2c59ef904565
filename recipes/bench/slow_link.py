"""A training step over slow links: torch's own pipeline and mpcomp, side by side in one run.

    python -m recipes.bench.slow_link --stages 2 4 --rates unlimited 1000 100 10 5 --repeats 5 \\
        --out slow_link.json --plot slow_link.png

Makes the hosts itself (`recipes.bench.hosts`; needs root), one for each stage of a small decoder
language model, with real TCP between them. Within each repetition all links go through all rates,
and at each rate all variants take turns, in rotating order, so that a slow moment of the machine
meets all of them. A step is forward, loss and backward of all microbatches; it begins on all hosts
at one moment, or right after another one (``--before``), and ends when the last host is done.
Gradients are zeroed outside of the clock.

Every step is of the same batch, of which a memory of samples (``auto:memory``) would have nothing
more to send. So the weights change after each step, outside of the clock, in all variants at one
rate (``--lr``). At the default one, half-way through the model an activation changes from one step
to the next by 2 to 3 % of its energy, a little more than in fine-tuning from one epoch to the next;
the results have the changes at each cut. What is timed of a memory are later epochs: its first
visit of the samples is in the warm-up.

Hosts here share the machine's cores. With ``--accelerator-ms`` they do not compute on them
(`recipes.bench.accelerator`): what is left is coding and links, as on hosts of their own. With
``--tied`` the head waits as well, for as many blocks as its weight is large.

With ``mpcomp auto chosen`` each rate has processes of its own. Before the clock the word takes the
steps there after which it looks at its links.

Without the rights for namespaces everything runs over loopback, unlimited.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from tqdm import tqdm

from mpcomp.pilot.paying import FIRST, WINDOW
from recipes.bench.link_report import (
    changes_of,
    cores_shared,
    plot_steps,
    summarise,
    table_of_changes,
    tables,
)
from recipes.bench.link_worker import (
    CHOSEN,
    IN_BACKGROUND,
    METHODS,
    REFERENCE,
    UNCODED,
    USUAL,
    VARIANTS,
    WHEN_CODED,
    Job,
    Part,
)
from recipes.bench.workers import (
    Workers,
    bench_parser,
    choose_hosts,
    machine,
    num_cores,
    rotated,
    settings_of,
    too_small,
    work,
    write,
)
from recipes.decoder import equal_stages

MODULE: Final = "recipes.bench.slow_link"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes the figures and the plot."""
    options = parse_args(argv)
    if options.worker is not None:
        work(options.worker, Job, Part)
        return
    problem = _problem(options)
    if problem:
        sys.exit(f"error: {problem}")
    steps: list[dict[str, Any]] = []
    links: dict[str, Any] = {}
    compute: dict[str, list[dict[str, float]]] = {}
    coding: dict[str, dict[str, list[float]]] = {}
    tie_coding: dict[str, dict[str, list[float]]] = {}
    for num_stages in options.stages:
        parts = []
        for rates in _rates_at_once(options):
            with contextlib.ExitStack() as stack:
                hosts = choose_hosts(stack, num_stages, options)
                links = hosts.describe()
                workers = Workers(hosts, MODULE, options, _told(options))
                limited = hosts.device != "lo"
                parts.append(_measure(workers, rates if limited else [None], options))
            if not limited:
                break
        measured = merged(parts)
        steps += measured.steps
        compute[str(num_stages)] = measured.compute
        coding[str(num_stages)] = measured.coding
        tie_coding[str(num_stages)] = measured.tie_coding
    figures = summarise(
        steps,
        compute,
        coding,
        chunks=options.chunks,
        num_cores=cores_shared(vars(options), num_cores()),
        latency_ms=options.latency_ms,
        steps_before=options.before,
        tie_coding=tie_coding,
    )
    changes = changes_of(steps)
    print(tables(figures), table_of_changes(changes), sep="\n\n")
    print("links:", json.dumps(links))
    result = {
        "settings": settings_of(options),
        "machine": machine(),
        "links": links,
        "compute": compute,
        "coding": coding,
        "tie_coding": tie_coding,
        "figures": figures,
        "changes": changes,
        "steps": steps,
    }
    write(result, options.out)
    if options.plot is not None and all(figure["rate_mbps"] is None for figure in figures):
        print(f"No {options.plot}: no link was limited.")
    elif options.plot is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plot_steps(figures, options.plot)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the measurement."""
    parser = bench_parser(MODULE, __doc__)
    add = parser.add_argument
    add("--stages", type=int, nargs="+", default=[2, 4], help="one host each")
    add("--rates", type=_rate, nargs="+", default=[None, 1000.0, 100.0, 10.0, 5.0],
        metavar="MBPS", help="Mbit/s of every host each way, or 'unlimited'")  # fmt: skip
    add("--variants", nargs="+", choices=VARIANTS, default=list(USUAL), metavar="NAME",
        help="; ".join(USUAL) + "; and those of mpcomp with four connections each way, as in "
        "'mpcomp auto x4', or as many as ranks choose, 'mpcomp auto measured', or asynchronous, "
        "as in 'mpcomp quant:4 asynchronous', or coded in turn, in the background, or by nobody: "
        + "; ".join(WHEN_CODED) + "; or bf16 by mpcomp, and what the word chooses by the links: "
        "mpcomp bf16; " + CHOSEN)  # fmt: skip
    add("--repeats", type=int, default=5)
    # Until about the fifteenth step activations change by a tenth of what they do later.
    add("--warmups", type=int, default=20, help="unlimited steps of each variant before the clock")
    add("--before", type=int, default=0, metavar="N", help="steps right before each timed one, as "
        "in training: with 0 caches are cold and TCP's windows small (default 0)")  # fmt: skip
    add("--lr", type=float, default=0.01, help="of the weights between steps: what each tensor "
        "changes by, as a part of its norm (default %(default)s)")  # fmt: skip
    add("--accelerator-ms", type=float, default=0.0, metavar="MS", help="blocks compute next to "
        "nothing and wait for so long in a forward, twice that in a backward, as if each host had "
        "an accelerator; 0 lets them compute (default)")  # fmt: skip
    add("--chunks", type=int, default=8, help="microbatches in a step")
    add("--microbatch", type=int, default=2, help="sequences in a microbatch")
    add("--blocks", type=int, default=4)
    add("--width", type=int, default=256)
    add("--context", type=int, default=128)
    add("--vocab", type=int, default=256)
    add("--tied", action="store_true", help="the head's weight is the embedding's: torch "
        "all-reduces its two gradients, mpcomp has both uses on the first host, or exchanges them "
        "in variants that end with 'apart'")  # fmt: skip
    add("--out", type=Path, help="JSON file for the figures and every step")
    add("--plot", type=Path, help="PNG file: seconds a step against the rate")
    return parser.parse_args(argv)


def _rate(text: str) -> float | None:
    if text == "unlimited":
        return None
    rate = float(text)
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: pass Mbit/s above 0, or 'unlimited'")
    return rate


def _rates_at_once(options: argparse.Namespace) -> Sequence[Sequence[float | None]]:
    """Rates that processes measure in turn: one, where the word chooses once by its links."""
    return [[rate] for rate in options.rates] if CHOSEN in options.variants else [options.rates]


def _problem(options: argparse.Namespace) -> str | None:
    if problem := too_small(options, ("repeats", "chunks", "microbatch")):
        return problem
    if options.warmups < 1:
        return f"warmups is {options.warmups}; pass at least 1: the first step connects the hosts"
    if options.before < 0:
        return f"before is {options.before}; pass 0 or more"
    if not 0 <= options.accelerator_ms < math.inf:
        return f"accelerator_ms is {options.accelerator_ms}; pass milliseconds, 0 or more"
    if not 0 < options.lr < 1:
        return (
            f"lr is {options.lr}; pass a number between 0 and 1: without a change of the "
            "weights, a memory of samples has nothing to send"
        )
    if options.chunks < max(options.stages):
        return f"chunks is {options.chunks}; torch's 1F1B needs at least as many as stages"
    if options.plot is not None and not any(options.rates):
        return "a plot needs a limited rate; pass one to --rates"
    if REFERENCE not in options.variants:
        return f"the variants lack {REFERENCE!r}, which all are compared to"
    if UNCODED in options.variants and IN_BACKGROUND not in options.variants:
        return f"the variants lack {IN_BACKGROUND!r}, whose bytes {UNCODED!r} sends"
    try:
        for num_stages in options.stages:
            equal_stages(options.blocks, num_stages)
    except ValueError as error:
        return str(error)
    return None


def _told(options: argparse.Namespace) -> dict[str, Any]:
    same = (
        "chunks",
        "microbatch",
        "width",
        "context",
        "vocab",
        "seed",
        "lr",
        "tied",
        "accelerator_ms",
    )
    chosen = {name: getattr(options, name) for name in same}
    return {"num_blocks": options.blocks, "variants": options.variants, **chosen}


class Measured(NamedTuple):
    """Figures of one number of stages.

    Attributes:
        steps: every step of every variant at every rate.
        compute: of each stage's forward and backward of a microbatch, the least and the mean; the
            head of a tied model is a stage of its own.
        coding: of each variant, seconds of a microbatch at a cut.
        tie_coding: of each variant that exchanges a tied weight's gradients, seconds of both.
    """

    steps: list[dict[str, Any]]
    compute: list[dict[str, float]]
    coding: dict[str, list[float]]
    tie_coding: dict[str, list[float]]


def _measure(
    workers: Workers, rates: Sequence[float | None], options: argparse.Namespace
) -> Measured:
    names: list[str] = options.variants
    # What is chosen by the links is known once it is: it is not predicted.
    coded = [name for name in names if name in METHODS and name != CHOSEN]
    exchanged = [name for name in coded if options.tied and METHODS[name].ties == "apart"]
    hosts, num_stages = workers.hosts, workers.hosts.num_hosts
    for name in [name for name in names if name != CHOSEN] * options.warmups:
        _step(workers, name, 0)
    if CHOSEN in names:
        hosts.set_rate(rates[0])
        for _ in range(FIRST + WINDOW + 1):
            _step(workers, CHOSEN, 0)
    steps, compute = [], []
    coding: dict[str, list[list[float]]] = {name: [] for name in coded}
    tie_coding: dict[str, list[list[float]]] = {name: [] for name in exchanged}
    total = options.repeats * len(rates) * len(names)
    with tqdm(total=total, unit="step", desc=f"{num_stages} stages") as bar:
        for repeat in range(options.repeats):
            first, *others = workers.ask_side_by_side("compute")
            own, *heads = first  # of a tied model
            compute.append([own, *itertools.chain(*others), *heads])
            for name in coded:
                coding[name] += workers.ask_side_by_side("coding", name=name)
            for name in exchanged:
                tie_coding[name] += workers.ask_side_by_side("tie_coding", name=name)
            for rate in rates:
                hosts.set_rate(rate)
                for name in rotated(names, repeat):
                    where = {"num_stages": num_stages, "rate_mbps": rate, "variant": name}
                    steps.append(
                        {**where, "repeat": repeat, **_step(workers, name, options.before)}
                    )
                    bar.update()
    found = []
    for of_stage in zip(*compute, strict=True):
        names = list(of_stage[0])
        least = {name: min(min(one[name]) for one in of_stage) for name in names}
        means = {f"mean_{name}": median(fmean(one[name]) for one in of_stage) for name in names}
        found.append({**least, **means})
    return Measured(steps, found, _medians(coding), _medians(tie_coding))


def merged(parts: Sequence[Measured]) -> Measured:
    """Measurements of the same stages by several sets of processes, as one."""
    compute = [
        {
            name: (median if name.startswith("mean_") else min)(one[name] for one in of_stage)
            for name in of_stage[0]
        }
        for of_stage in zip(*(part.compute for part in parts), strict=True)
    ]
    steps = list(itertools.chain.from_iterable(part.steps for part in parts))
    coding, tie_coding = (
        _medians({name: [each[name] for each in of_parts] for name in of_parts[0]})
        for of_parts in ([part.coding for part in parts], [part.tie_coding for part in parts])
    )
    return Measured(steps, compute, coding, tie_coding)


def _medians(coding: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    return {
        name: [median(times) for times in zip(*of_name, strict=True)]
        for name, of_name in coding.items()
    }


def _step(workers: Workers, name: str, before: int) -> dict[str, Any]:
    """One step: how long until the last host was done, and what each sent and received."""
    answers, counted = workers.turn("step", name=name, before=before)
    # Of all steps of the turn, which send alike.
    setting = METHODS.get(name)
    num_steps = (before + 1) * (1 if setting is None else setting.updates)
    interfaces = [{key: n / num_steps for key, n in host.items()} for host in counted]
    return {
        "seconds": max(answer["seconds"] for answer in answers),
        "loss": answers[-1]["loss"],
        "metered_bytes": answers[0]["metered_bytes"],
        "connections": answers[0]["connections"],
        "ties": answers[0]["ties"],
        "tie_bytes": [answer["tie_bytes"] for answer in answers],
        "sends": answers[0]["sends"],
        "changes": [answer["change"] for answer in answers[:-1]],  # behind the last is no cut
        "interfaces": interfaces,
    }


if __name__ == "__main__":
    main()
