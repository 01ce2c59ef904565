"""Steps of FSDP2 that fail, layers that are not used, and changes of the loss scale."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everyday import slow_after
from ranks import preload
from replica_runs import digest
from sharded_runs import Run, Training
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mpcomp.data_parallel.fsdp import parameter_groups

preload("replica_runs", "sharded_runs", "torch.distributed.fsdp")


STATEFUL = [
    "ef+topk:0.1",
    "ef21+topk:0.2",
    "conef+topk:0.1",
    "dgc:0.1",
    "gravac:cf=2-32:eps=0.5:window=3:bandwidth_mbps=10:compute_ms=1+topk:0.1",
]


def poisoned(specs: list[str], kind: float) -> list[Any]:
    """A gradient of rank 1 is not finite in the third of four steps."""
    found = []

    def poison(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].register_hook(lambda gradient: gradient * kind)

    for spec in specs:
        training = Training(Run(spec))
        assert training.handle is not None
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
        seen = []
        for step in range(4):
            before = training.memories()
            hooks = []
            if step == 2 and dist.get_rank() == 1:
                # What flows from the second block into the first.
                hooks.append(training.model.blocks[1].register_forward_pre_hook(poison))
            training.backward(step)
            for hook in hooks:
                hook.remove()
            block = training.model.blocks[0]
            shards = [p.grad.to_local() for p in block.parameters()]
            seen.append(
                (
                    all(bool(g.isnan().all()) for g in shards),
                    all(bool(g.isfinite().all()) for g in training.gradients()),
                    before == training.memories(),
                    training.handle.history[-1]["skipped"],
                )
            )
            if step != 2:
                training.optimizer.step()
            training.optimizer.zero_grad()
        found.append((seen, training.handle.exchange.step, digest(training.weights())))
    return found


@pytest.mark.parametrize("kind", slow_after(1, [math.nan, math.inf]), ids=str)
def test_a_gradient_that_is_not_finite(ranks, kind):
    """Results of its block are NaN on all ranks, no rank remembers the step, and it goes on."""
    results = ranks(poisoned, 2, STATEFUL, kind)
    for i, spec in enumerate(STATEFUL):
        for seen, step, weights in (of_rank[i] for of_rank in results):
            assert step == 4 and weights == results[0][i][2], spec
            for number, (all_nan, finite, unchanged, skipped) in enumerate(seen):
                bad = number == 2
                assert (all_nan, finite, unchanged, skipped) == (bad, not bad, bad, bad), spec


class Stops(torch.autograd.Function):
    """An error in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("stopped on purpose")


def forget(model: nn.Module) -> None:
    """Gradients that were not exchanged yet, which torch would add to those of the next step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for param_group in parameter_groups(module._get_fsdp_state()):
                for param in param_group.fsdp_params:
                    if hasattr(param, "_unsharded_param"):
                        param.unsharded_param.grad = None


def stopped(specs: list[str]) -> list[Any]:
    """The second step's backward ends between two blocks, on all ranks."""
    found = []
    for spec in specs:
        ends = []
        for stops in (True, False):
            training = Training(Run(spec))
            assert training.handle is not None
            training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
            training.step(0)
            before = training.memories()
            said = ""
            if stops:
                hook = training.model.blocks[1].register_forward_pre_hook(
                    lambda module, args: (Stops.apply(args[0]),), prepend=True
                )  # before FSDP2's own, so that the block's gradient has been exchanged
                try:
                    training.backward(1)
                except RuntimeError as error:
                    said = str(error)
                hook.remove()
                training.model.reset_iter_state()
                training.optimizer.zero_grad()
                forget(training.model)
            else:
                training.handle.exchange.step += 1
            training.step(2)
            after = training.memories()
            ends.append((digest(training.weights()), after))
            found_step = training.handle.exchange.step
        found.append((said, ends, before != after, found_step))
    return found


def test_an_error_in_the_middle_of_backward(ranks):
    """What its blocks noted is forgotten: the next step is that of a run without it."""
    for of_rank in ranks(stopped, 2, STATEFUL):
        for spec, (_, (after, straight), changed, step) in zip(STATEFUL, of_rank, strict=True):
            assert after == straight and changed and step == 3, spec


def unused() -> list[Any]:
    """A layer without a gradient, unless FSDP2 is told to send zeros for it."""
    training = Training(Run("ef+topk:0.1", extra="never"))
    said = ""
    try:
        training.step(0)
    except RuntimeError as error:
        said = str(error)
    asked = Training(Run("ef+topk:0.1", extra="asked", steps=3))
    losses = asked.go(0, 3)
    gradient = asked.weights()["extra.weight"]
    return [said, losses, gradient]


def test_a_layer_that_is_not_used(ranks):
    for said, losses, _ in ranks(unused, 2):
        assert "some of extra.weight, extra.bias" in said or "extra.weight" in said
        assert "got no gradient" in said and "set_reduce_scatter_unused_params(True)" in said
        assert all(map(math.isfinite, losses))


def scaled(specs: list[str], scales: list[float]) -> list[Any]:
    found = []
    for spec in specs:
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=10_000)
        training = Training(Run(spec, (("scaler", scaler),)))
        assert training.handle is not None
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
        for step, scale in enumerate(scales):
            loss = training.loss(step)
            scaler.scale(loss.detach())  # makes it begin
            scaler.update(scale)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
        found.append((digest(training.weights()), training.memories()))
    return found


@pytest.mark.slow
def test_what_is_kept_is_free_of_the_loss_scale(ranks):
    """Scales are powers of two, so bit for bit."""
    specs = ["ef+topk:0.1", "conef+topk:0.1", "ef21+topk:0.2"]
    assert ranks(scaled, 2, specs, [1.0] * 4) == ranks(scaled, 2, specs, [256.0, 2.0, 64.0, 4.0])


def test_parameter_groups_of_earlier_torch():
    """One or none, under another name."""
    assert parameter_groups(SimpleNamespace(_fsdp_param_group=None)) == []
    assert parameter_groups(SimpleNamespace(_fsdp_param_group="one")) == ["one"]
    assert parameter_groups(SimpleNamespace(_fsdp_param_groups=["a", "b"])) == ["a", "b"]
