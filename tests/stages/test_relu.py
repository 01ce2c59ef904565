"""Cuts behind a ReLU, as they are told from the stage before them."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from stage_models import Block, FreeResNet
from torch import Tensor, nn

import stages


class Ends(nn.Module):
    """A block that computes ``end`` of a convolution."""

    def __init__(self, end) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.conv(x))


class Branches(Ends):
    """A block that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)) if x.sum() > 0 else self.conv(x)


class Named(Ends):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(input=F.relu(self.conv(x)), kernel_size=1)


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 3, 3, padding=1)


def hooked() -> nn.Module:
    relu = nn.ReLU()
    relu.register_forward_hook(lambda module, args, output: output - 1)
    return nn.Sequential(conv(), relu)


BEHIND = {
    "module": lambda: nn.Sequential(conv(), nn.ReLU()),
    "in place": lambda: nn.Sequential(conv(), nn.ReLU(inplace=True)),
    "nested": lambda: nn.Sequential(conv(), nn.Sequential(nn.Sequential(nn.ReLU()), nn.Identity())),
    "pooled": lambda: nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5)),
    "residual block": lambda: Block(3),
    "function": lambda: Ends(F.relu),
    "method": lambda: Ends(lambda x: x.relu()),
    "function, then pooled": lambda: Ends(lambda x: F.avg_pool2d(torch.relu(x), 2)),
    "by name": lambda: Named(None),
    "of stages": lambda: stages.resnet18(width=3).layer1[0],
}
NOT_BEHIND = {
    "no ReLU": conv,
    "GELU": lambda: nn.Sequential(conv(), nn.GELU()),
    "leaky": lambda: nn.Sequential(conv(), nn.LeakyReLU()),
    "before a normalization": lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)),
    "minus a constant": lambda: Ends(lambda x: F.relu(x) - 1),
    "product": lambda: Ends(lambda x: F.relu(x) * x),
    "a hook": hooked,
    "not traced": lambda: Branches(None),
}
INPUT = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def first_stage(block: nn.Module) -> stages.Stage:
    model = nn.Sequential(OrderedDict(block=nn.Sequential(nn.Identity(), block), rest=conv()))
    return stages.split(model, ["block"])[0]


@pytest.mark.parametrize("case", BEHIND)
def test_behind_a_relu(case):
    """And there zeros need no gradient: with any in their place the stage's own stay the same."""
    torch.manual_seed(0)
    stage = first_stage(BEHIND[case]())
    assert stages.is_behind_relu(stage)
    grads = []
    for replaced in (False, True):
        torch.manual_seed(1)  # of dropout
        out = stage(INPUT.clone())
        gradient = torch.ones_like(out)
        assert (out == 0).any()
        if replaced:
            gradient[out == 0] = 0
        grads.append(torch.autograd.grad(out, list(stage.parameters()), gradient))
    for whole, without in zip(*grads, strict=True):
        torch.testing.assert_close(whole, without, rtol=0, atol=0)


@pytest.mark.parametrize("case", NOT_BEHIND)
def test_not_behind_a_relu(case):
    assert not stages.is_behind_relu(first_stage(NOT_BEHIND[case]()))


def test_between_blocks():
    """A forward of its own, with the ReLU in it, is followed from each of its cuts."""
    cut = stages.split(FreeResNet(), 3)
    assert [stages.is_behind_relu(stage) for stage in cut[:-1]] == [True, True]


@pytest.mark.parametrize(
    ("make", "where"),
    [(stages.resnet18, 4), (stages.resnet50, 4), (stages.vgg16, ["block1", "block3"])],
)
def test_all_cuts_of_the_nets_here(make, where):
    cut = stages.split(make(width=4), where)
    behind = [stages.is_behind_relu(stage) for stage in cut[:-1]]
    assert all(behind), [stage.block_names[-1] for stage in cut]


def test_a_preactivated_net_is_not():
    cut = stages.split(stages.wide_resnet(depth=10, widen=1, width=4), 3)
    assert not any(stages.is_behind_relu(stage) for stage in cut[:-1])
