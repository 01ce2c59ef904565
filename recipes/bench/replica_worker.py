"""One replica's part in `recipes.bench.slow_replicas`: a model for each method that is open."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recipes import data
from recipes.bench.replica_variants import Job, Variant, open_variant
from recipes.bench.workers import Begin
from recipes.data import loaders_of

TEST_BATCH: Final = 128


class Part:
    """A model for each method that is open, on this replica.

    Args:
        job: of this rank.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._dataset = data.load(job.data, train_limit=job.train_limit, test_limit=job.test_limit)
        self._variants: dict[str, Variant] = {}

    def open(self, name: str, seed: int, mbps: float | None) -> int:
        """Makes a model with a method; the bytes of its gradients as fp32."""
        variant = open_variant(name, self._job, self._dataset, seed=seed, mbps=mbps)
        self._variants[name] = variant
        return dense_bytes(variant.model)

    def close(self, name: str) -> None:
        """Forgets a method's model."""
        del self._variants[name]

    def steps(self, begin: Begin, name: str, count: int) -> dict[str, Any]:
        """So many steps of a method in a row."""
        return stepped(begin, self._variants[name], count, self._job.hang_after_s)

    def evaluate(self, name: str) -> float:
        """The accuracy of this replica on all test images."""
        return _accuracy(self._variants[name].model, self._job, self._dataset)


def dense_bytes(model: nn.Module) -> int:
    """Of all parameters, as fp32."""
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def stepped(
    begin: Begin, variant: Variant, count: int, hang_after_s: float | None = None
) -> dict[str, Any]:
    """So many steps in a row, begun at the moment that all replicas are told."""
    before = variant.report()
    batches = list(itertools.islice(variant.batches, count))
    factors: list[float | None] = []
    losses: list[Tensor] = []

    def steps() -> None:
        with variant.watch:
            for x, y, _ in batches:
                variant.optimizer.zero_grad()
                losses.append(variant.step(x, y))
                factors.append(variant.report().get("cf"))

    start = begin()
    if hang_after_s is None:
        steps()
    elif hangs(steps, hang_after_s):
        return {"hung": True}  # the process stays, or the others would see it leave
    end = time.perf_counter()
    after = variant.report()
    return {
        "seconds": (end - start) / count,
        "means": {
            key: (after[key] - before[key]) / count for key in variant.totals if key in after
        },
        "factors": factors,
        "at": {key: after[key] for key in after if key not in variant.totals and _said(after[key])},
        "loss": torch.stack(losses).mean().item(),
    }


def _said(value: Any) -> bool:
    """Whether it is known; JSON has no NaN."""
    return not isinstance(value, float) or math.isfinite(value)


def hangs(action: Callable[[], None], hang_after_s: float) -> bool:
    """Whether it does not return in time.

    Raises:
        Exception: what it raised.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(hang_after_s)
    for error in errors:
        raise error
    return thread.is_alive()


@torch.no_grad()
def _accuracy(model: nn.Module, job: Job, dataset: data.Dataset) -> float:
    """Of this replica, on all test images, without communication."""
    assert isinstance(model, DistributedDataParallel)
    _, test = loaders_of(job.config(0), dataset, torch.device("cpu"))
    alone = dataclasses.replace(test, num_replicas=1, batch_size=TEST_BATCH)
    module = model.module
    module.eval()
    right = sum(int((module(x).argmax(1) == y).sum()) for x, y in alone)
    module.train()
    return right / len(dataset.test)
