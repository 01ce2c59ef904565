"""Runs on replicas, every process being one, and what a study keeps of them."""

from __future__ import annotations

import statistics

from recipes.config import RunConfig
from recipes.ranks import Ranks
from recipes.replica_log import PARTS
from recipes.study import Line, reached, trainer_of


def train_on_replicas(config: RunConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run; its line has the times, bytes and memory of the exchange."""
    trainer = trainer_of(config, ranks)
    summary = trainer.fit(progress=False)
    steps = trainer.replica_log.new_steps()
    every = max(1, len(steps) // 50)
    parts = [epoch["replicas"] for epoch in summary.history]
    exchange = trainer.pipe.engine.exchange
    assert exchange is not None  # there are replicas
    return {
        **reached(summary),
        # Without evaluations; the median, as the first epoch also warms up.
        "step_s": statistics.median(sum(one[part] for part in PARTS) for one in parts)
        / trainer.steps_per_epoch,
        "memory_bytes": exchange.report()["memory_bytes"],  # that errors take on a replica
        "replicas": parts[-1],
        "cfs": [step["cf"] for step in steps[::every]] if "cf" in steps[-1] else None,
    }
