"""GraVAC's replicas decide alike, however their own gradients and clocks differ."""

import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import slow_after
from ranks import preload
from replica_runs import SMALLEST, digest, exchange_of, exchanged, parameters
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpcomp
from mpcomp import ReplicaNetwork
from mpcomp.data_parallel.exchange import Exchange

preload("replica_runs")


class Erratic:
    """A clock that is another one on each rank: minutes here, nothing known there."""

    def __init__(self, sleeps: bool) -> None:
        self._draw = random.Random(dist.get_rank())
        self._sleeps = sleeps

    def lap(self, traffic_bytes: float, num_messages: int) -> float:
        if self._sleeps and self._draw.random() < 0.1:
            time.sleep(0.01 * self._draw.random())
        return self._draw.choice([0.0, 1e-9, 1.0, 600.0, self._draw.random(), float("nan")])


def drive(spec: str, steps: int, sleeps: bool) -> Any:
    """Gradients whose scale and shape differ between ranks and change with time."""
    torch.manual_seed(dist.get_rank())
    like = parameters()
    exchange = exchange_of(spec, like)
    exchange.controller.clock = Erratic(sleeps)
    rank, said, branches = dist.get_rank(), [], []
    for step in range(steps):
        given = {}
        for name, p in like.items():
            heavy = torch.randn(p.shape).abs() ** (1 + 6 * ((step // 20 + rank) % 3))
            given[name] = heavy * 10.0 ** (3 * rank * (step // 30 % 2))
        said.append(digest(exchanged(exchange, given)))
        branches.append(exchange.history[-1]["branch"])
    return said, branches, exchange.controller.state_dict()


@pytest.mark.parametrize("exact", slow_after(1, ["false", "true"]))
def test_gains_and_clocks_that_disagree(ranks, exact):
    spec = f"gravac:cf=2-64:eps=0.6:window=4:smoothing=0.5:exact={exact}+topk:0.1"
    results = ranks(drive, 3, spec, 120, True)
    for said, branches, state in results:
        assert (said, branches) == results[0][:2]
        assert str(state) == str(results[0][2])  # NaN is not equal to itself
    assert set(results[0][1]) == {"dense", "minimum", "candidate"}
    assert len({str(d["actions"]) for d in results[0][2]["history"]}) > 2


TARGET = torch.randn(16, 8, generator=torch.Generator().manual_seed(7))
SETTINGS = "gravac:cf=2-16:eps=0.75:window=20:smoothing=0.2"


def rows_of(step: int, phase: int) -> torch.Tensor:
    """In every third phase few elements of a gradient have most of its energy."""
    x = torch.randn(4, 16)
    return x * (torch.arange(16) < 3) if step // phase % 3 == 1 else x


def ended(exchange: Exchange, branches: Counter[str], weights: torch.Tensor) -> Any:
    state = exchange.controller.state_dict()
    decisions = [(d["step"], d["actions"]) for d in state["history"]]
    said = digest({"weights": weights})
    return branches, decisions, str(state), said, exchange.report()["ratio"]


def least_squares(steps: int) -> Any:
    """Least squares by one matrix, whose gradient is written out, to be quick."""
    weights = torch.zeros(16, 8)
    exchange = exchange_of(SETTINGS + "+topk:0.1", {"weights": weights})
    torch.manual_seed(1 + dist.get_rank())
    draw = random.Random(dist.get_rank())
    branches: Counter[str] = Counter()
    for step in range(steps):
        x = rows_of(step, steps // 4)
        gradient = {"weights": x.T @ (x @ (weights - TARGET)) / 16}
        if draw.random() < 0.001:
            time.sleep(0.005)
        exchange.begin()
        exchange.add(gradient)
        exchange.finish()
        exchange.finish_step(finite=not exchange.nonfinite)
        weights.sub_(gradient["weights"], alpha=0.02)
        branches[exchange.history[-1]["branch"]] += 1
    return ended(exchange, branches, weights)


def with_ddp(steps: int) -> Any:
    """Fewer steps, in DDP; each is decided by its own gradient, on clocks that disagree."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 8, bias=False))
    spec = SETTINGS + ":exact=true+topk:0.1"
    handle = mpcomp.compress_gradients(ddp, spec, network=ReplicaNetwork(smallest=SMALLEST))
    handle.exchange.controller.clock = Erratic(sleeps=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    torch.manual_seed(1 + dist.get_rank())
    branches: Counter[str] = Counter()
    for step in range(steps):
        x = rows_of(step, 100)
        F.mse_loss(ddp(x), x @ TARGET).backward()
        optimizer.step()
        optimizer.zero_grad()
        branches[handle.exchange.history[-1]["branch"]] += 1
    return ended(handle.exchange, branches, ddp.module.weight.detach())


@pytest.mark.slow
@pytest.mark.parametrize("function, steps", [(least_squares, 4_000), (with_ddp, 400)])
def test_many_steps_end_with_equal_decisions(ranks, function, steps):
    """The clocks are those on the wall, but for DDP, whose fewer steps must see all branches."""
    results = ranks(function, 2, steps)
    branches, decisions, rest, weights, ratio = results[0]
    assert results[1][:4] == (branches, decisions, rest, weights)
    assert set(branches) == {"dense", "minimum", "candidate"}
    assert len(decisions) == steps // 20 and branches.total() == steps and ratio < 0.9
