"""DGC and RedSync against the algorithm as it is written: N workers in one loop, exact top-k."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import preload
from replica_runs import alone, exchange_of, exchanged, gradients, parameters
from torch import Tensor

from mpcomp import DGC, RedSync
from mpcomp.compressors.base import num_kept
from mpcomp.data_parallel.methods.dgc import MomentumMethod

preload("replica_runs")

STEPS = 12
WORKERS = 3
METHODS: list[MomentumMethod] = [
    DGC(0.1),
    DGC(0.1, nesterov=True),
    DGC(0.1, masking=False, momentum=0.5),
    DGC(0.05, clip=15.0, nesterov=True),
    DGC(0.01, warmup_steps=10),
    DGC(0.05, warmup_steps=10, warmup="code"),
    DGC(0.2, momentum=0.0),
    RedSync(0.1),
    RedSync(0.1, search="binary", nesterov=True, clip=20.0),
]
#: Clips, and does nothing else: with momentum 0 and all elements sent its result is a plain mean.
CLIPPED = DGC(1.0, momentum=0.0, clip=2.0)


class Worker:
    """One worker of the reference: velocities and sums by parameter."""

    def __init__(self, method: MomentumMethod, like: dict[str, Tensor]) -> None:
        self.method = method
        self.u = {name: torch.zeros(p.shape) for name, p in like.items()}
        self.v = {name: torch.zeros(p.shape) for name, p in like.items()}

    def send(self, given: dict[str, Tensor], keep: float) -> dict[str, Tensor]:
        method, m = self.method, self.method.momentum
        if method.clip is not None:
            # As the paper has it: a worker's share of the sum, g / N, to the threshold * N^(-1/2).
            share = math.sqrt(
                sum(float((g.double() / WORKERS).square().sum()) for g in given.values())
            )
            factor = min(1.0, method.clip * WORKERS**-0.5 / share)
            given = {name: g * factor for name, g in given.items()}
        sent = {}
        for name, g in given.items():
            if g.dim() == 1 or g.numel() < 64:
                sent[name] = g
                continue
            if method.nesterov:
                self.u[name] = m * (self.u[name] + g)
                self.v[name] = self.v[name] + (self.u[name] + g)
            else:
                self.u[name] = m * self.u[name] + g
                self.v[name] = self.v[name] + self.u[name]
            v = self.v[name].contiguous().view(-1)
            mask = torch.zeros_like(v, dtype=torch.bool)
            mask[v.abs().topk(num_kept(keep, v.numel())).indices] = True
            mask = mask.view(g.shape)
            sent[name] = self.v[name] * mask
            self.v[name] = self.v[name] * ~mask
            if method.masking:
                self.u[name] = self.u[name] * ~mask
        return sent


def reference(method: MomentumMethod) -> list[dict[str, Tensor]]:
    """The result of each step."""
    like = {name: torch.zeros(p.shape) for name, p in parameters().items()}
    workers = [Worker(method, like) for _ in range(WORKERS)]
    mean_u = {name: torch.zeros(p.shape) for name, p in like.items()}
    results = []
    for step in range(STEPS):
        keep = method.keep_at(step) if isinstance(method, DGC) else method.keep
        given = [gradients(parameters(), rank, step) for rank in range(WORKERS)]
        told = [w.send(g, keep) for w, g in zip(workers, given, strict=True)]
        result = {}
        for name in like:
            mean = sum(t[name] for t in told) / WORKERS
            if mean.dim() == 1 or mean.numel() < 64:  # goes as it is, and has momentum afterwards
                m = method.momentum
                mean_u[name] = m * ((mean_u[name] + mean) if method.nesterov else mean_u[name])
                if not method.nesterov:
                    mean_u[name] = mean_u[name] + mean
                mean = mean_u[name] + mean if method.nesterov else mean_u[name]
            result[name] = mean
        results.append(result)
    return results


def run_methods(methods: list[MomentumMethod]) -> list[Any]:
    found = []
    for method in methods:
        like = parameters()
        exchange = exchange_of(method, like)
        results = []
        for step in range(STEPS):
            given = gradients(like, dist.get_rank(), step)
            results.append({k: v.contiguous() for k, v in exchanged(exchange, given).items()})
        tensors = exchange.state_dict()["tensors"]
        state = {f: tensors[f"own/wide/{f}"] for f in ("velocity", "sum")}
        found.append((results, state, exchange.report()))
    return found


@pytest.fixture(scope="module")
def momentum_runs(ranks):
    methods = [*METHODS, CLIPPED]
    results = ranks(run_methods, WORKERS, methods)
    return {method: [of_rank[i] for of_rank in results] for i, method in enumerate(methods)}


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_algorithm_as_written(momentum_runs, method):
    """12 steps within 1e-6 of a tensor's largest element."""
    expected = reference(method)
    for results, _, report in momentum_runs[method]:
        assert report["paths"]["gather"] == 3
        for step, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
            for name, value in theirs.items():
                error = (ours[name] - value).abs().max()
                assert error <= 2e-6 * value.abs().max(), (step, name)


def test_mean_of_clipped_gradients_has_the_norm(momentum_runs):
    """Of independent ones, all far above it; over the steps, as in one they are not orthogonal."""
    for results, _, _ in momentum_runs[CLIPPED]:
        squares = [sum(float(g.square().sum()) for g in result.values()) for result in results]
        assert math.sqrt(sum(squares) / STEPS) == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_what_was_sent_is_cleared(momentum_runs, method):
    for _, state, _ in momentum_runs[method]:
        cleared = state["sum"] == 0
        keep = method.keep_at(STEPS - 1) if isinstance(method, DGC) else method.keep
        assert int(cleared.sum()) == num_kept(keep, 210)
        assert bool((state["velocity"][cleared] == 0).all()) == (
            method.masking or method.momentum == 0
        )


def test_same_signs_by_turns():
    """The largest positive elements in a step, the largest negative ones in the next."""
    exchange_steps = []
    with alone():
        exchange = exchange_of(RedSync(0.1, momentum=0.0, same_sign=True), parameters())
        for step in range(5):
            given = gradients(parameters(), 0, step)
            exchange_steps.append(exchanged(exchange, given))
            assert exchange.report()["paths"] == {"dense": 2, "gather": 3}
    for step, result in enumerate(exchange_steps):
        for name in ("wide", "conv", "tall"):
            there = result[name][result[name] != 0].sign()
            assert there.numel() > 5 and bool((there == (1, -1)[step % 2]).all()), (step, name)


def test_stages_of_warm_up():
    """The paper's list of sparsities, and the keep ratios that the authors' code computes."""
    paper = DGC(0.001, warmup_steps=400)
    assert [1 - keep for keep in paper.stages()] == pytest.approx(
        [0.75, 0.9375, 0.984375, 0.99609375]
    )
    assert [paper.keep_at(step) for step in (0, 99, 100, 399, 400, 10_000)] == [
        0.25,
        0.25,
        0.0625,
        0.25**4,
        0.001,
        0.001,
    ]
    code = DGC(0.001, warmup_steps=5, warmup="code")
    assert [code.keep_at(step) for step in range(6)] == pytest.approx(
        [0.316, 0.1, 0.0316, 0.01, 0.00316, 0.001], rel=1e-2
    )
    assert DGC(0.5, warmup_steps=10).keep_at(0) == 0.5  # never less than in the end
    assert DGC(0.001).keep_at(0) == 0.001


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"keep": 0.0}, "keep=0"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"momentum": 1.0}, "momentum=1.0: expected a number in"),
        ({"momentum": -0.1}, "momentum=-0.1: expected a number in"),
        ({"clip": 0.0}, "clip=0.0: expected a norm above 0"),
        ({"clip": math.inf}, "clip=inf: expected a norm above 0"),
        ({"warmup_steps": -1}, "warmup_steps=-1: expected 0 or more"),
        ({"warmup_steps": 2.5}, "warmup_steps=2.5: expected 0 or more"),
        ({"warmup": "slow"}, "warmup='slow': expected paper or code"),
        ({"sample": 0.0}, "sample=0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        DGC(**{"keep": 0.1, **settings})
    names = {field.name for field in dataclasses.fields(RedSync)}
    if settings.keys() <= names:
        with pytest.raises(ValueError, match=message):
            RedSync(**{"keep": 0.1, **settings})


def test_bad_settings_of_redsync():
    with pytest.raises(ValueError, match="search"):
        RedSync(0.1, search="linear")
    with pytest.raises(ValueError, match="without same_sign=True"):
        RedSync(0.1, plain="head.weight")
