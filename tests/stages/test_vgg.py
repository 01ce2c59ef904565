"""VGG-16: sizes of the paper, images of any side, where it is cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stages import VGG, blocks, merge, split, vgg16


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts():
    """The original's is that of the paper's table 2, and of GraVAC's 528 MB."""
    with torch.device("meta"):
        assert size(vgg16()) == 33_642_442
        original = vgg16(1000, batch_norm=False, pooled_side=7)
    assert size(original) == 138_357_544
    assert round(4 * size(original) / 2**20) == 528


def test_thirteen_convolutions_and_five_pools():
    with torch.device("meta"):
        model = vgg16()
    convolutions = [one for one in model.modules() if isinstance(one, nn.Conv2d)]
    assert [one.out_channels for one in convolutions] == [64] * 2 + [128] * 2 + [256] * 3 + [
        512
    ] * 6
    assert sum(isinstance(one, nn.MaxPool2d) for one in model.modules()) == 5
    assert [one.bias is None for one in convolutions] == [True] * 13  # batch norm has its own
    plain = vgg16(width=2, batch_norm=False)
    assert not any(isinstance(one, nn.BatchNorm2d) for one in plain.modules())
    assert [type(one) for one in plain.block1] == [
        *(nn.Conv2d, nn.ReLU, nn.Conv2d, nn.ReLU, nn.MaxPool2d),
    ]
    assert plain.block1.conv1.bias is not None


def test_shapes_at_the_paper_cut():
    with torch.device("meta"):
        model = vgg16()
        x = torch.empty(5, 3, 32, 32)
    shapes = []
    for stage in split(model, "paper"):
        x = stage(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(5, 128, 8, 8), (5, 256, 4, 4), (5, 512, 2, 2), (5, 10)]


@pytest.mark.parametrize("side", [1, 7, 8, 9, 28, 32, 33])
@pytest.mark.parametrize("pooled_side", [1, 3])
def test_images_of_any_side(side, pooled_side):
    model = vgg16(7, width=2, in_channels=1, pooled_side=pooled_side).eval()
    assert model(torch.randn(2, 1, side, side)).shape == (2, 7)


def test_pools_of_sides_that_halve_are_the_papers():
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(vgg16(width=2).block1.pool(x), F.max_pool2d(x, 2))


def test_width_scales_all_layers():
    model = vgg16(width=4)
    assert model.block5.conv3.weight.shape == (32, 32, 3, 3)
    assert model.classifier.linear2.weight.shape == (256, 256)


def test_images_stay_apart_without_batch_norm():
    """By torch's own initialization they would all give nearly the same in the end."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 32, 32)
    spreads = []
    for block in list(vgg16(width=16, batch_norm=False))[:5]:
        x = block(x)
        spreads.append(x.std(dim=0).mean().item())
    assert all(0.005 < one < 2 for one in spreads), spreads


def test_stages_are_the_model():
    torch.manual_seed(0)
    model = vgg16(width=2, dropout=0.0)
    x = torch.randn(3, 3, 8, 8)
    expected = model(x)
    value = x
    stages = split(model, [14, 10, 10, 19])
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, expected)
    assert len(blocks(model)) == 53 and merge(stages) is model
    assert isinstance(model, VGG)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"pooled_side": 0}])
def test_sizes_below_one(wrong):
    with pytest.raises(ValueError, match="pass 1 or more"):
        vgg16(**wrong)


def test_seed_decides_the_weights():
    def made(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in vgg16(width=2).parameters()])

    assert torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))
