"""Models with a forward of their own: cut by names or numbers, and what is refused."""

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from stage_models import (
    Decoder,
    FreeResNet,
    assert_computes_the_same,
    assert_names_are_the_models,
    ids,
    images,
)
from torch import nn

from stages import blocks, split


class Net(nn.Module):
    """Three linears; subclasses write a forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in "abc")


class Skip(Net):
    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(y)) + y


class NeedsInput(Net):
    def forward(self, x):
        return self.c(self.b(self.a(x)) + x)


class Residual(Net):
    def forward(self, x):
        x = x + self.a(x)
        x = F.relu(x + self.b(x))
        return x + self.c(x)


class ReadsTraining(Net):
    def forward(self, x):
        return self.c(F.dropout(self.b(self.a(x)), 0.5, self.training))


class Branches(Net):
    def forward(self, x):
        return self.c(self.b(self.a(x)) if x.sum() > 0 else x)


class NoGrad(Net):
    def forward(self, x):
        with torch.no_grad():
            x = F.relu(self.a(x))
        return self.c(self.b(x))


class Constant(Net):
    def forward(self, x):
        return self.c(self.b(self.a(x) * torch.ones(3)))


class Counts(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.c(self.b(self.a(x)))


class Repeats(Net):
    def forward(self, x):
        return self.c(self.b(self.b(self.a(x))))


class Recurrent(nn.Module):
    """A block that returns a tuple, unpacked by the model."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x, (_, _) = self.lstm(x)
        return self.head(x)


class Nested(nn.Module):
    """Blocks inside a module that has a forward of its own too, and a stateless module reused."""

    def __init__(self):
        super().__init__()
        self.body = Decoder()
        self.body.head = nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(8, 5)

    def forward(self, ids):
        return self.out(self.drop(self.body(ids)))


@pytest.mark.parametrize(
    "where",
    [1, 2, 5, [1, 1, 6], ["layer1"], ["conv1", "layer1.0", "layer2"], ["bn1", "avgpool"]],
    ids=str,
)
def test_functional_relu_and_flatten(where):
    torch.manual_seed(0)
    model = FreeResNet()
    stages = split(model, where)
    assert_computes_the_same(model, stages, images())
    assert_names_are_the_models(model, stages)


@pytest.mark.parametrize("where", [1, 3, [2, 1, 3], ["h.0", "h.2"], ["embed"], ["h"]], ids=str)
def test_a_loop_over_a_module_list(where):
    torch.manual_seed(0)
    model = Decoder()
    stages = split(model, where)
    assert_computes_the_same(model, stages, ids())
    keys = [key for stage in stages for key in stage.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())
    assert "gain" not in keys  # a buffer that is not persistent stays so
    assert all(model.get_parameter(n) is p for s in stages for n, p in s.named_parameters())


@pytest.mark.parametrize("where", [["body.h.1"], ["body.embed", "body.h", "drop"], 3], ids=str)
def test_blocks_inside_a_block_by_name(where):
    torch.manual_seed(0)
    model = Nested()
    stages = split(model, where)
    assert_computes_the_same(model, stages, ids())
    assert sorted(k for s in stages for k in s.state_dict()) == sorted(model.state_dict())


def test_a_tuple_is_unpacked_before_the_cut():
    model = Recurrent()
    stages = split(model, ["lstm"])
    assert_computes_the_same(model, stages, torch.randn(2, 5, 3))


def test_blocks_are_segments_that_chain():
    model = FreeResNet().eval()
    units = blocks(model, sample=images())
    layers = [f"layer{i}.{j}" for i in (1, 2) for j in (0, 1)]
    assert [unit.name for unit in units] == ["conv1", "bn1", *layers, "avgpool", "fc"]
    x = images()
    for unit in units:
        x = unit.module(x)
    assert torch.equal(x, model(images()))


def test_blocks_at_a_skip_are_joined():
    assert [unit.name for unit in blocks(Skip())] == ["a", "c"]


@pytest.mark.parametrize("where", [3, ["a"], ["a", "b"]], ids=str)
def test_a_sum_after_a_block_belongs_to_its_stage(where):
    model = Residual()
    assert_computes_the_same(model, split(model, where), torch.randn(2, 3))


def test_flags_and_buffers_are_untouched_by_tracing():
    model = FreeResNet().train()
    model.layer2.eval()
    model.bn1.eval()
    before = {name: module.training for name, module in model.named_modules()}
    split(model, 3)
    assert {name: module.training for name, module in model.named_modules()} == before
    with pytest.raises(ValueError, match="cannot trace"):
        split(broken := Branches().eval(), 2)
    assert not any(module.training for module in broken.modules())


def test_an_optional_argument_is_held_at_its_default():
    stage = split(Decoder(), ["h.1"])[0]
    assert torch.equal(stage(ids(), None), stage(ids(), mask=None))
    said = r"Decoder \(.*stage_models.py:\d+\) was given a tensor of shape \[2, 4, 8\] as mask"
    with pytest.raises(ValueError, match=said):
        stage(ids(), torch.ones(2, 4, 8))


@pytest.mark.parametrize(
    ("model", "where", "message"),
    [
        (Skip(), ["b"], "output of block 'a' and the output of block 'b' would cross.*after: 'a'"),
        (NeedsInput(), ["a"], "the model's input 'x' and the output of block 'a' would cross"),
        (NeedsInput(), 3, r"more stages \(3\) than blocks \(2\)"),
        (ReadsTraining(), 2, "ReadsTraining depends on self.training.*training = True"),
        (Branches(), 2, "cannot trace the forward of Branches.*control flow.*Sequential"),
        (NoGrad(), ["a"], "under torch.no_grad"),
        (Constant(), ["a"], r"tensor of shape \(3,\) that is neither.*register_buffer"),
        (Counts(), ["a"], "cannot trace the forward of Counts.*assigns to its own 'steps'"),
        (Repeats(), ["b"], "it is called 2 times"),
        (Skip(), ["c"], "no block is called after it"),
        (FreeResNet(), ["layer3"], "calls no block 'layer3'; did you mean 'layer"),
        (FreeResNet(), ["layer1.0.conv1"], "calls no block"),
        (FreeResNet(), ["layer2", "layer1"], "'layer1' comes before 'layer2'"),
        (FreeResNet(), ["layer1", "layer1.1"], "end at the same block"),
        (FreeResNet(), [4, 5], "add up to 9, but the model has 8 blocks"),
        (FreeResNet(), "paper", "FreeResNet has no paper_cut"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value)[:20],
)
def test_refused(model, where, message):
    with pytest.raises(ValueError, match=message):
        split(model, where)


class Pops(Net):
    def forward(self, x, cache=None):
        x = self.a(x)
        cache.pop()
        return self.b(x)


def without_defaults(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        if kwargs.pop("shout", False):
            print("called")
        return forward(self, *args, **kwargs)

    return wrapper


class Wrapped(Net):
    @without_defaults
    def forward(self, x, scale=1.0, mask=None, cache=None, **kwargs):
        return self.c(self.b(self.a(x) * scale))


class Returns(Net):
    def forward(self, x, y=None):
        logits = self.b(self.a(x))
        return logits, None if y is None else F.cross_entropy(logits, y)


@pytest.mark.parametrize(
    "model, line",
    [
        (Pops(), "cache.pop()"),
        (Branches(), "return self.c(self.b(self.a(x)) if x.sum() > 0 else x)"),
    ],
)
def test_what_cannot_be_traced_is_shown_in_the_models_code(model, line):
    with pytest.raises(ValueError) as caught:
        split(model, 2)
    assert f"at {__file__}:" in str(caught.value) and f"({line}" in str(caught.value)


def test_a_decorator_that_tracing_ends_in_is_named():
    with pytest.raises(ValueError, match="cannot trace") as caught:
        split(Wrapped(), 2)
    line = inspect.getsourcelines(without_defaults)[1] + 1
    assert f"wrapped by a decorator ({__file__}:{line})" in str(caught.value)
    assert "Write a module of your own" in str(caught.value)


def test_a_model_that_returns_its_loss_as_well():
    first, last = split(Returns(), 2)
    with pytest.raises(
        TypeError, match=r"a tuple \(Tensor, NoneType\), as the whole.*of Returns re"
    ):
        last(first(torch.randn(2, 3)))


def test_tracing_runs_nothing():
    model = Counts()
    with pytest.raises(ValueError):
        split(model, ["a"])
    assert model.steps == 0
    assert isinstance(model.steps, torch.Tensor)


def test_a_model_without_blocks():
    class Empty(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="calls no modules"):
        split(Empty(), 1)
