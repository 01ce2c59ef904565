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
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import stages
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.network import PATHS
from recipes.bench import replica_report
from recipes.bench.hosts import open_hosts
from recipes.bench.replica_prediction import predicted_steps
from recipes.bench.replica_turns import (
    Replicas,
    open_all,
    ring_bytes,
    side_by_side,
    told_of,
    train_all,
)
from recipes.bench.replica_variants import (
    ALONE,
    MPCOMP,
    OWN_BUCKETS,
    REFERENCE,
    TORCH,
    Job,
    torch_rank,
)
from recipes.bench.replica_worker import Part
from recipes.bench.report import Record
from recipes.bench.workers import (
    bench_parser,
    choose_hosts,
    machine,
    settings_of,
    too_small,
    work,
    write,
)
from recipes.image_config import MODELS

METHODS: Final = (
    "powersgd:2",
    "ef+topk:0.01",
    "dgc:0.001",
    "onebitsgd",
    "gravac:window=5+topk:0.1",
)
TORCH_METHODS: Final = ("fp16", "powersgd:2")
# Steps in which a hang of torch's PowerSGD would have come; two of them are dense.
HANG_STEPS: Final = 8
MODULE: Final = "recipes.bench.slow_replicas"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes the figures and the plot."""
    options = parse_args(argv)
    if options.worker is not None:
        work(options.worker, Job, Part)
        return
    if problem := _problem(options):
        sys.exit(f"error: {problem}")
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if argv is None else argv)]),
        "settings": settings_of(options),
        "machine": machine(),
        "n": options.repeats,
    }
    names = names_of(options)
    result["tried"] = {
        name + OWN_BUCKETS: _try(name + OWN_BUCKETS, options)
        for name in names
        if name.startswith(f"{TORCH}powersgd") and options.hang_timeout > 0
    }
    with contextlib.ExitStack() as stack:
        hosts = choose_hosts(stack, options.replicas, options)
        replicas = Replicas(hosts, MODULE, options, told_of(options))
        dense_bytes, mbps = open_all(
            replicas, names, options, partial(ring_bytes, num_replicas=options.replicas)
        )
        turns = side_by_side(replicas, names, mbps, options)
        result |= {
            "links": hosts.describe(),
            "mbps": mbps,
            "dense_bytes": dense_bytes,
            "dense": replica_report.dense_figures(turns),
            "figures": _with_predictions(replica_report.summarise(turns), turns, mbps, options),
            "turns": turns,
            "accuracy": [],
            "trainings": [],
        }
        if options.accuracy is not None:
            write(result, options.json)  # trainings take long: what is known stays, whatever comes
            for name in (*names, ALONE):
                replicas.close(name)
            trainings = train_all(replicas, names, mbps, options)
            result["accuracy"] = replica_report.summarise_trainings(trainings)
            result["trainings"] = trainings
    print(replica_report.tables(result))
    print("links:", json.dumps(result["links"]))
    write(result, options.json)
    if options.plot is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        replica_report.plot(result, options.plot)


def _with_predictions(
    figures: Sequence[dict[str, Any]],
    turns: Sequence[Record],
    mbps: float | None,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The figures, those of mpcomp's methods with the time that a plan would have said."""
    if mbps is None:
        return list(figures)  # nothing is limited
    predicted = predicted_steps(
        [figure["variant"] for figure in figures],
        getattr(stages, options.model)(width=options.width),
        compute_s=replica_report.dense_figures(turns)["compute_s"]["median"],
        num_replicas=options.replicas,
        mbps=mbps,
        latency_ms=options.latency_ms,
    )
    return [
        figure | ({"predicted_s": seconds} if (seconds := predicted.get(figure["variant"])) else {})
        for figure in figures
    ]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the measurement."""
    parser = bench_parser(MODULE, __doc__)
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
    add("--json", type=Path, metavar="FILE", help="for the figures and every turn")
    add("--plot", type=Path, metavar="PNG", help="times of a step; accuracy against time")
    return parser.parse_args(argv)


def names_of(options: argparse.Namespace) -> list[str]:
    """All methods that are compared, the dense one first."""
    torchs = [TORCH + hook for hook in options.torch if TORCH + hook != REFERENCE]
    specs = [MPCOMP + spec for spec in options.methods]
    return list(dict.fromkeys((REFERENCE, *torchs, *specs)))


def _problem(options: argparse.Namespace) -> str | None:
    at_least_1 = ("batch", "width", "steps", "repeats", "warmup_steps", "seeds", "eval_every")
    if problem := too_small(options, (*at_least_1, "max_steps", "train_limit", "test_limit")):
        return problem
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


def _try(name: str, options: argparse.Namespace) -> str:
    """Outcome of a method that may never end, over loopback: "works", "hangs" or "crashes"."""
    with open_hosts(options.replicas, loopback=True) as hosts:  # which ends the processes
        replicas = Replicas(hosts, MODULE, options, told_of(options, options.hang_timeout))
        replicas.open(name, options.seed, None)
        try:
            answers = replicas.begin("steps", name=name, count=HANG_STEPS)
        except RuntimeError:  # a worker has ended, and said why
            return "crashes"
    return "hangs" if any(answer.get("hung", False) for answer in answers) else "works"


if __name__ == "__main__":
    main()
