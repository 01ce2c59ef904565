"""Turns of `recipes.bench.slow_replicas`: methods side by side, and trainings."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

from tqdm import tqdm

from recipes.bench.replica_report import host_bytes
from recipes.bench.replica_variants import ALONE, MPCOMP
from recipes.bench.workers import Workers, rotated

# The first connects the hosts, in the second DDP has its final buckets, and torch's PowerSGD has
# its own in the third.
TORCH_WARMUP_STEPS: Final = 4
# Whose median the rate is chosen by.
RATE_TURNS: Final = 3


class Replicas(Workers):
    """One process on each host, with a model for each method that is open."""

    def open(self, name: str, seed: int, mbps: float | None) -> int:
        """Makes a model with a method on all replicas; the bytes of its gradients."""
        dense_bytes: int = self.ask("open", name=name, seed=seed, mbps=mbps)[0]
        return dense_bytes

    def close(self, name: str) -> None:
        """Forgets a method's model."""
        self.ask("close", name=name)

    def steps(self, name: str, count: int) -> dict[str, Any]:
        """A turn of so many steps: means over them, and what each host sent and received in all."""
        answers, interfaces = self.turn("steps", name=name, count=count)
        return {
            "steps": count,
            "seconds": max(answer["seconds"] for answer in answers),
            "loss": statistics.mean(answer["loss"] for answer in answers),
            **{
                key: statistics.mean(answer["means"][key] for answer in answers)
                for key in answers[0]["means"]
            },
            **{key: answers[0][key] for key in ("factors", "at")},
            "interfaces": interfaces,
        }

    def accuracy(self, name: str) -> float:
        """Of the first replica, on the test images."""
        accuracy: float = self.ask_one(0, "evaluate", name=name)
        return accuracy

    def held_out_loss(self, name: str) -> float:
        """Mean over all ranks, each of which has as much of the held-out text."""
        return statistics.mean(float(loss) for loss in self.ask("evaluate", name=name))


def told_of(options: argparse.Namespace, hang_after_s: float | None = None) -> dict[str, Any]:
    """The fields of the `Job` of `recipes.bench.slow_replicas`."""
    data = ("data", "train_limit", "test_limit")
    same = (*data, "model", "width", "batch", "lr", "momentum", "latency_ms", "path")
    chosen = {name: getattr(options, name) for name in same}
    return {**chosen, "hang_after_s": hang_after_s}


def open_all(
    replicas: Replicas,
    names: Sequence[str],
    options: argparse.Namespace,
    sent: Callable[[int], float],
) -> tuple[int, float | None]:
    """Opens all methods, and `ALONE`; the dense bytes, and the rate of the limited links.

    Args:
        replicas: the hosts.
        names: of the methods, the dense one first.
        options: of the command; where ``mbps`` is not given, ``share`` chooses it.
        sent: from the dense bytes to those that a host sends in a dense step.
    """
    dense, *others = names
    dense_bytes = replicas.open(dense, options.seed, None)
    replicas.open(ALONE, options.seed, None)
    for name in (dense, ALONE):
        replicas.steps(name, TORCH_WARMUP_STEPS)
    mbps: float | None = options.mbps
    if replicas.hosts.device == "lo":
        mbps = None
    elif mbps is None:
        host_sends = sent(dense_bytes)
        alone = [replicas.steps(ALONE, options.steps)["seconds"] for _ in range(RATE_TURNS)]
        mbps = rate_for(host_sends, statistics.median(alone), share=options.share)
    for name in others:
        replicas.open(name, options.seed, mbps)
    return dense_bytes, mbps


def ring_bytes(dense_bytes: int, num_replicas: int) -> float:
    """Bytes that every host sends, and receives, in a ring that sums the gradients."""
    return dense_bytes * 2 * (num_replicas - 1) / num_replicas


def rate_for(host_sends: float, compute_s: float, *, share: float) -> float:
    """Mbit/s, to two digits, at which so many bytes take at least ``share`` of a step.

    The step takes at least that long, even where it computes meanwhile.
    """
    return float(f"{8 * host_sends * (1 - share) / compute_s / 1e6:.1e}")


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
            replicas.steps(name, options.warmup_steps if ours else TORCH_WARMUP_STEPS)
            bar.update()
        for repeat in range(options.repeats):
            for limited, of_turn in ((False, unlimited), (True, rotated(names, repeat))):
                replicas.hosts.set_rate(mbps if limited else None)
                for name in of_turn:
                    where = {"variant": name, "limited": limited, "repeat": repeat}
                    turns.append({**where, **replicas.steps(name, options.steps)})
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
        turn = replicas.steps(name, count)
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
