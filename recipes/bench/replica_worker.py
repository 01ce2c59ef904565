"""One replica's part in `recipes.bench.slow_replicas`: a model for each method that is open."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recipes import data
from recipes.bench.replica_variants import Job, Variant, open_variant
from recipes.bench.workers import Begin
from recipes.data import loaders_of

TEST_BATCH: Final = 128
AnyVariant = TypeVar("AnyVariant", bound=Variant)


class OpenVariants(ABC, Generic[AnyVariant]):
    """A model for each method that is open, on this rank.

    Args:
        hang_after_s: seconds until steps that do not end are left.
    """

    def __init__(self, hang_after_s: float | None = None) -> None:
        self._variants: dict[str, AnyVariant] = {}
        self._hang_after_s = hang_after_s

    @abstractmethod
    def made(self, name: str, seed: int, mbps: float | None) -> AnyVariant:
        """A model with a method, at its first step."""

    @abstractmethod
    def judged(self, variant: AnyVariant) -> float:
        """The quality of a model on this rank's part of what it was not trained on."""

    def open(self, name: str, seed: int, mbps: float | None) -> int:
        """Makes a model with a method; the bytes of its parameters as fp32."""
        self._variants[name] = variant = self.made(name, seed, mbps)
        return 4 * sum(parameter.numel() for parameter in variant.model.parameters())

    def close(self, name: str) -> None:
        """Forgets a method's model."""
        del self._variants[name]

    def steps(self, begin: Begin, name: str, count: int) -> dict[str, Any]:
        """So many steps of a method in a row."""
        return _stepped(begin, self._variants[name], count, self._hang_after_s)

    def evaluate(self, name: str) -> float:
        """The quality of a method's model."""
        return self.judged(self._variants[name])


class Part(OpenVariants[Variant]):
    """The models of one replica.

    Args:
        job: of this rank.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job.hang_after_s)
        self._job = job
        self._dataset = data.load(job.data, train_limit=job.train_limit, test_limit=job.test_limit)

    def made(self, name: str, seed: int, mbps: float | None) -> Variant:
        """As `open_variant` makes it."""
        return open_variant(name, self._job, self._dataset, seed=seed, mbps=mbps)

    def judged(self, variant: Variant) -> float:
        """The accuracy of this replica on all test images."""
        return _accuracy(variant.model, self._job, self._dataset)


def _stepped(
    begin: Begin, variant: Variant, count: int, hang_after_s: float | None
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
