"""Runs of studies that are on images or on text, alone or on replicas, and what their lines say."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import cifar10, wikitext
from recipes.config import RunConfig
from recipes.image_config import ImageConfig
from recipes.lab.study import Line, Runs, Study, data_of, run_study
from recipes.ranks import Ranks
from recipes.replica_log import PARTS
from recipes.summary import Summary
from recipes.text_config import TextConfig
from recipes.training import Trainer


def trainer_of(config: RunConfig, ranks: Ranks) -> Trainer[Any]:
    """The trainer of a run, with its data."""
    if isinstance(config, ImageConfig):
        return cifar10.ImageTrainer(config, data_of(config, cifar10.load_data, ranks), ranks)
    assert isinstance(config, TextConfig)
    return wikitext.TextTrainer(config, data_of(config, wikitext.load_data, ranks), ranks)


def reached(summary: Summary) -> Line:
    """The metric as trained, the loss, the time, and the bytes of a run that has ended."""
    return {
        summary.metric.name: summary.on,
        "loss": summary.loss,
        "seconds": summary.seconds,
        "steps": summary.steps,
        "wire_bytes": summary.wire_bytes,
        "dense_bytes": summary.dense_bytes,
        "account": summary.account,
    }


def own_settings(config: RunConfig, options: argparse.Namespace) -> Line:
    """The whole configuration of a run, its data by name."""
    return {**config.to_json(), "data": Path(config.data).name}


def run_on_replicas(
    argv: Sequence[str] | None,
    *,
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    runs: Callable[[argparse.Namespace, int], Runs[Any]],
    render: Callable[[Sequence[Line]], str],
) -> None:
    """Runs what is missing of a study whose processes are replicas, then prints the tables.

    Arguments as for `Study`.
    """
    study = Study(
        parse=parse,
        runs=runs,
        train=train_on_replicas,
        settings=own_settings,
        on_replicas=True,
        render=render,
    )
    run_study(study, argv)


def train_on_replicas(config: RunConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run; its line has the times, bytes and memory of the exchange."""
    trainer = trainer_of(config, ranks)
    summary = trainer.fit(progress=False)
    exchange = trainer.pipe.exchange
    assert exchange is not None  # there are replicas
    return {**reached(summary), **between_replicas(trainer, exchange.report())}


def between_replicas(trainer: Trainer[Any], report: Mapping[str, Any]) -> Line:
    """Times, bytes and memory of the exchange of a run that has ended.

    Args:
        trainer: of the run.
        report: of this replica's exchange.
    """
    steps = trainer.replica_log.new_steps()
    every = max(1, len(steps) // 50)
    parts = [epoch["replicas"] for epoch in trainer.history]
    return {
        # Without evaluations; the median, as the first epoch also warms up.
        "step_s": statistics.median(sum(one[part] for part in PARTS) for one in parts)
        / trainer.steps_per_epoch,
        "memory_bytes": report["memory_bytes"],  # that errors take on a replica
        "replicas": parts[-1],
        "cfs": [step["cf"] for step in steps[::every]] if steps and "cf" in steps[-1] else None,
    }
