"""Optional arguments that are given after all: the cause and the cure, and that it cures."""

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from ranks import preload
from torch import nn

import mpcomp

preload("test_optional_arguments")
CHUNKS = 2


class Optional(nn.Module):
    """Does something else for each argument that is not at its default."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, mask=None, flag=False, times=1, factor=1.0, way="tanh", shift=None):
        x = x if mask is None else x * mask
        x = -x if flag else x
        x = (x * factor) ** times
        x = x if shift is None else x + shift
        x = torch.tanh(self.a(x)) if way == "tanh" else torch.relu(self.a(x))
        return self.b(x)


def x_and_y():
    torch.manual_seed(1)
    return torch.rand(6, 4), torch.arange(6) % 3


GIVEN = {
    "mask": torch.linspace(0, 1, 6)[:, None],
    "flag": True,
    "times": 2,
    "factor": 0.5,
    "way": "relu",
    "shift": 3,
}


def around(name):
    """A module around it, as the message says."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = Optional()

    namespace = {}
    exec(forward_of(name), namespace)
    Around.forward = namespace["forward"]
    return Around()


def forward_of(name):
    if name == "mask":
        return "def forward(self, x, mask): return self.model(x, mask=mask)"
    return f"def forward(self, x): return self.model(x, {name}={GIVEN[name]!r})"


def error_of(name, options=None):
    x, y = x_and_y()
    pipe = mpcomp.pipeline(Optional(), CHUNKS, split=2, loss_fn=F.cross_entropy, **(options or {}))
    at_defaults = {"x": x, "mask": None, "times": 1, "way": "tanh", "flag": False}
    assert pipe.forward_backward(at_defaults, y) == pipe.forward_backward(x, y)
    with pytest.raises(ValueError) as error:
        pipe.forward_backward({"x": x, name: GIVEN[name]}, y)
    return str(error.value)


def check(name, said):
    assert "the forward of Optional (" in said and "test_optional_arguments.py:" in said
    shown = "a tensor of shape [3, 1]" if name == "mask" else repr(GIVEN[name])
    assert f"was given {shown} as {name}, but was cut with {name}=" in said
    assert ("Give mask no default there" in said) == (name == "mask")
    assert forward_of(name) in said


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_after_all_is_named_with_the_cure(name):
    check(name, error_of(name))


def test_on_every_rank(ranks):
    for said in ranks(error_of, 2, "mask", {"timeout": 60.0}):
        check("mask", said)


def test_by_place():
    x, y = x_and_y()
    pipe = mpcomp.pipeline(Optional(), CHUNKS, split=2, loss_fn=F.cross_entropy)
    with pytest.raises(ValueError, match="as mask, but was cut with mask=None"):
        pipe.forward_backward((x, GIVEN["mask"]), y)


def losses_of_cures(options=None):
    x, y = x_and_y()
    losses = {}
    for name, value in GIVEN.items():
        pipe = mpcomp.pipeline(
            around(name), CHUNKS, split=["model.a"], loss_fn=F.cross_entropy, **(options or {})
        )
        batch = {"x": x, name: value} if name == "mask" else x
        losses[name] = pipe.forward_backward(batch, y)
    return losses


def test_the_cure_is_the_plain_model(ranks):
    x, y = x_and_y()
    alone = losses_of_cures()
    for name, value in GIVEN.items():
        output = around(name).model(x, **{name: value})
        torch.testing.assert_close(alone[name], F.cross_entropy(output, y).detach())
    for losses in ranks(losses_of_cures, 2, {"timeout": 60.0}):
        assert all(same_bits(losses[name], alone[name]) for name in GIVEN)
