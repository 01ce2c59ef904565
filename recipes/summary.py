"""What a run came to, and the table that sets runs side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from recipes.config import Config

History = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run came to: accuracies as fractions of the test images, bytes sent in training."""

    accuracy_compressed: float  # with compression at inference, as trained
    accuracy_uncompressed: float  # the same weights without
    best_accuracy_compressed: float
    best_accuracy_uncompressed: float
    loss: float  # of training, mean of the last epoch
    wire_bytes: int
    dense_bytes: int  # what the same messages are as plain tensors
    wire_ratio: float  # wire / dense: lower is better
    skipped_steps: int
    epochs: int
    seconds: float  # training and evaluation, over all resumptions
    seed: int
    act: str
    grad: str
    history: History = dataclasses.field(repr=False)  # one entry for each epoch

    def to_json(self) -> dict[str, Any]:
        """Without the history, which stands in metrics.jsonl."""
        values = dataclasses.asdict(self)
        del values["history"]
        return values

    @classmethod
    def of(cls, config: Config, history: History) -> Summary:
        """The summary of the epochs so far; the last of them must be an evaluated one."""
        last = history[-1]
        evaluated = [row for row in history if row["accuracy_compressed"] is not None]
        return cls(
            accuracy_compressed=last["accuracy_compressed"],
            accuracy_uncompressed=last["accuracy_uncompressed"],
            best_accuracy_compressed=max(row["accuracy_compressed"] for row in evaluated),
            best_accuracy_uncompressed=max(row["accuracy_uncompressed"] for row in evaluated),
            loss=last["loss"],
            wire_bytes=last["wire_bytes"],
            dense_bytes=last["dense_bytes"],
            wire_ratio=last["wire_bytes"] / last["dense_bytes"],
            skipped_steps=sum(row["skipped_steps"] for row in history),
            epochs=last["epoch"],
            seconds=last["seconds"],
            seed=config.seed,
            act=" ".join(config.act),
            grad=" ".join(config.grad),
            history=history,
        )


def label(config: Config) -> str:
    """How plots and tables call a run: ``act / grad``, or once where both are the same."""
    act, grad = " ".join(config.act), " ".join(config.grad)
    if act == grad:
        return "uncompressed" if act == "none" else act
    return f"act {act} / grad {grad}"


def table(runs: Mapping[str, Summary]) -> str:
    """One row for each run: accuracies with compression on and off at inference, and bytes."""
    rows = [
        (
            name,
            100 * one.accuracy_compressed,
            100 * one.accuracy_uncompressed,
            one.wire_bytes / 1e6,
            one.dense_bytes / 1e6,
            one.wire_ratio,
            one.epochs,
            one.seconds,
        )
        for name, one in runs.items()
    ]
    headers = (
        "compression", "accuracy on %", "accuracy off %", "MB sent", "MB dense", "sent/dense",
        "epochs", "seconds",
    )  # fmt: skip
    return tabulate(rows, headers, floatfmt=("", ".2f", ".2f", ".1f", ".1f", ".3f", "d", ".0f"))
