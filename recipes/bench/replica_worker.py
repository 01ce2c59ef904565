"""One replica's part in `recipes.bench.slow_replicas`: a model for each method, and the clock.

Commands come in on standard input and answers go out on standard output, one JSON value a line, so
that nothing but the training itself goes over the measured link.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recipes import data
from recipes.bench.replica_variants import Job, Variant, open_variant
from recipes.bench.workers import begin_together, joined, own_stdout, say
from recipes.loader import loaders_of

TEST_BATCH: Final = 128


def work(job: Job) -> None:
    """Joins the others, then carries out commands until standard input ends."""
    answers = own_stdout()
    dataset = data.load(job.data, train_limit=job.train_limit, test_limit=job.test_limit)
    variants: dict[str, Variant] = {}
    with joined(
        rank=job.rank,
        size=job.num_replicas,
        address=job.address,
        port=job.port,
        device=job.device,
        num_threads=job.num_threads,
        timeout_s=job.timeout_s,
    ):
        say(answers, {"joined": job.rank})
        for line in sys.stdin:
            command = json.loads(line)
            kind, name = command["do"], command.get("name")
            if kind == "open":
                variants[name] = open_variant(
                    name, job, dataset, seed=command["seed"], mbps=command["mbps"]
                )
                say(answers, {"dense_bytes": _dense_bytes(variants[name].model)})
            elif kind == "close":
                del variants[name]
                say(answers, {"closed": name})
            elif kind == "evaluate":
                say(answers, {"accuracy": _accuracy(variants[name].model, job, dataset)})
            else:
                assert kind == "steps", kind
                say(answers, stepped(variants[name], command["count"], answers, job.hang_after_s))


def _dense_bytes(model: nn.Module) -> int:
    """Of all gradients, as fp32."""
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def stepped(
    variant: Variant, count: int, answers: TextIO, hang_after_s: float | None = None
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

    begin = begin_together(answers)
    if hang_after_s is None:
        steps()
    elif hangs(steps, hang_after_s):
        return {"hung": True}  # the process stays, or the others would see it leave
    end = time.perf_counter()
    after = variant.report()
    return {
        "seconds": (end - begin) / count,
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
