"""Steps that are not finite, changes of the loss scale and of the learning rate."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everyday import slow
from ranks import preload
from replica_methods import SPECS
from replica_runs import (
    SMALLEST,
    Branching,
    Run,
    Training,
    digest,
    exchange_of,
    exchanged,
    gradients,
    mean_gradients,
    mean_over_replicas,
    parameters,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpcomp
from mpcomp import ReplicaNetwork

preload("replica_methods", "replica_runs")

NETWORK = ReplicaNetwork(smallest=SMALLEST)


def poisoned(specs: list[str], kind: float, where: str) -> list[Any]:
    """A gradient of one replica is not finite in the third of five steps."""
    found = []
    for spec in specs:
        like = parameters()
        exchange = exchange_of(spec, like)
        seen = []
        for step in range(5):
            before = digest(exchange.state_dict()["tensors"])
            controller = exchange.controller.state_dict()
            given = gradients(like, dist.get_rank(), step)
            if step == 2 and dist.get_rank() == 1:
                given[where][0, 1] = kind
            result = exchanged(exchange, given)
            unchanged = before == digest(exchange.state_dict()["tensors"])
            averages = [
                str(controller.get(key)) == str(exchange.controller.state_dict().get(key))
                for key in ("gain_min", "gain_candidate", "norms", "throughputs")
            ]
            seen.append(
                (
                    all(bool(g.isnan().all()) for g in result.values()),
                    all(bool(g.isfinite().all()) for g in result.values()),
                    unchanged,
                    all(averages),
                    exchange.history[-1]["skipped"],
                    digest(result),
                )
            )
        found.append((seen, exchange.step, exchange.totals.steps))
    return found


@pytest.mark.parametrize(
    "kind, where", [(math.nan, "wide"), slow(math.inf, "conv"), slow(-math.inf, "small")], ids=str
)
def test_a_gradient_that_is_not_finite(ranks, kind, where):
    results = ranks(poisoned, 2, SPECS, kind, where)
    for i, spec in enumerate(SPECS):
        for of_rank in results:
            seen, step, steps = of_rank[i]
            assert step == steps == 5, spec
            for number, (all_nan, finite, unchanged, averages, skipped, result) in enumerate(seen):
                bad = number == 2
                assert (all_nan, finite, skipped) == (bad, not bad, bad), (spec, number)
                if bad:
                    assert unchanged and averages, (spec, where)
                assert result == results[0][i][0][number][-1] or bad


def scaled(specs: list[str], scales: list[float | None]) -> list[Any]:
    """With a `GradScaler` of the given scale in each step; None is none."""
    found = []
    for spec in specs:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Branching(), bucket_cap_mb=0.003)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if scales[0] else None
        handle = mpcomp.compress_gradients(ddp, spec, network=NETWORK, scaler=scaler)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle.follow(optimizer)
        helper = Training.__new__(Training)
        helper.run, helper.ddp = Run(spec), ddp
        losses = []
        for step, scale in enumerate(scales):
            loss = helper.loss(step)
            losses.append(float(loss.detach()))
            if scaler is None or scale is None:
                loss.backward()
                optimizer.step()
            else:
                handles = []
                if math.isinf(scale) and dist.get_rank() == 1:
                    weight = ddp.module.middle.weight
                    handles = [weight.register_hook(lambda g: g * math.inf)]
                scaler.scale(loss.detach())  # makes it begin
                scaler.update(64.0 if math.isinf(scale) else scale)
                scaler.scale(loss).backward()
                for one in handles:
                    one.remove()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        skipped = [entry["skipped"] for entry in handle.history]
        weights = {k: v.clone() for k, v in ddp.module.state_dict().items()}
        state = handle.state_dict()["tensors"]
        found.append((weights, state, skipped, losses))
    return found


SCALED = [
    "ef+topk:0.1",
    "dgc:0.1",
    "onebitsgd",
    "powersgd:1",
    "ef21+topk:0.2",
    "conef+topk:0.1",
    SPECS[0],
]


def test_what_is_kept_is_free_of_the_loss_scale(ranks):
    plain = ranks(scaled, 2, SCALED, [None] * 6)
    changing = ranks(scaled, 2, SCALED, [1024.0, 16.0, 4096.0, 1.0, 2.0, 2.0])
    for ours, theirs in zip(changing, plain, strict=True):
        for spec, (weights, state, _, _), (wanted, kept, _, _) in zip(
            SCALED, ours, theirs, strict=True
        ):
            assert state.keys() == kept.keys() and state, spec
            for name in [name for name in state if name.startswith("factor/")]:
                # Of a right factor the next step uses no more than where it points.
                for held in (state, kept):
                    held[name] = torch.nn.functional.normalize(held[name], dim=0)
            torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(state, kept, rtol=1e-4, atol=1e-6)


def test_a_step_that_the_scaler_skips(ranks):
    """An overflow of one replica: all skip, none forgets, and training goes on."""
    scales = [64.0, 64.0, math.inf, 32.0, 32.0]
    results = ranks(scaled, 2, SCALED, scales)
    for i, spec in enumerate(SCALED):
        for weights, _, skipped, losses in (of_rank[i] for of_rank in results):
            assert skipped == [False, False, True, False, False], spec
            assert all(map(math.isfinite, losses))
            assert digest(weights) == digest(results[0][i][0])
            assert all(bool(value.isfinite().all()) for value in weights.values())


# -- the learning rate ----------------------------------------------------------------------------


def followed() -> Any:
    """Sums of updates, and what is left, under a rate that changes."""
    errors = []
    for spec in ("ef:lr_scaled=true+topk:0.1", "ef+topk:0.1"):
        like = parameters(vectors=False)
        exchange = exchange_of(spec, like)
        total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in like.items()}
        for step, lr in enumerate((0.1, 0.1, 0.01, 0.5)):
            result = exchanged(exchange, gradients(like, dist.get_rank(), step), lr=lr)
            means = mean_gradients(like, dist.get_world_size(), step)
            for name in like:
                total[name] += lr * (means[name] - result[name].double())
        tensors = exchange.state_dict()["tensors"]
        left = mean_over_replicas(tensors["own/wide/residual"]).reshape(7, 30)
        errors.append(float((total["wide"] - left).abs().max()))
    return errors


def test_a_residual_that_follows_the_learning_rate(ranks):
    """In units of rate times gradient nothing is lost; without them it is."""
    for following, plain in ranks(followed, 2):
        assert following < 1e-6 < 1e-2 < plain


def not_followed(lr: float | None) -> str:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 16))
    handle = mpcomp.compress_gradients(ddp, "ef:lr_scaled=true+topk:0.1", network=NETWORK)
    if lr is not None:
        handle.follow(torch.optim.SGD(ddp.parameters(), lr=lr))
    ddp(torch.randn(2, 16)).sum().backward()
    return "done"


@pytest.mark.parametrize("lr", [None, 0.0])
def test_a_rate_that_is_not_known(ranks, lr):
    for kind, said in ranks(not_followed, 2, lr, may_fail=True):
        assert kind in ("ValueError", "RuntimeError") and "follow(optimizer)" in said
