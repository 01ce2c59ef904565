"""Changes of a model after it was cut: what no stage would show is an error, or a warning."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from lms import gpt2
from torch import nn

import mpcomp


def nested() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.Linear(4, 3),
    )


class Traced(nn.Module):
    """A model with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nested()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def pipe_of(model: nn.Module) -> mpcomp.Pipeline:
    return mpcomp.pipeline(model, chunks=2, split=2, loss_fn=F.cross_entropy)


def train(pipe: mpcomp.Pipeline) -> None:
    pipe.forward_backward(torch.randn(4, 4), torch.zeros(4, dtype=torch.long))


CHANGES = {
    "another head": lambda model: setattr(model, "2", nn.Linear(4, 5)),
    "a container put in place of one": lambda model: setattr(model, "1", nn.Sequential(*model[1])),
    "a layer more in a container": lambda model: model[0].append(nn.Dropout()),
    "a layer in place of one in a container": lambda model: setattr(model[1], "1", nn.GELU()),
    "a layer more": lambda model: model.append(nn.ReLU()),
    "a layer less": lambda model: model.pop(-1),
    "no layer in place of one": lambda model: setattr(model, "2", None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", [train, lambda pipe: pipe(torch.randn(4, 4))])
def test_a_change_of_what_is_in_a_model_is_an_error(change, call):
    model = nested()
    pipe = pipe_of(model)
    train(pipe)
    CHANGES[change](model)
    with pytest.raises(ValueError, match=r"of the model was .* when it was cut, and is .* now"):
        call(pipe)


def test_a_traced_model_is_looked_at_too():
    model = Traced()
    pipe = pipe_of(model)
    train(pipe)
    model.head = nn.Linear(3, 10)
    with pytest.raises(ValueError, match="head of the model was Linear"):
        train(pipe)


def test_the_head_of_a_language_model():
    model = gpt2()
    pipe = mpcomp.pipeline(model, chunks=1, split=2).eval()
    model.lm_head = nn.Linear(model.config.n_embd, 7, bias=False)
    with pytest.raises(ValueError, match="lm_head of the model was Linear"):
        pipe(torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize("container", ["", "0"])
def test_a_hook_that_never_runs_is_said_once(container):
    model = nested()
    pipe = pipe_of(model)
    model.get_submodule(container).register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="the hook never runs") as seen:
        train(pipe)
        train(pipe)
    assert sum("never runs" in str(each.message) for each in seen) == 1


def test_changes_within_a_block_are_the_stages_own():
    """So is a hook there, and what moves, freezes or initialises the model's tensors."""
    model, seen = nested(), []
    pipe = pipe_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[0][0].register_forward_hook(lambda *_: seen.append(1))
        model[2].requires_grad_(False)
        nn.init.zeros_(model[1][0].bias)
        model.double()
        pipe.forward_backward(torch.randn(4, 4).double(), torch.zeros(4, dtype=torch.long))
    assert len(seen) == 2
