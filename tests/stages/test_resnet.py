"""ResNets: sizes, names and shapes of the well known CIFAR code."""

import pytest
import torch
from torch import nn

from stages import resnet18, resnet34, resnet50, resnet101, split


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (resnet18, 11_173_962),
        (resnet34, 21_282_122),
        (resnet50, 23_520_842),
        (resnet101, 42_512_970),
    ],
)
def test_parameter_counts(build, expected):
    with torch.device("meta"):
        model = build()
    assert sum(p.numel() for p in model.parameters()) == expected


def test_keys_are_those_of_pytorch_cifar():
    def norm(name):
        tails = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return [f"{name}.{tail}" for tail in tails]

    expected = ["conv1.weight", *norm("bn1")]
    for i in (1, 2, 3, 4):
        for j in (0, 1):
            block = f"layer{i}.{j}"
            expected += [f"{block}.conv1.weight", *norm(f"{block}.bn1")]
            expected += [f"{block}.conv2.weight", *norm(f"{block}.bn2")]
            if i > 1 and j == 0:
                expected += [f"{block}.shortcut.0.weight", *norm(f"{block}.shortcut.1")]
    expected += ["linear.weight", "linear.bias"]
    assert list(resnet18(width=4).state_dict()) == expected


def test_bottleneck_projects_also_in_layer1():
    keys = resnet50(width=4).state_dict()
    assert keys["layer1.0.shortcut.0.weight"].shape == (16, 4, 1, 1)
    assert keys["layer4.2.conv3.weight"].shape == (128, 32, 1, 1)
    assert keys["linear.weight"].shape == (10, 128)


def test_shapes_at_the_paper_cut():
    with torch.device("meta"):
        model = resnet18()
        x = torch.empty(5, 3, 32, 32)
    shapes = []
    for stage in split(model, "paper"):
        x = stage(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(5, 64, 32, 32), (5, 128, 16, 16), (5, 256, 8, 8), (5, 10)]


def test_pool_is_the_4x4_mean_of_pytorch_cifar():
    x = torch.randn(2, 8, 4, 4)
    pooled = resnet18(width=4).pool(x)
    torch.testing.assert_close(pooled, nn.functional.avg_pool2d(x, 4))


def test_width_and_channels():
    model = resnet18(7, width=4, in_channels=1)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 7)
    assert model.conv1.weight.shape == (4, 1, 3, 3)
    assert model.layer4[1].conv2.weight.shape == (32, 32, 3, 3)


@pytest.mark.parametrize("build", [resnet18, resnet50])
def test_blocks_leave_their_input_alone(build):
    for layer in (build(width=4).layer1, build(width=4).layer2):
        for block in layer:
            x = torch.randn(2, block.conv1.in_channels, 8, 8)
            before = x.clone()
            block(x)
            assert torch.equal(x, before)
