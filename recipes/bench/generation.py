"""Text generation over slow links: seconds to the first token, and tokens a second after it.

    python -m recipes.bench.generation --out docs/results/generation.json

Makes the hosts itself (`recipes.bench.hosts`; needs root), one for each stage of a model of GPT-2's
shape with random weights, with real TCP between them. Within each repetition all methods take
turns on the limited link, in rotating order, and the first of them on the unlimited link as well.
All hosts begin at one moment, and a token has come when the last host has been told it. Text ends
nowhere early, so that all generate the same number of tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tabulate import tabulate
from tqdm import tqdm

import mpcomp
from recipes.bench.generation_worker import TOLD_ALONE, Job, Part
from recipes.bench.report import (
    Record,
    both,
    counted,
    grouped,
    range_of,
    rate_text,
    scaled,
    spread,
    text,
    times_of,
)
from recipes.bench.workers import (
    Workers,
    bench_parser,
    choose_hosts,
    machine,
    rotated,
    settings_of,
    too_small,
    work,
    write,
)

MODULE: Final = "recipes.bench.generation"

#: Of as many numbers in 2 bytes each.
TWO_BYTES: Final = "bf16"
METHODS: Final = ("none", "bf16", "topk:0.1+fp16", "quant:8", "quant:4")
HEADERS: Final = (
    "cuts",
    "Mbit/s",
    "first token, ms",
    "quartiles",
    "tokens/s a row",
    "quartiles",
    "first, times faster",
    f"than {TWO_BYTES}",
    "later, times faster",
    f"than {TWO_BYTES}",
    "kB a cut, prompt",
    "bytes a cut and step",
    "control bytes a step",
    "n",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes the figures."""
    options = parse_args(argv)
    if options.worker is not None:
        work(options.worker, Job, Part)
        return
    if problem := _problem(options):
        sys.exit(f"error: {problem}")
    with contextlib.ExitStack() as stack:
        hosts = choose_hosts(stack, options.stages, options)
        links = hosts.describe()
        runs = _measure(Workers(hosts, MODULE, options, _told(options)), options)
    figures = summarise(runs, num_stages=options.stages, new_tokens=options.new_tokens)
    print(tables(figures))
    print("links:", json.dumps(links))
    result = {
        "settings": settings_of(options),
        "machine": machine(),
        "links": links,
        "figures": figures,
        "runs": runs,
    }
    write(result, options.out)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the measurement."""
    parser = bench_parser(MODULE, __doc__)
    add = parser.add_argument
    add("--stages", type=int, default=2, help="one host each")
    add("--rate", type=float, default=10.0, help="Mbit/s of every host each way")
    add("--methods", nargs="+", default=list(METHODS), metavar="SPEC",
        help="of the activations; the first is what others are compared to")  # fmt: skip
    add("--batches", type=int, nargs="+", default=[1, 8], help="prompts at a time")
    add("--prompt", type=int, default=128, help="tokens")
    add("--new-tokens", type=int, default=64)
    add("--hidden", type=int, default=512)
    add("--blocks", type=int, default=8)
    add("--heads", type=int, default=8)
    add("--vocab", type=int, default=50257)
    add("--repeats", type=int, default=5)
    add("--out", type=Path, help="JSON file for the figures and every run")
    return parser.parse_args(argv)


def _problem(options: argparse.Namespace) -> str | None:
    if problem := too_small(options, ("repeats", "prompt")):
        return problem
    if min(options.batches) < 1:
        return f"batches has {min(options.batches)}; pass numbers of at least 1"
    if options.new_tokens < 2:
        return f"new tokens are {options.new_tokens}; pass at least 2, the first is timed apart"
    if not 2 <= options.stages <= options.blocks:
        return f"stages is {options.stages}; pass 2 to --blocks {options.blocks}"
    if options.hidden % options.heads:
        return f"hidden is {options.hidden}; pass a multiple of --heads {options.heads}"
    if not options.rate > 0:
        return f"rate is {options.rate:g}; pass Mbit/s above 0"
    try:
        for method in options.methods:
            mpcomp.parse(method)
    except ValueError as error:
        return str(error)
    return None


def _told(options: argparse.Namespace) -> dict[str, Any]:
    same = ("hidden", "heads", "vocab", "prompt", "new_tokens", "seed", "methods")
    return {"num_blocks": options.blocks, **{name: getattr(options, name) for name in same}}


def _measure(workers: Workers, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every generation, and the telling of its tokens alone."""
    names: list[str] = options.methods
    hosts = workers.hosts
    for batch in options.batches:
        for name in names:  # the shapes of a prompt and of a token become known
            _run(workers, name, batch, 2)
    limited = None if hosts.device == "lo" else options.rate
    runs: list[dict[str, Any]] = []
    per_batch = len(names) + 1 + (2 if limited is not None else 0)
    total = options.repeats * len(options.batches) * per_batch
    with tqdm(total=total, unit="run", desc=f"{hosts.num_hosts} stages") as bar:
        for repeat in range(options.repeats):
            turns = [(limited, name) for name in (*rotated(names, repeat), TOLD_ALONE)]
            if limited is not None:
                turns += [(None, names[0]), (None, TOLD_ALONE)]
            rate_now: float | None = None
            for batch in options.batches:
                for rate, name in turns:
                    if rate != rate_now:
                        hosts.set_rate(rate)
                        rate_now = rate
                    where = {"batch": batch, "rate_mbps": rate, "variant": name, "repeat": repeat}
                    runs.append({**where, **_run(workers, name, batch, options.new_tokens)})
                    bar.update()
            hosts.set_rate(None)
    return runs


def _run(workers: Workers, name: str, batch: int, new_tokens: int) -> dict[str, Any]:
    """One generation, timed until the last host was told; bytes are of all hosts."""
    sizes = {"batch": batch, "new_tokens": new_tokens}
    if name == TOLD_ALONE:
        answers, interfaces = workers.turn("tell", **sizes)
        seconds = max(answer["seconds"] for answer in answers)
        return {"interfaces": interfaces, "seconds": seconds}
    answers, interfaces = workers.turn("generate", method=name, **sizes)
    if any(answer["tokens"] != answers[0]["tokens"] for answer in answers):
        raise RuntimeError(f"{name}: hosts were told different tokens")
    first = max(answer["first_s"] for answer in answers)
    later = max(answer["last_s"] for answer in answers) - first
    bytes_sent = {
        key: sum(answer[key] for answer in answers) for key in ("prompt_bytes", "later_bytes")
    }
    timed = {"first_s": first, "tokens_per_s": (new_tokens - 1) / later}
    return {"interfaces": interfaces, **timed, **bytes_sent}


def summarise(runs: Sequence[Record], *, num_stages: int, new_tokens: int) -> list[dict[str, Any]]:
    """One figure for each batch, rate and variant, in the order of measurement."""
    groups = grouped(runs, lambda run: (run["batch"], run["rate_mbps"], run["variant"]))
    reference = {batch: _reference(runs, batch) for batch, *_ in groups}
    figures: list[dict[str, Any]] = []
    for (batch, rate, name), own in groups.items():
        figure: dict[str, Any] = {"batch": batch, "rate_mbps": rate, "variant": name}
        figure["n"] = len(own)
        # Told alone, all that is counted is that; else what is neither a message nor a header.
        if name == TOLD_ALONE:
            figure["told_s"] = spread([run["seconds"] / new_tokens for run in own])
            figure["told_bytes"] = _control(own, 0, 0.0, new_tokens)
            figures.append(figure)
            continue
        cuts = num_stages - 1
        sent = statistics.mean(run["prompt_bytes"] + run["later_bytes"] for run in own)
        later = statistics.mean(run["later_bytes"] for run in own)
        base = reference[batch]
        pairs = [(base[run["repeat"]], run) for run in own]
        figures.append(
            {
                **figure,
                "first_s": spread([run["first_s"] for run in own]),
                "tokens_per_s": spread([run["tokens_per_s"] for run in own]),
                "first_speedup": spread([one["first_s"] / run["first_s"] for one, run in pairs]),
                "later_speedup": spread(
                    [run["tokens_per_s"] / one["tokens_per_s"] for one, run in pairs]
                ),
                "prompt_bytes": statistics.mean(run["prompt_bytes"] for run in own) / cuts,
                "step_bytes": later / cuts / (new_tokens - 1),
                "control_bytes": _control(own, cuts * new_tokens, sent, new_tokens),
            }
        )
    return figures


def _reference(runs: Sequence[Record], batch: int) -> dict[int, Record]:
    """By repetition: the first method, where the link is limited if it ever is."""
    limited = any(run["rate_mbps"] is not None for run in runs)
    name = runs[0]["variant"]
    return {
        run["repeat"]: run
        for run in runs
        if (run["batch"], run["variant"], run["rate_mbps"] is not None) == (batch, name, limited)
    }


def _control(
    runs: Sequence[Record], num_messages: int, message_bytes: float, steps: int
) -> float | None:
    """Bytes a step that interfaces sent beside messages and headers; None if none counts."""
    sent = counted(runs, num_messages)
    return None if sent is None else (sent[0] - message_bytes - sent[1]) / steps


def tables(figures: Sequence[Record]) -> str:
    """One table for each number of prompts, and what telling all ranks a token costs by itself."""
    parts = []
    for batch in dict.fromkeys(figure["batch"] for figure in figures):
        own = [figure for figure in figures if figure["batch"] == batch]
        limited = [figure for figure in own if figure["rate_mbps"] == own[0]["rate_mbps"]]
        rows = [_row(figure, limited) for figure in own if figure["variant"] != TOLD_ALONE]
        parts.append(f"batch {batch}")
        parts.append(tabulate(rows, HEADERS, disable_numparse=True))
        for figure in own:
            if figure["variant"] == TOLD_ALONE:
                told = figure["told_s"]
                parts.append(
                    f"tokens told alone, {_rate(figure)}: {text(told, 1e3, '.2f')} ms a step "
                    f"({range_of(told, 1e3, '.2f')})"
                )
    parts.append(
        "a step: one token of each row; times faster: than the first method on the limited link, "
        "in the same repetition, than bf16 there of medians\n"
        "control: counted by interfaces, beside messages and headers"
    )
    return "\n\n".join(parts)


def _rate(figure: Record) -> str:
    return rate_text(figure["rate_mbps"]).removesuffix(" Mbit/s")


def _faster(limited: Sequence[Record], figure: Record) -> str:
    """Tokens a second over those of bf16."""
    of = next((row["tokens_per_s"] for row in limited if row["variant"] == TWO_BYTES), None)
    if of is None:
        return "–"
    return f"{figure['tokens_per_s']['median'] / of['median']:.2f}"


def _row(figure: Record, limited: Sequence[Record]) -> tuple[str, ...]:
    return (
        figure["variant"],
        _rate(figure),
        *both(figure["first_s"], 1e3, ".0f"),
        *both(figure["tokens_per_s"], 1, ".1f"),
        text(figure["first_speedup"], 1, ".2f"),
        times_of(limited, TWO_BYTES, "first_s", figure),
        text(figure["later_speedup"], 1, ".2f"),
        _faster(limited, figure),
        f"{figure['prompt_bytes'] / 1e3:.1f}",
        f"{figure['step_bytes']:.0f}",
        scaled(figure["control_bytes"], 1, ".0f"),
        str(figure["n"]),
    )


if __name__ == "__main__":
    main()
