"""Data-parallel training over slow links: torch's DDP, its hooks and mpcomp's, in one run.

    python -m recipes.bench.slow_replicas --json slow_replicas.json --plot slow_replicas.png
    python -m recipes.bench.slow_replicas --accuracy 0.95 --seeds 3 --json time_to_95.json

Makes the hosts itself (`recipes.bench.hosts`; needs root), one for each replica of a ResNet, with
real TCP (gloo) between them. Their rate is such that the dense step is communication for the most
part, from the computation measured at the start, or what --mbps says.

Within each repetition all methods take turns, in rotating order, so that a slow moment of the
machine meets all of them: first the step without communication and the dense step on unlimited
links, then every method for a few steps on the limited ones. A step is forward, loss, backward with
its communication, and the update; a turn's steps follow one another, begin on all hosts at one
moment and end when the last host is done. Statistics of BatchNorm are not sent.

With --accuracy, each method then trains on the limited links until the test accuracy of one replica
is reached; the clock stands still while it is judged. Without the rights for namespaces everything
runs over loopback, unlimited.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

import mpcomp
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.network import PATHS
from recipes.bench import replica_report
from recipes.bench.hosts import Loopback, open_hosts
from recipes.bench.replica_worker import (
    ALONE,
    MPCOMP,
    OWN_BUCKETS,
    REFERENCE,
    TORCH,
    Job,
    torch_rank,
    work,
)
from recipes.bench.slow_link import NOTICE_S, SETTLE_S
from recipes.bench.workers import Worker, begin_all, choose_hosts, num_cores, start_workers
from recipes.image_config import MODELS

METHODS: Final = (
    "powersgd:2",
    "ef+topk:0.01",
    "dgc:0.001",
    "onebitsgd",
    "gravac:window=5+topk:0.1",
)
TORCH_METHODS: Final = ("fp16", "powersgd:2")
# The first connects the hosts, in the second DDP has its final buckets, and torch's PowerSGD has
# its own in the third.
TORCH_WARMUP_STEPS: Final = 4
# Steps in which a hang of torch's PowerSGD would have come; two of them are dense.
HANG_STEPS: Final = 8
# Whose median the rate is chosen by.
RATE_TURNS: Final = 3
MODULE: Final = "recipes.bench.slow_replicas"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes the figures and the plot."""
    options = parse_args(argv)
    if options.worker is not None:
        work(Job(**json.loads(options.worker)))
        return
    if problem := _problem(options):
        sys.exit(f"error: {problem}")
    hangs = {
        name + OWN_BUCKETS: _hangs(name + OWN_BUCKETS, options)
        for name in names_of(options)
        if name.startswith(f"{TORCH}powersgd") and options.hang_timeout > 0
    }
    with contextlib.ExitStack() as stack:
        hosts = choose_hosts(
            stack, options.replicas, latency_ms=options.latency_ms, loopback=options.loopback
        )
        arguments = sys.argv[1:] if argv is None else argv
        result = {
            "command": shlex.join(["python", "-m", MODULE, *arguments]),
            "settings": _settings(options),
            "machine": _machine(),
            "links": hosts.describe(),
            "n": options.repeats,
            "hangs": hangs,
            **_measure(hosts, options),
        }
    print(replica_report.tables(result))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))
    if options.plot is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        replica_report.plot(result, options.plot)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the measurement."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--methods", nargs="*", default=list(METHODS), metavar="SPEC", help="of mpcomp")
    add("--torch", nargs="*", default=list(TORCH_METHODS), metavar="HOOK",
        help="of torch beside dense DDP: fp16, powersgd:<rank>")  # fmt: skip
    add("--path", choices=PATHS, default="auto", help="of mpcomp's messages that cannot be added")
    add("--replicas", type=int, default=4, help="one host each")
    add("--mbps", type=float, help="Mbit/s of every host each way; by default from --share")
    add("--share", type=float, default=0.88,
        help="of communication in the dense step, for which the rate is chosen")  # fmt: skip
    add("--model", choices=MODELS, default="resnet18")
    add("--width", type=int, default=16)
    add("--batch", type=int, default=8, help="images of one replica in a step")
    add("--lr", type=float, default=0.05)
    add("--momentum", type=float, default=0.9)
    add("--data", default="digits", help="digits, or a folder of CIFAR-10's parquet files")
    add("--train-limit", type=int, help="images")
    add("--test-limit", type=int, help="images")
    add("--steps", type=int, default=3, help="of each method in a turn")
    add("--repeats", type=int, default=7, help="turns of each method")
    add("--warmup-steps", type=int, default=40,
        help="of each method of mpcomp on the limited links before the clock runs")  # fmt: skip
    add("--hang-timeout", type=float, default=20.0,
        help="seconds for torch's PowerSGD with DDP's own buckets; 0: do not try")  # fmt: skip
    add("--accuracy", type=float, metavar="TARGET", help="also trains to this test accuracy, 0–1")
    add("--seeds", type=int, default=3, help="trainings of each method to the accuracy")
    add("--eval-every", type=int, default=10, help="steps between two looks at the accuracy")
    add("--max-steps", type=int, default=800, help="until a training gives up")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="of torch on each host; by default the cores are shared out")
    add("--latency-ms", type=float, default=0.0, help="one way, where the kernel has netem")
    add("--timeout", type=float, default=120.0, help="seconds until a silent peer is an error")
    add("--loopback", action="store_true", help="no namespaces")
    add("--json", type=Path, metavar="FILE", help="for the figures and every turn")
    add("--plot", type=Path, metavar="PNG", help="times of a step; accuracy against time")
    add("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def names_of(options: argparse.Namespace) -> list[str]:
    """All methods that are compared, the dense one first."""
    torchs = [TORCH + hook for hook in options.torch if TORCH + hook != REFERENCE]
    specs = [MPCOMP + spec for spec in options.methods]
    return list(dict.fromkeys((REFERENCE, *torchs, *specs)))


def limiting_mbps(compute_s: float, *, dense_bytes: int, num_replicas: int, share: float) -> float:
    """The rate at which communication takes at least ``share`` of the dense step, to two digits.

    Of a ring that sums the gradients every host sends, and receives, 2 (n − 1) / n of them. The
    dense step takes at least that long, even where it computes meanwhile.
    """
    host_bits = 8 * dense_bytes * 2 * (num_replicas - 1) / num_replicas
    mbps = host_bits * (1 - share) / compute_s / 1e6
    return float(f"{mbps:.1e}")


def _problem(options: argparse.Namespace) -> str | None:
    at_least_1 = ("batch", "width", "steps", "repeats", "warmup_steps", "seeds", "eval_every")
    for name in (*at_least_1, "max_steps", "threads", "train_limit", "test_limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            return f"{name} is {getattr(options, name)}; pass at least 1"
    if options.replicas < 2:
        return f"replicas is {options.replicas}; pass at least 2"
    if options.mbps is not None and not 0 < options.mbps < math.inf:
        return f"mbps is {options.mbps:g}; pass Mbit/s above 0"
    for name in ("share", "accuracy"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1:
            return f"{name} is {value:g}; pass a fraction between 0 and 1"
    try:
        for hook in options.torch:
            torch_rank(hook)
        for spec in options.methods:
            replica_method_of(spec)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _measure(hosts: Loopback, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the report is made of."""
    names = names_of(options)
    workers = _start(hosts, options)
    dense_bytes = _open(workers, REFERENCE, options.seed, None)
    _open(workers, ALONE, options.seed, None)
    for name in (REFERENCE, ALONE):
        _turn(hosts, workers, name, TORCH_WARMUP_STEPS)
    mbps = _mbps(hosts, workers, dense_bytes, options)
    for name in names[1:]:
        _open(workers, name, options.seed, mbps)
    turns = _side_by_side(hosts, workers, names, mbps, options)
    for name in (*names, ALONE):
        _ask_all(workers, {"do": "close", "name": name})
    trainings = [] if options.accuracy is None else _trainings(hosts, workers, names, mbps, options)
    return {
        "mbps": mbps,
        "dense_bytes": dense_bytes,
        "dense": replica_report.dense_figures(turns),
        "figures": replica_report.summarise(turns),
        "accuracy": replica_report.summarise_trainings(trainings),
        "turns": turns,
        "trainings": trainings,
    }


def _mbps(
    hosts: Loopback, workers: Sequence[Worker], dense_bytes: int, options: argparse.Namespace
) -> float | None:
    """The rate of the limited links; None where there are none."""
    if hosts.device == "lo":
        return None
    if options.mbps is not None:
        return float(options.mbps)
    turns = [_turn(hosts, workers, ALONE, options.steps) for _ in range(RATE_TURNS)]
    return limiting_mbps(
        statistics.median(turn["seconds"] for turn in turns),
        dense_bytes=dense_bytes,
        num_replicas=options.replicas,
        share=options.share,
    )


def _side_by_side(
    hosts: Loopback,
    workers: Sequence[Worker],
    names: Sequence[str],
    mbps: float | None,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Every turn of every method, after their warm-up."""
    turns: list[dict[str, Any]] = []
    unlimited = (ALONE, REFERENCE)
    total = len(names) + options.repeats * (len(unlimited) + len(names))
    with tqdm(total=total, unit="turn", desc=f"{len(workers)} replicas") as bar:
        # Adaptive methods settle on the links that they are timed on.
        hosts.set_rate(mbps)
        for name in names:
            ours = name.startswith(MPCOMP)
            _turn(hosts, workers, name, options.warmup_steps if ours else TORCH_WARMUP_STEPS)
            bar.update()
        for repeat in range(options.repeats):
            shift = repeat % len(names)
            rotated = (*names[shift:], *names[:shift])
            for limited, of_turn in ((False, unlimited), (True, rotated)):
                hosts.set_rate(mbps if limited else None)
                for name in of_turn:
                    where = {"variant": name, "limited": limited, "repeat": repeat}
                    turns.append({**where, **_turn(hosts, workers, name, options.steps)})
                    bar.update()
    return turns


def _trainings(
    hosts: Loopback,
    workers: Sequence[Worker],
    names: Sequence[str],
    mbps: float | None,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Every training of every method to the accuracy."""
    trainings = []
    hosts.set_rate(mbps)
    seeds = range(options.seed, options.seed + options.seeds)
    with tqdm(total=len(seeds) * len(names), unit="training") as bar:
        for seed in seeds:
            for name in names:
                bar.set_description(name)
                _open(workers, name, seed, mbps)
                training = _train(hosts, workers, name, options)
                trainings.append({"variant": name, "seed": seed, **training})
                _ask_all(workers, {"do": "close", "name": name})
                bar.update()
    return trainings


def _train(
    hosts: Loopback, workers: Sequence[Worker], name: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains until the accuracy is reached, or gives up."""
    steps, seconds, wire_bytes = 0, 0.0, 0.0
    host_bytes: float | None = None
    looks: list[dict[str, float]] = []
    while steps < options.max_steps and (not looks or looks[-1]["accuracy"] < options.accuracy):
        count = min(options.eval_every, options.max_steps - steps)
        turn = _turn(hosts, workers, name, count)
        steps += count
        seconds += count * turn["seconds"]
        wire_bytes += count * turn["wire_bytes"]
        if (sent := replica_report.host_bytes(turn)) is not None:
            host_bytes = (host_bytes or 0.0) + count * sent
        accuracy = workers[0].ask({"do": "evaluate", "name": name})["accuracy"]
        looks.append({"steps": steps, "seconds": seconds, "accuracy": accuracy})
    return {
        "reached": looks[-1]["accuracy"] >= options.accuracy,
        "best": max(look["accuracy"] for look in looks),
        "steps": steps,
        "seconds": seconds,
        "wire_bytes": wire_bytes,
        "host_bytes": host_bytes,
        "looks": looks,
    }


def _hangs(name: str, options: argparse.Namespace) -> bool:
    """Whether a method never ends, over loopback; its processes are ended anyway."""
    with open_hosts(options.replicas, loopback=True) as hosts:
        workers = _start(hosts, options, hang_after_s=options.hang_timeout)
        _open(workers, name, options.seed, None)
        answers = begin_all(workers, {"do": "steps", "name": name, "count": HANG_STEPS}, NOTICE_S)
    return any(answer.get("hung", False) for answer in answers)


def _turn(hosts: Loopback, workers: Sequence[Worker], name: str, count: int) -> dict[str, Any]:
    """So many steps: means over them, and what each host sent and received in all of them."""
    before = hosts.counters()
    answers = begin_all(workers, {"do": "steps", "name": name, "count": count}, NOTICE_S)
    time.sleep(SETTLE_S)
    pairs = zip(hosts.counters(), before, strict=True)
    return {
        "steps": count,
        "seconds": max(answer["seconds"] for answer in answers),
        "loss": statistics.mean(answer["loss"] for answer in answers),
        **{
            key: statistics.mean(answer["means"][key] for answer in answers)
            for key in answers[0]["means"]
        },
        **{key: answers[0][key] for key in ("factors", "at")},
        "interfaces": [asdict(after - earlier) for after, earlier in pairs],
    }


def _open(workers: Sequence[Worker], name: str, seed: int, mbps: float | None) -> int:
    """Makes a model with its method on all replicas; the bytes of its gradients."""
    command = {"do": "open", "name": name, "seed": seed, "mbps": mbps}
    dense_bytes: int = _ask_all(workers, command)[0]["dense_bytes"]
    return dense_bytes


def _ask_all(workers: Sequence[Worker], command: Any) -> list[Any]:
    for worker in workers:
        worker.tell(command)
    return [worker.hear() for worker in workers]


def _start(
    hosts: Loopback, options: argparse.Namespace, *, hang_after_s: float | None = None
) -> list[Worker]:
    num_threads = options.threads or max(1, num_cores() // options.replicas)
    same = ("data", "train_limit", "test_limit", "model", "width", "batch", "lr", "momentum")
    common = {
        "num_replicas": options.replicas,
        "address": hosts.address(0),
        "port": hosts.free_port(),
        "device": hosts.device,
        "num_threads": num_threads,
        "timeout_s": options.timeout,
        **{name: getattr(options, name) for name in same},
        "latency_ms": options.latency_ms,
        "path": options.path,
        "hang_after_s": hang_after_s,
    }
    return start_workers(hosts, MODULE, common, num_threads)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    unsaid = ("json", "plot", "worker")
    return {name: value for name, value in vars(options).items() if name not in unsaid}


def _machine() -> dict[str, Any]:
    return {
        "cores": num_cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpcomp": mpcomp.__version__,
    }


if __name__ == "__main__":
    main()
