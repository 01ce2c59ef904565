"""A log of what replicas exchange: floats and bytes of each step, gains, and where time goes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Reversible, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import mpcomp
from mpcomp.core.sent import Sent, below_bf16

T = TypeVar("T")

#: The parts of a step, in the order of the picture.
PARTS = ("data_s", "compute_s", "encode_s", "wait_s", "decode_s")


class NewSteps:
    """The entries of a history of the last steps that are in no file yet.

    A history forgets, so `note_step` is called more often than it is long.

    Args:
        history: entries with the number of their ``step``, ascending; it may be added to.
    """

    def __init__(self, history: Reversible[Mapping[str, Any]]) -> None:
        self._history = history
        self._noted = 0
        self._steps: list[dict[str, Any]] = []

    def note_step(self) -> None:
        """Takes down the step that has ended."""
        new = list(takewhile(lambda e: e["step"] >= self._noted, reversed(self._history)))
        self._steps += map(dict, reversed(new))
        if new:
            self._noted = new[0]["step"] + 1

    def new_steps(self) -> list[dict[str, Any]]:
        """Entries of the steps since the last call."""
        self.note_step()
        steps, self._steps = self._steps, []
        return steps


class ReplicaLog(NewSteps):
    """Counts, for the run folder, what the replicas of a pipeline exchange; nothing without.

    Args:
        pipe: the pipeline.
    """

    def __init__(self, pipe: mpcomp.Pipeline) -> None:
        self._exchange = pipe.exchange
        self._data_s = 0.0
        super().__init__(() if self._exchange is None else self._exchange.history)

    @property
    def active(self) -> bool:
        """Whether gradients between replicas are compressed by mpcomp."""
        return self._exchange is not None

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches; the time that they take to come is counted."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._data_s += time.perf_counter() - start
            yield batch

    def start_epoch(self) -> None:
        """Begins to count the parts of an epoch's time."""
        self._start = time.perf_counter()
        self._data_s = 0.0
        if self._exchange is not None:
            totals = self._exchange.totals
            self._before = (totals.encode_s, totals.wait_s, totals.decode_s)

    def end_epoch(self) -> dict[str, Any]:
        """The part of replicas in an epoch's entry of the history: totals, and this epoch's time.

        ``scaling_efficiency`` is T_N / (N T_1), T in samples a second: the time that one replica
        would have taken for its part of the data (data and compute), over that of the epoch.
        """
        if self._exchange is None:
            return {}
        seconds = time.perf_counter() - self._start
        report = self._exchange.report()
        spent = [report[name] - b for name, b in zip(PARTS[2:], self._before, strict=True)]
        parts = {**dict(zip(PARTS[2:], spent, strict=True)), "data_s": self._data_s}
        parts["compute_s"] = max(0.0, seconds - sum(parts.values()))
        told = ("floats", "wire_bytes", "dense_bytes", "traffic_bytes", "dense_traffic_bytes")
        return {
            "replicas": {
                **{name: report[name] for name in told},
                **{name: parts[name] for name in PARTS},
                "scaling_efficiency": (parts["data_s"] + parts["compute_s"]) / seconds,
                **{name: report[name] for name in ("cf", "gain", "critical") if name in report},
            }
        }


def append_steps(path: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    """Adds entries to a file of JSON lines, in place of those of the same steps and later ones."""
    if not steps:
        return
    kept = [s for s in read_steps(path) if s["step"] < steps[0]["step"]]
    path.write_text("".join(json.dumps(step) + "\n" for step in (*kept, *steps)))


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The entries that `append_steps` wrote."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def plot_steps(steps: Sequence[Mapping[str, Any]], path: Path, method: str) -> None:
    """Draws the compression of each step, and the gain where a method knows it, into a PNG file.

    Steps in which nothing is sent count with the next message.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    gains = any("gain" in step for step in steps)
    steps = _messages(steps)
    figure = Figure(figsize=(8, 6 if gains else 3.5), dpi=100, layout="constrained")
    axes = figure.subplots(2 if gains else 1, 1, sharex=True, squeeze=False)[:, 0]
    numbers = [step["step"] for step in steps]
    by_floats = [step["dense_bytes"] / 4 / max(1.0, step["floats"]) for step in steps]
    factors = [below_bf16(step["wire_bytes"], step["num_elements"]) for step in steps]
    by_bytes = [math.nan if factor is None else factor for factor in factors]
    axes[0].plot(
        numbers, by_floats, color="#0072b2", linewidth=1, label="floats ×, as papers count"
    )
    axes[0].plot(numbers, by_bytes, color="#d55e00", linewidth=1, label="bytes, below bf16")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("times less")
    axes[0].legend(frameon=False)
    axes[0].set_title(f"compression between replicas: {method}", fontsize=10)
    axes[0].yaxis.set_major_formatter("{x:g}")
    if gains:
        axes[1].plot(numbers, [s.get("gain", float("nan")) for s in steps], color="#009e73")
        axes[1].set_ylabel("gain of what was sent")
        axes[1].set_ylim(0, 1.05)
    axes[-1].set_xlabel("step")
    for each in axes:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _messages(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps that have sent something, each with what all since the last would send dense."""
    found: list[Mapping[str, Any]] = []
    waiting = Sent()
    for step in steps:
        waiting += Sent.from_dict(step)
        if step["wire_bytes"]:
            meant = {"dense_bytes": waiting.dense_bytes, "num_elements": waiting.num_elements}
            found.append({**step, **meant})
            waiting = Sent()
    return found
