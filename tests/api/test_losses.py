"""Losses by which nothing would be trained, or not what was meant: errors with the cure."""

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows
from torch import nn

import mpcomp


def pipe_of(loss_fn, model=None, **kwargs):
    return mpcomp.pipeline(model or mlp(), 2, split=MLP_SPLIT, loss_fn=loss_fn, **kwargs)


def detached(output, target):
    return F.cross_entropy(output.detach(), target)


def unreduced(output, target):
    return F.cross_entropy(output, target, reduction="none")


BAD = {
    "detached": (detached, ValueError, r"no gradient.*loss_fn.*\.detach\(\)"),
    "of no output": (lambda o, t: t.float().mean(), ValueError, "no gradient"),
    "unreduced": (unreduced, ValueError, r"shape \[3\].*reduction='none'.*\.mean\(\)"),
    "unreduced module": (nn.MSELoss(reduction="none"), ValueError, r"shape \[3, 5\].*'none'"),
    "number": (lambda o, t: F.cross_entropy(o, t).item(), TypeError, r"a float.*\.item\(\)"),
    "pair": (lambda o, t: (F.cross_entropy(o, t), 1), TypeError, "a tuple.*pipe.evaluate"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_loss_that_cannot_train(case):
    loss_fn, error, message = BAD[case]
    pipe = pipe_of(loss_fn)
    x, y = rows(6)
    if case == "unreduced module":
        y = F.one_hot(y, 5).float()
    with pytest.raises(error, match=message):
        pipe.forward_backward(x, y)
    assert pipe.num_steps == 0 and not any(p.grad is not None for p in pipe.parameters())


def test_one_number_of_any_shape_is_a_loss():
    """As for torch's backward."""
    x, y = rows(6)
    losses = []
    for shape in ((), (1,), (1, 1)):
        torch.manual_seed(0)
        pipe = pipe_of(lambda o, t, shape=shape: F.cross_entropy(o, t).reshape(shape))
        losses.append(pipe.forward_backward(x, y))
    assert losses[0].dim() == losses[1].dim() == losses[2].dim() == 0
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_that_is_not_finite(frozen):
    """Also where no gradient crosses a cut, by which it would be seen."""
    model = mlp()
    if frozen:
        for block in list(model)[:-1]:
            block.requires_grad_(False)
    pipe = pipe_of(lambda o, t: F.cross_entropy(o, t) * float("nan"), model)
    with pytest.raises(FloatingPointError, match="the loss of step 0 is NaN or Inf"):
        pipe.forward_backward(*rows(6))
    assert pipe.num_steps == 0


def test_a_scaler_skips_a_loss_that_is_not_finite():
    model = mlp()
    for block in list(model)[:-1]:
        block.requires_grad_(False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipe = pipe_of(lambda o, t: F.cross_entropy(o, t) * float("nan"), model, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.forward_backward(*rows(6))
    scaler.step(optimizer)
    scaler.update()
    assert pipe.step_skipped and scaler.get_scale() == 2.0
    assert all(p.isfinite().all() for p in pipe.parameters())


def test_inference_mode():
    pipe = pipe_of(F.cross_entropy)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"under torch.inference_mode\(\).*leave it"),
    ):
        pipe.forward_backward(*rows(6))
    with torch.no_grad():  # is not the caller's to choose: gradients are what it is for
        pipe.forward_backward(*rows(6))
    assert all(p.grad is not None for p in pipe.parameters())
