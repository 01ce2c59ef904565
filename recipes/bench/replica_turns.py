"""What `recipes.bench.slow_replicas` lets the replicas do: turns side by side, and trainings."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from tqdm import tqdm

from recipes.bench.hosts import Loopback
from recipes.bench.replica_report import host_bytes
from recipes.bench.replica_variants import ALONE, MPCOMP, REFERENCE
from recipes.bench.slow_link import NOTICE_S, SETTLE_S
from recipes.bench.workers import Worker, begin_all, num_cores, start_workers

# The first connects the hosts, in the second DDP has its final buckets, and torch's PowerSGD has
# its own in the third.
TORCH_WARMUP_STEPS: Final = 4
# Whose median the rate is chosen by.
RATE_TURNS: Final = 3


class Replicas:
    """One process on each host, with a model for each method that is open.

    Args:
        hosts: where they run, and what ends them.
        module: that `start_workers` runs.
        options: of the measurement; here its threads and timeout.
        told: what all workers are told, besides where they meet.
    """

    def __init__(
        self,
        hosts: Loopback,
        module: str,
        options: argparse.Namespace,
        told: Mapping[str, Any],
    ) -> None:
        self.hosts = hosts
        num_threads = options.threads or max(1, num_cores() // hosts.num_hosts)
        common = {
            **told,
            "address": hosts.address(0),
            "port": hosts.free_port(),
            "device": hosts.device,
            "num_threads": num_threads,
            "timeout_s": options.timeout,
        }
        self.workers: list[Worker] = start_workers(hosts, module, common, num_threads)

    def open(self, name: str, seed: int, mbps: float | None) -> int:
        """Makes a model with a method on all replicas; the bytes of its gradients."""
        command = {"do": "open", "name": name, "seed": seed, "mbps": mbps}
        dense_bytes: int = self._ask_all(command)[0]["dense_bytes"]
        return dense_bytes

    def close(self, name: str) -> None:
        """Forgets a method's model."""
        self._ask_all({"do": "close", "name": name})

    def step(self, name: str, count: int) -> list[Any]:
        """Lets all take so many steps, begun at one moment; their answers."""
        return begin_all(self.workers, {"do": "steps", "name": name, "count": count}, NOTICE_S)

    def turn(self, name: str, count: int) -> dict[str, Any]:
        """So many steps: means over them, and what each host sent and received in all of them."""
        before = self.hosts.counters()
        answers = self.step(name, count)
        time.sleep(SETTLE_S)
        pairs = zip(self.hosts.counters(), before, strict=True)
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

    def accuracy(self, name: str) -> float:
        """Of the first replica, on the test images."""
        accuracy: float = self.workers[0].ask({"do": "evaluate", "name": name})["accuracy"]
        return accuracy

    def held_out_loss(self, name: str) -> float:
        """Mean over all ranks, each of which has as much of the held-out text."""
        answers = self._ask_all({"do": "evaluate", "name": name})
        return statistics.mean([float(answer["loss"]) for answer in answers])

    def _ask_all(self, command: Any) -> list[Any]:
        for worker in self.workers:
            worker.tell(command)
        return [worker.hear() for worker in self.workers]


def told_of(options: argparse.Namespace, hang_after_s: float | None = None) -> dict[str, Any]:
    """What the replicas of `recipes.bench.slow_replicas` are told; see its `Job`."""
    data = ("data", "train_limit", "test_limit")
    same = (*data, "model", "width", "batch", "lr", "momentum", "latency_ms", "path")
    chosen = {name: getattr(options, name) for name in same}
    return {"num_replicas": options.replicas, **chosen, "hang_after_s": hang_after_s}


def open_all(
    replicas: Replicas, names: Sequence[str], options: argparse.Namespace
) -> tuple[int, float | None]:
    """Opens all methods, and `ALONE`; the dense bytes, and the rate of the limited links."""
    dense_bytes = replicas.open(REFERENCE, options.seed, None)
    replicas.open(ALONE, options.seed, None)
    for name in (REFERENCE, ALONE):
        replicas.turn(name, TORCH_WARMUP_STEPS)
    mbps: float | None = options.mbps
    if replicas.hosts.device == "lo":
        mbps = None
    elif mbps is None:
        turns = [replicas.turn(ALONE, options.steps) for _ in range(RATE_TURNS)]
        mbps = limiting_mbps(
            statistics.median(turn["seconds"] for turn in turns),
            dense_bytes=dense_bytes,
            num_replicas=options.replicas,
            share=options.share,
        )
    for name in names:
        if name != REFERENCE:
            replicas.open(name, options.seed, mbps)
    return dense_bytes, mbps


def limiting_mbps(compute_s: float, *, dense_bytes: int, num_replicas: int, share: float) -> float:
    """The rate at which communication takes at least ``share`` of the dense step, to two digits.

    Of a ring that sums the gradients every host sends, and receives, 2 (n − 1) / n of them. The
    dense step takes at least that long, even where it computes meanwhile.
    """
    host_bytes = dense_bytes * 2 * (num_replicas - 1) / num_replicas
    return rate_for(host_bytes, compute_s, share=share)


def rate_for(host_bytes: float, compute_s: float, *, share: float) -> float:
    """Mbit/s, to two digits, at which so many bytes take at least ``share`` of a step."""
    return float(f"{8 * host_bytes * (1 - share) / compute_s / 1e6:.1e}")


def side_by_side(
    replicas: Replicas, names: Sequence[str], mbps: float | None, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every turn of every method that is open, after their warm-up; the dense one comes first."""
    turns: list[dict[str, Any]] = []
    unlimited = (ALONE, names[0])
    total = len(names) + options.repeats * (len(unlimited) + len(names))
    with tqdm(total=total, unit="turn", desc=f"{replicas.hosts.num_hosts} hosts") as bar:
        # Adaptive methods settle on the links that they are timed on.
        replicas.hosts.set_rate(mbps)
        for name in names:
            ours = name.startswith(MPCOMP)
            replicas.turn(name, options.warmup_steps if ours else TORCH_WARMUP_STEPS)
            bar.update()
        for repeat in range(options.repeats):
            shift = repeat % len(names)
            rotated = (*names[shift:], *names[:shift])
            for limited, of_turn in ((False, unlimited), (True, rotated)):
                replicas.hosts.set_rate(mbps if limited else None)
                for name in of_turn:
                    where = {"variant": name, "limited": limited, "repeat": repeat}
                    turns.append({**where, **replicas.turn(name, options.steps)})
                    bar.update()
    return turns


def train_all(
    replicas: Replicas, names: Sequence[str], mbps: float | None, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every training of every method to the accuracy, on the limited links."""
    trainings = []
    replicas.hosts.set_rate(mbps)
    seeds = range(options.seed, options.seed + options.seeds)
    with tqdm(total=len(seeds) * len(names), unit="training") as bar:
        for seed in seeds:
            for name in names:
                bar.set_description(name)
                replicas.open(name, seed, mbps)
                training = _train(replicas, name, options)
                trainings.append({"variant": name, "seed": seed, **training})
                replicas.close(name)
                bar.update()
    return trainings


def _train(replicas: Replicas, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains until the accuracy is reached, or gives up."""
    steps, seconds, wire_bytes = 0, 0.0, 0.0
    counted: float | None = None
    looks: list[dict[str, float]] = []
    while steps < options.max_steps and (not looks or looks[-1]["accuracy"] < options.accuracy):
        count = min(options.eval_every, options.max_steps - steps)
        turn = replicas.turn(name, count)
        steps += count
        seconds += count * turn["seconds"]
        wire_bytes += count * turn["wire_bytes"]
        if (sent := host_bytes(turn)) is not None:
            counted = (counted or 0.0) + count * sent
        looks.append({"steps": steps, "seconds": seconds, "accuracy": replicas.accuracy(name)})
    return {
        "reached": looks[-1]["accuracy"] >= options.accuracy,
        "best": max(look["accuracy"] for look in looks),
        "steps": steps,
        "seconds": seconds,
        "wire_bytes": wire_bytes,
        "host_bytes": counted,
        "looks": looks,
    }
