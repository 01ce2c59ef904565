"""What studies of runs on replicas have in common: every process is one."""

from __future__ import annotations

import statistics
from typing import Any

from recipes.paired_runs import Line
from recipes.ranks import Ranks
from recipes.replica_log import PARTS
from recipes.summary import Summary
from recipes.training import Trainer


def check_replicas(ranks: Ranks) -> None:
    """Raises ValueError for one process alone."""
    if ranks.size < 2:
        raise ValueError(
            "every process is a replica; start this with torchrun --nproc-per-node 4, or pass "
            "--table"
        )


def of_replicas(trainer: Trainer[Any], summary: Summary) -> Line:
    """Times, bytes and memory of the exchange between replicas, of a run that has ended."""
    steps = trainer.replica_log.new_steps()
    every = max(1, len(steps) // 50)
    parts = [epoch["replicas"] for epoch in summary.history]
    exchange = trainer.pipe.exchange
    assert exchange is not None  # there are replicas
    return {
        # Without evaluations; the median, as the first epoch also warms up.
        "step_s": statistics.median(sum(one[part] for part in PARTS) for one in parts)
        / trainer.steps_per_epoch,
        "memory_bytes": exchange.report()["memory_bytes"],  # that errors take on a replica
        "replicas": parts[-1],
        "cfs": [step["cf"] for step in steps[::every]] if "cf" in steps[-1] else None,
    }
