"""Small models for the tests of `stages`, and the law that they are held to."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages import Stage


class Block(nn.Module):
    """A residual block that ends as torchvision's do, with a ReLU that may be in place."""

    def __init__(self, channels: int, inplace: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + x)


class FreeResNet(nn.Module):
    """Functional relu, torch.flatten and nested Sequentials, as torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.layer2 = nn.Sequential(Block(4), Block(4))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Decoder(nn.Module):
    """Root parameters and buffers, an arange, and a loop over a ModuleList."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(6, 8))
        self.register_buffer("gain", torch.full((8,), 0.5), persistent=False)
        self.h = nn.ModuleList(Layer(8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.position[torch.arange(ids.shape[1])]
        if mask is not None:
            x = x * mask
        for layer in self.h:
            x = layer(x) * self.gain
        return self.head(x * self.scale)


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def ids() -> Tensor:
    return torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def run(stages: list[Stage], x: Tensor) -> Tensor:
    """Chain stages as a pipeline does: each receives a leaf of its own, not a live graph."""
    received, sent = [x], []
    for stage in stages:
        sent.append(stage(received[-1]))
        received.append(sent[-1].detach().clone().requires_grad_())
    sent[-1].square().sum().backward()
    for i in reversed(range(len(stages) - 1)):
        sent[i].backward(received[i + 1].grad)
    return sent[-1]


def assert_computes_the_same(model: nn.Module, stages: list[Stage], x: Tensor) -> None:
    """Output, every gradient by name and every buffer: the same bits as a copy never split."""
    plain = copy.deepcopy(model)
    torch.manual_seed(0)  # for dropout
    expected = plain(x)
    expected.square().sum().backward()
    torch.manual_seed(0)
    output = run(stages, x)
    assert torch.equal(output, expected)
    compared = 0
    for name, theirs in plain.named_parameters(remove_duplicate=False):
        for stage in stages:
            ours = dict(stage.named_parameters(remove_duplicate=False)).get(name)
            if ours is None:
                continue
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                assert torch.equal(ours.grad, theirs.grad), name
            compared += 1
    assert compared == len(list(plain.named_parameters(remove_duplicate=False)))
    after = {k: v for stage in stages for k, v in stage.named_buffers()}
    for name, buffer in plain.named_buffers():
        assert torch.equal(after[name], buffer), name


def assert_names_are_the_models(model: nn.Module, stages: list[Stage]) -> None:
    """Every key of the model is in one stage, as the very same tensor."""
    keys = [key for stage in stages for key in stage.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert model.get_parameter(name) is parameter
        for name, buffer in stage.named_buffers():
            assert model.get_buffer(name) is buffer
