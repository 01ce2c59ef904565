"""Drift correction alone: how much longer Adam's steps become, and what is left alone."""

import pytest
import torch
from torch import nn

from mpcomp import LocalSGD, parse
from mpcomp.data_parallel.methods.local_sgd import correct

SETTINGS = {
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-3}),
}


def stepped(kind: str, steps: int = 5) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(6, 5))
    make, options = SETTINGS[kind]
    optimizer = make([parameter], lr=0.1, weight_decay=0.0, **options)
    for _ in range(steps):
        parameter.grad = torch.randn(6, 5)
        optimizer.step()
    return parameter, optimizer


def last_step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The step that the moments make as they are, by Adam's algorithm."""
    state, group = optimizer.state[parameter], optimizer.param_groups[0]
    (beta1, beta2), t = group["betas"], float(state["step"])
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    first, second = state["exp_avg"] / (1 - beta1**t), second / (1 - beta2**t)
    return -group["lr"] * first / (second.sqrt() + group["eps"])


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_step_becomes_longer_by_a_share_of_the_jump_over_the_period(kind: str) -> None:
    parameter, optimizer = stepped(kind)
    before, jump = last_step(parameter, optimizer), torch.randn(6, 5)
    second = optimizer.state[parameter]["exp_avg_sq"].clone()
    correct(optimizer, {parameter: jump}, 4, 0.5)
    gained = last_step(parameter, optimizer) - before
    torch.testing.assert_close(gained, 0.5 * jump / 4, rtol=1e-4, atol=1e-6)
    assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], second)


def test_that_is_the_last_step_of_adam_itself() -> None:
    """The measure of the test above."""
    parameter, optimizer = stepped("adamw")
    before = parameter.detach().clone()
    parameter.grad = torch.randn(6, 5)
    optimizer.step()
    moved = parameter.detach() - before
    torch.testing.assert_close(last_step(parameter, optimizer), moved, rtol=1e-4, atol=1e-6)


def test_what_was_not_stepped_and_a_rate_of_0_are_left_alone() -> None:
    parameter, optimizer = stepped("adamw")
    unused = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [unused], "lr": 0.1})
    held = optimizer.state[parameter]["exp_avg"].clone()
    jumps = {unused: torch.ones(2)}
    correct(optimizer, jumps, 4, 1.0)
    assert unused not in optimizer.state
    optimizer.param_groups[0]["lr"] = 0.0  # the end of a schedule
    correct(optimizer, jumps | {parameter: torch.ones(6, 5)}, 4, 1.0)
    assert torch.equal(optimizer.state[parameter]["exp_avg"], held)


def test_moments_in_bf16() -> None:
    parameter = nn.Parameter(torch.zeros(40, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = optimizer.state[parameter]["exp_avg"].clone()
    correct(optimizer, {parameter: torch.full_like(parameter, 0.1)}, 1, 0.5)
    after = optimizer.state[parameter]["exp_avg"]
    # m^ = 1 makes a step of -0.1, so half a step back halves it.
    torch.testing.assert_close(after, before / 2)


def test_a_spec_with_it() -> None:
    method = parse("diloco:4:lr=1:momentum=0:correction=0.5+ef+lloyd:1")
    assert isinstance(method, LocalSGD) and method.correction == 0.5
    assert parse(str(method)) == method


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("diloco:4:lr=1:momentum=0:correction=1.5", r"expected a share in \[0, 1\]"),
        ("diloco:4:lr=1:momentum=0:correction=nan", r"expected a share in \[0, 1\]"),
        ("diloco:4:correction=0.5", "such an outer step goes elsewhere; pass lr=1:momentum=0"),
        ("diloco:4:lr=1:momentum=0.5:correction=0.5", "pass lr=1:momentum=0"),
    ],
)
def test_settings_that_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_other_optimizers_are_refused() -> None:
    method = parse("diloco:4:lr=1:momentum=0:correction=0.5")
    assert isinstance(method, LocalSGD)
    with pytest.raises(ValueError, match=r"and the optimizer is SGD: use one of those"):
        method.check_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    parse("diloco:4").check_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
