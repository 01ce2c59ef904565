"""GraVAC's replicas decide alike, however their own gradients and clocks differ."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import preload
from replica_runs import SMALLEST, digest, exchange_of, exchanged, parameters
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpcomp
from mpcomp import ReplicaNetwork

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


@pytest.mark.parametrize("exact", ["false", "true"])
def test_gains_and_clocks_that_disagree(ranks, exact):
    spec = f"gravac:cf=2-64:eps=0.6:window=4:smoothing=0.5:exact={exact}+topk:0.1"
    results = ranks(drive, 3, spec, 120, True)
    for said, branches, state in results:
        assert (said, branches) == results[0][:2]
        assert str(state) == str(results[0][2])  # NaN is not equal to itself
    assert set(results[0][1]) == {"dense", "minimum", "candidate"}
    assert len({str(d["actions"]) for d in results[0][2]["history"]}) > 2


def ten_thousand(steps: int, exact: bool) -> Any:
    """A model with one matrix, on rows that come in phases of ease and difficulty."""
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False)
    ddp = DistributedDataParallel(model)
    handle = mpcomp.compress_gradients(
        ddp,
        f"gravac:cf=2-16:eps=0.75:window=50:smoothing=0.2:exact={str(exact).lower()}+topk:0.1",
        network=ReplicaNetwork(smallest=SMALLEST),
    )
    draw = random.Random(dist.get_rank())
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    target = torch.randn(16, 8, generator=torch.Generator().manual_seed(7))
    branches: dict[str, int] = {}
    for step in range(steps):
        x = torch.randn(4, 16)
        if step // 400 % 3 == 1:
            x = x * (torch.arange(16) < 3)  # few elements have most of the energy
        F.mse_loss(ddp(x), x @ target).backward()
        if draw.random() < 0.001:
            time.sleep(0.005)
        optimizer.step()
        optimizer.zero_grad()
    for entry in handle.history:
        branches[entry["branch"]] = branches.get(entry["branch"], 0) + 1
    decisions = [(d["step"], d["actions"]) for d in handle.exchange.controller.search.history]
    rest = str(handle.exchange.controller.state_dict())
    weights = digest(dict(model.state_dict()))
    return branches, decisions, rest, weights, handle.report()["ratio"], len(handle.history)


@pytest.mark.parametrize("exact, steps", [(False, 10_000), (True, 2_000)])
def test_many_steps_end_with_equal_decisions(ranks, exact, steps):
    """The clocks are those on the wall."""
    results = ranks(ten_thousand, 2, steps, exact, timeout_s=170.0)
    branches, decisions, rest, weights, ratio, length = results[0]
    assert results[1][:4] == (branches, decisions, rest, weights)
    assert set(branches) == {"dense", "minimum", "candidate"}
    assert len(decisions) == steps // 50 and length == steps and ratio < 0.9
