"""clip_grad_norm_: the norm over all stages."""

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, assert_same_training, clone, mlp, plain_step, rows

import mpcomp


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clips_by_the_norm_of_the_whole_model(max_norm, norm_type):
    """Bitwise what torch does for the plain model."""
    model = mlp()
    plain = clone(model)
    pipe = mpcomp.pipeline(model, 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    x, y = rows(6)
    pipe.forward_backward(x, y)
    plain_step(plain, x, y, [3, 3])
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    norm = mpcomp.clip_grad_norm_(pipe, max_norm, norm_type)
    assert torch.equal(norm, expected) and norm > 0.1
    assert_same_training(pipe, plain)


def test_residuals_stay_in_unclipped_units():
    """Clipping acts on what the optimizer sees; what links remember does not notice."""

    def state(clip):
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(
            mlp(), 2, split=MLP_SPLIT, grad_comp="ef+topk:0.2", loss_fn=F.cross_entropy
        )
        pipe.forward_backward(*rows(6))
        if clip:
            mpcomp.clip_grad_norm_(pipe, 1e-3)
        return pipe.boundaries[0].grad.endpoint.state_dict()["sender.rows0"]

    assert torch.equal(state(True), state(False))


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_a_norm_that_is_not_positive(max_norm):
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT)
    with pytest.raises(ValueError, match=f"max_norm={max_norm}: expected a positive number"):
        mpcomp.clip_grad_norm_(pipe, max_norm)


def test_nonfinite_norms_can_be_errors():
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    pipe.forward_backward(*rows(4))
    next(pipe.parameters()).grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        mpcomp.clip_grad_norm_(pipe, 1.0, error_if_nonfinite=True)


def test_without_gradients_the_norm_is_zero():
    pipe = mpcomp.pipeline(mlp(), 2, split=2, loss_fn=F.cross_entropy)
    assert float(mpcomp.clip_grad_norm_(pipe, 1.0)) == 0
