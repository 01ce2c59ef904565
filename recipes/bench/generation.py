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
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from tabulate import tabulate
from tqdm import tqdm

import mpcomp
from recipes.bench.generation_worker import TOLD_ALONE, Job, work
from recipes.bench.hosts import Loopback
from recipes.bench.link_bound import header_bytes
from recipes.bench.local_overhead import quartiles
from recipes.bench.workers import Worker, begin_all, choose_hosts, num_cores, start_workers

METHODS: Final = ("none", "bf16", "topk:0.1+fp16", "quant:8", "quant:4")
# Late acknowledgements are still counted: Linux holds one back for 40 ms.
SETTLE_S: Final = 0.06
# From the word to begin until the clock runs; longer than the word takes to reach all workers.
NOTICE_S: Final = 0.02

Record = Mapping[str, Any]

HEADERS: Final = (
    "cuts",
    "Mbit/s",
    "first token, ms",
    "quartiles",
    "tokens/s a row",
    "quartiles",
    "first, times faster",
    "later, times faster",
    "kB a cut, prompt",
    "bytes a cut and step",
    "control bytes a step",
    "n",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes the figures."""
    options = parse_args(argv)
    if options.worker is not None:
        work(Job(**json.loads(options.worker)))
        return
    if problem := _problem(options):
        sys.exit(f"error: {problem}")
    with contextlib.ExitStack() as stack:
        hosts = choose_hosts(stack, options.stages, latency_ms=options.latency_ms,
            loopback=options.loopback)  # fmt: skip
        links = hosts.describe()
        workers = _start(hosts, options)
        runs = _measure(hosts, workers, options)
    figures = summarise(runs, num_stages=options.stages, new_tokens=options.new_tokens)
    print(tables(figures))
    print("links:", json.dumps(links))
    if options.out is not None:
        unsaid = ("out", "worker")
        result = {
            "settings": {name: v for name, v in vars(options).items() if name not in unsaid},
            "machine": {
                "cores": num_cores(),
                "kernel": platform.release(),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "links": links,
            "figures": figures,
            "runs": runs,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="of torch on each host; by default the cores are shared out")
    add("--latency-ms", type=float, default=0.0, help="one way, where the kernel has netem")
    add("--timeout", type=float, default=120.0, help="seconds until a silent peer is an error")
    add("--loopback", action="store_true", help="no namespaces")
    add("--out", type=Path, help="JSON file for the figures and every run")
    add("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _problem(options: argparse.Namespace) -> str | None:
    for name in ("repeats", "prompt", "threads"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            return f"{name} is {getattr(options, name)}; pass at least 1"
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


def _start(hosts: Loopback, options: argparse.Namespace) -> list[Worker]:
    num_threads = options.threads or max(1, num_cores() // options.stages)
    common = {
        "num_stages": options.stages,
        "address": hosts.address(0),
        "port": hosts.free_port(),
        "device": hosts.device,
        "num_threads": num_threads,
        "num_blocks": options.blocks,
        "hidden": options.hidden,
        "heads": options.heads,
        "vocab": options.vocab,
        "prompt": options.prompt,
        "new_tokens": options.new_tokens,
        "seed": options.seed,
        "timeout_s": options.timeout,
        "methods": options.methods,
    }
    return start_workers(hosts, "recipes.bench.generation", common, num_threads)


def _measure(
    hosts: Loopback, workers: Sequence[Worker], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every generation, and the telling of its tokens alone."""
    names: list[str] = options.methods
    for batch in options.batches:
        for name in names:  # the shapes of a prompt and of a token become known
            _run(hosts, workers, name, batch, 2)
    limited = None if hosts.device == "lo" else options.rate
    runs: list[dict[str, Any]] = []
    per_batch = len(names) + 1 + (2 if limited is not None else 0)
    total = options.repeats * len(options.batches) * per_batch
    with tqdm(total=total, unit="run", desc=f"{len(workers)} stages") as bar:
        for repeat in range(options.repeats):
            shift = repeat % len(names)
            turns = [(limited, name) for name in (*names[shift:], *names[:shift], TOLD_ALONE)]
            if limited is not None:
                turns += [(None, names[0]), (None, TOLD_ALONE)]
            rate_now: float | None = None
            for batch in options.batches:
                for rate, name in turns:
                    if rate != rate_now:
                        hosts.set_rate(rate)
                        rate_now = rate
                    where = {"batch": batch, "rate_mbps": rate, "variant": name, "repeat": repeat}
                    runs.append({**where, **_run(hosts, workers, name, batch, options.new_tokens)})
                    bar.update()
            hosts.set_rate(None)
    return runs


def _run(
    hosts: Loopback, workers: Sequence[Worker], name: str, batch: int, new_tokens: int
) -> dict[str, Any]:
    """One generation, timed until the last host was told; bytes are of all hosts."""
    command = {"variant": name, "batch": batch, "new_tokens": new_tokens}
    before = hosts.counters()
    answers = begin_all(workers, command, NOTICE_S)
    time.sleep(SETTLE_S)
    pairs = zip(hosts.counters(), before, strict=True)
    found: dict[str, Any] = {"interfaces": [asdict(after - earlier) for after, earlier in pairs]}
    if name == TOLD_ALONE:
        return {**found, "seconds": max(answer["seconds"] for answer in answers)}
    if any(answer["tokens"] != answers[0]["tokens"] for answer in answers):
        raise RuntimeError(f"{name}: hosts were told different tokens")
    first = max(answer["first_s"] for answer in answers)
    later = max(answer["last_s"] for answer in answers) - first
    bytes_sent = {
        key: sum(answer[key] for answer in answers) for key in ("prompt_bytes", "later_bytes")
    }
    return {**found, "first_s": first, "tokens_per_s": (new_tokens - 1) / later, **bytes_sent}


def summarise(runs: Sequence[Record], *, num_stages: int, new_tokens: int) -> list[dict[str, Any]]:
    """One figure for each batch, rate and variant, in the order of measurement."""
    grouped: dict[tuple[int, float | None, str], list[Record]] = {}
    for run in runs:
        grouped.setdefault((run["batch"], run["rate_mbps"], run["variant"]), []).append(run)
    reference = {batch: _reference(runs, batch) for batch, *_ in grouped}
    figures: list[dict[str, Any]] = []
    for (batch, rate, name), own in grouped.items():
        figure: dict[str, Any] = {"batch": batch, "rate_mbps": rate, "variant": name}
        figure["n"] = len(own)
        # Told alone, all that is counted is that; else what is neither a message nor a header.
        if name == TOLD_ALONE:
            figure["told_s"] = _spread([run["seconds"] / new_tokens for run in own])
            figure["told_bytes"] = _counted(own, 0, 0.0, new_tokens)
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
                "first_s": _spread([run["first_s"] for run in own]),
                "tokens_per_s": _spread([run["tokens_per_s"] for run in own]),
                "first_speedup": _spread([one["first_s"] / run["first_s"] for one, run in pairs]),
                "later_speedup": _spread(
                    [run["tokens_per_s"] / one["tokens_per_s"] for one, run in pairs]
                ),
                "prompt_bytes": statistics.mean(run["prompt_bytes"] for run in own) / cuts,
                "step_bytes": later / cuts / (new_tokens - 1),
                "control_bytes": _counted(own, cuts * new_tokens, sent, new_tokens),
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


def _counted(
    runs: Sequence[Record], num_messages: int, message_bytes: float, steps: int
) -> float | None:
    """Bytes a step that interfaces sent beside messages and headers; None if none counts."""
    if not runs[0]["interfaces"]:
        return None
    packets, counted = (
        statistics.mean(sum(host[name] for host in run["interfaces"]) for run in runs)
        for name in ("tx_packets", "tx_bytes")
    )
    headers = header_bytes(round(packets), num_messages)
    return float(counted - message_bytes - headers) / steps


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "quartiles": quartiles(values)}


def tables(figures: Sequence[Record]) -> str:
    """One table for each number of prompts, and what telling all ranks a token costs by itself."""
    parts = []
    for batch in dict.fromkeys(figure["batch"] for figure in figures):
        own = [figure for figure in figures if figure["batch"] == batch]
        rows = [_row(figure) for figure in own if figure["variant"] != TOLD_ALONE]
        parts.append(f"batch {batch}")
        parts.append(tabulate(rows, HEADERS, disable_numparse=True))
        for figure in own:
            if figure["variant"] == TOLD_ALONE:
                low, high = (f"{1e3 * each:.2f}" for each in figure["told_s"]["quartiles"])
                median = 1e3 * figure["told_s"]["median"]
                rate = _rate(figure)
                parts.append(f"tokens told alone, {rate}: {median:.2f} ms a step ({low} to {high})")
    parts.append(
        "a step: one token of each row; times faster: than the first method on the limited link, "
        "in the same repetition\ncontrol: counted by interfaces, beside messages and headers"
    )
    return "\n\n".join(parts)


def _rate(figure: Record) -> str:
    return "unlimited" if figure["rate_mbps"] is None else f"{figure['rate_mbps']:g}"


def _row(figure: Record) -> tuple[str, ...]:
    def spread(name: str, scale: float, form: str) -> tuple[str, str]:
        low, high = (format(scale * each, form) for each in figure[name]["quartiles"])
        return format(scale * figure[name]["median"], form), f"{low} to {high}"

    control = figure["control_bytes"]
    return (
        figure["variant"],
        _rate(figure),
        *spread("first_s", 1e3, ".0f"),
        *spread("tokens_per_s", 1, ".1f"),
        spread("first_speedup", 1, ".2f")[0],
        spread("later_speedup", 1, ".2f")[0],
        f"{figure['prompt_bytes'] / 1e3:.1f}",
        f"{figure['step_bytes']:.0f}",
        "–" if control is None else f"{control:.0f}",
        str(figure["n"]),
    )


if __name__ == "__main__":
    main()
