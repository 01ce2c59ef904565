"""The outcome of a run, and the table that sets runs side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from tabulate import tabulate

from mpcomp.core.account import Account
from mpcomp.core.sent import Sent, below_bf16_text
from recipes.config import RunConfig
from recipes.metric import Metric
from recipes.run_folder import RunFolder, read_json_lines

History = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome of a run: the metric on the evaluation data, bytes sent in training."""

    metric: Metric
    on: float  # with compression at inference, as trained
    off: float  # the same weights without
    best_on: float
    best_off: float
    loss: float  # of training, mean of the last epoch
    wire_bytes: int
    dense_bytes: int  # what the same messages are as plain tensors
    num_elements: float | None  # of those; not known of runs that began before they were counted
    wire_ratio: float  # wire / dense: lower is better
    below_bf16: float | None  # times fewer bytes than 2 for each element: higher is better
    account: dict[str, Any] | None  # of these, by what they were for (`mpcomp.core.account`)
    skipped_steps: int
    steps: int  # of the optimizer
    epochs: int
    seconds: float  # training and evaluation, over all resumptions
    seed: int
    act: str
    grad: str
    history: History = dataclasses.field(repr=False)  # one entry for each epoch

    def to_json(self) -> dict[str, Any]:
        """Without the history, which stands in metrics.jsonl; the metric by its name."""
        values = dataclasses.asdict(self)
        metrics = {
            self.metric.on: values.pop("on"),
            self.metric.off: values.pop("off"),
            f"best_{self.metric.on}": values.pop("best_on"),
            f"best_{self.metric.off}": values.pop("best_off"),
        }
        del values["history"], values["metric"]
        return {**metrics, **values}

    @classmethod
    def of(cls, config: RunConfig, metric: Metric, history: History, *, steps: int) -> Summary:
        """The summary of the epochs so far; the last of them must be an evaluated one."""
        last = history[-1]
        sent = Sent.from_dict(last)
        evaluated = [row for row in history if row[metric.on] is not None]
        return cls(
            metric=metric,
            on=last[metric.on],
            off=last[metric.off],
            best_on=metric.best([row[metric.on] for row in evaluated]),
            best_off=metric.best([row[metric.off] for row in evaluated]),
            loss=last["loss"],
            wire_bytes=last["wire_bytes"],
            dense_bytes=last["dense_bytes"],
            num_elements=sent.to_dict()["num_elements"],
            wire_ratio=sent.wire_ratio if sent.dense_bytes else 1.0,
            below_bf16=sent.below_bf16,
            account=last.get("account"),
            skipped_steps=sum(row["skipped_steps"] for row in history),
            steps=steps,
            epochs=last["epoch"],
            seconds=last["seconds"],
            seed=config.seed,
            act=" ".join(config.act),
            grad=" ".join(config.grad),
            history=history,
        )


def table(runs: Mapping[str, Summary], *, per_step: bool = False) -> str:
    """One row for each run: the metric with compression on and off at inference, and bytes.

    Args:
        runs: by what the table calls them; all of one metric.
        per_step: with a column of the megabytes that one step of the optimizer sends.
    """
    metric = next(iter(runs.values())).metric
    rows = [
        (
            name,
            metric.scale * one.on,
            metric.scale * one.off,
            one.wire_bytes / 1e6,
            below_bf16_text(one.below_bf16),
            below_bf16_text(Account.from_dict(one.account).cuts.below_bf16),
            *((one.wire_bytes / 1e6 / one.steps,) if per_step else ()),
            one.epochs,
            one.seconds,
        )
        for name, one in runs.items()
    ]
    headers = (
        *("compression", metric.title("on"), metric.title("off")),
        *("MB sent", "below bf16", "cuts alone", *(("MB a step",) if per_step else ())),
        *("epochs", "seconds"),
    )
    formats = ("", ".2f", ".2f", ".1f", ".1f", ".1f", *((".3f",) if per_step else ()), "d", ".0f")
    return tabulate(rows, headers, floatfmt=formats)


def seconds_a_step(folder: RunFolder, updates: int) -> float:
    """The median over a run's steps, which leaves out the first one, evaluations and checkpoints.

    Args:
        folder: of a run of at least two calls of the pipeline.
        updates: steps of the optimizer in a call.

    Raises:
        ValueError: there was one call.
    """
    ends = [row["time"] for row in read_json_lines(folder.steps)]
    if len(ends) < 2:
        raise ValueError(f"{folder.path} has one step, which says no speed; train for more")
    return float(median(end - begin for begin, end in pairwise(ends))) / updates


def speeds(runs: Mapping[str, Summary], seconds: Sequence[float], mbps: float) -> str:
    """Steps over simulated links: a row for each run, and how much the last one is faster.

    Args:
        runs: by what the table calls them, the one to compare with first.
        seconds: of a step of each.
        mbps: Mbit/s of the links.
    """
    base = seconds[0]
    rows = [
        (name, own, base / own, one.wire_bytes / 1e6 / one.steps, one.below_bf16, one.loss)
        for (name, one), own in zip(runs.items(), seconds, strict=True)
    ]
    lines = [
        f"over simulated links of {mbps:g} Mbit/s each way (s a step: median)",
        tabulate(
            rows,
            ("compression", "s a step", "times faster", "MB a step", "below bf16", "loss"),
            floatfmt=("", ".3f", ".2f", ".3f", ".1f", ".3f"),
        ),
    ]
    if len(runs) > 1:
        first, last = runs
        times = base / seconds[-1]
        won = f"{times:.1f} times faster" if times > 1 else f"{1 / times:.1f} times slower"
        lines.append(f"{last} is {won} than {first} here")
    return "\n".join(lines)
