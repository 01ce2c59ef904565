"""Slow links on one machine: what trains over them is the same, and no faster than they are."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import CLASSES, rows
from torch import nn

import mpcomp
from mpcomp.comm import paced, probe
from mpcomp.comm.paced import Paced, slow_links

MBPS = 20.0
#: Methods at the cuts, a pipeline each.
METHODS = ("none", "bf16", "quant:4", "topk:0.1", "ef21+topk:0.1", "step:0.4")


def trained(method: str) -> tuple[list[float], mpcomp.Pipeline]:
    """Losses of three steps of two stages."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in ((13, 64), (64, 64))]
    pipe = mpcomp.pipeline(
        nn.Sequential(*blocks, nn.Linear(64, CLASSES)),
        chunks=4,
        split=2,
        act_comp=method,
        grad_comp=method,
        loss_fn=nn.functional.cross_entropy,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, y = rows(24)
    found = []
    for _ in range(3):
        found.append(pipe.forward_backward(x, y).item())
        optimizer.step()
        optimizer.zero_grad()
    return found, pipe


def over_both() -> dict[str, Any]:
    """In each process: training over free links and slow ones, and what these are measured as."""
    free = [trained(method) for method in METHODS]
    with slow_links(MBPS, latency_ms=1.0):
        slow = [trained(method) for method in METHODS]
        chain = probe.measure_chain(slow[0][1].engine.mesh)
    both = ([(found, pipe.wire_bytes) for found, pipe in runs] for runs in (free, slow))
    return {"both": list(both), "chain": chain}


def test_training_over_slow_links_is_the_same(ranks):
    for found in ranks(over_both, 2):
        free, slow = found["both"]
        assert slow == free and len(free) == len(METHODS)
        ((mbps, round_trip_s),) = found["chain"]
        # A busy machine makes them slower, and nothing faster.
        assert mbps < 1.1 * MBPS and round_trip_s > 2e-3


def carried(monkeypatch, mbps: float, latency_ms: float, messages) -> list[float]:
    """Moments at which messages of (moment, bytes) are handed on; the clock is the test's."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(paced.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(paced.time, "sleep", sleep)
    line = paced._Line(mbps, latency_ms / 1e3)
    left: list[float] = []
    for moment, num_bytes in messages:
        clock.now = max(clock.now, moment)
        line._carry(moment, num_bytes, lambda: left.append(clock.now) or [])
    return left


@pytest.mark.parametrize(
    ("mbps", "latency_ms", "messages", "moments"),
    [
        pytest.param(8, 0, [(0, 1_000_000)], [1], id="its last byte"),
        pytest.param(8, 0, [(0, 1_000_000), (0, 500_000)], [1, 1.5], id="behind another"),
        pytest.param(8, 0, [(0, 1_000_000), (3, 500_000)], [1, 3.5], id="after a pause"),
        pytest.param(8, 0, [(0, 1_000_000), (0.5, 500_000)], [1, 1.5], id="meanwhile"),
        pytest.param(8, 250, [(0, 1_000_000), (0, 500_000)], [1.25, 1.75], id="latency once"),
        pytest.param(80, 0, [(0, 1_000_000), (0, 0)], [0.1, 0.1], id="ten times the rate"),
    ],
)
def test_a_message_leaves_when_it_would_have_arrived(
    monkeypatch, mbps, latency_ms, messages, moments
):
    assert carried(monkeypatch, mbps, latency_ms, messages) == pytest.approx(moments)


def test_a_wait_for_a_message_that_is_still_on_its_way_ends():
    line = paced._Line(1e-3, 0.0)
    held = line.take(100, list)  # which takes 0.8 s
    with pytest.raises(RuntimeError, match="a slow link has not carried it within 0:00:00.01"):
        held.wait(timedelta(seconds=0.01))
    held.wait(timedelta(seconds=60))


def test_what_fails_to_leave_is_told_to_who_waits():
    def gone() -> list[Any]:
        raise RuntimeError("the other end is gone")

    with pytest.raises(RuntimeError, match="the other end is gone"):
        paced._Line(100.0, 0.0).take(10, gone).wait(timedelta(seconds=60))


@pytest.mark.parametrize(
    ("mbps", "latency_ms", "said"),
    [
        (0, 0, "mbps is 0; pass Mbit/s above 0"),
        (-5, 0, "mbps is -5; pass Mbit/s above 0"),
        (float("inf"), 0, "mbps is inf"),
        (float("nan"), 0, "mbps is nan"),
        (10, -1, "latency_ms is -1; pass milliseconds, 0 or more"),
        (10, float("nan"), "latency_ms is nan"),
    ],
)
def test_links_that_cannot_be(mbps, latency_ms, said):
    with pytest.raises(ValueError, match=said), slow_links(mbps, latency_ms):
        pass
    assert paced.slow_link() is None


def test_accelerators_have_none():
    mesh = SimpleNamespace(device=torch.device("cuda", 0), backend="nccl")
    with slow_links(10), pytest.raises(ValueError, match="this one is on cuda:0; pass devices='c"):
        probe.transport_for(mesh, 1)


def test_outside_links_are_left_alone():
    mesh = SimpleNamespace(device=torch.device("cpu"), backend="gloo")
    with slow_links(10):
        assert isinstance(probe.transport_for(mesh, 1), Paced)
        with slow_links(None):
            assert not isinstance(probe.transport_for(mesh, 1), Paced)
    assert not isinstance(probe.transport_for(mesh, 1), Paced)
