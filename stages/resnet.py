"""ResNets in the CIFAR form, as plain chains that can be cut anywhere.

K. He et al., Deep Residual Learning for Image Recognition, 2016, with the 3x3 stem of stride 1
and no max-pool that is usual for 32x32 images. Names, shapes and initialization are those of
the well known pytorch-cifar code, so its checkpoints load.

Shape suffixes: B batch, C channels, H and W image sides.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn


def _conv3x3(in_channels: int, channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    """The identity where shapes allow it, else a strided 1x1 projection."""
    if stride == 1 and in_channels == out_channels:
        return nn.Sequential()
    projection = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
    return nn.Sequential(projection, nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(in_channels, channels, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        # Nothing here is in place: x may be a message that was received, and with an identity
        # shortcut it is read twice.
        out = F.relu(self.bn1(self.conv1(x_BCHW)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x_BCHW))


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the channels, beside a shortcut."""

    expansion: ClassVar[int] = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = self.expansion * channels
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x_BCHW)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.shortcut(x_BCHW))


class ResNet(nn.Sequential):
    """conv1, bn1, relu, layer1 to layer4, pool, flatten, linear: [B, C, H, W] -> [B, classes].

    Args:
        block: `BasicBlock` or `Bottleneck`.
        num_blocks: blocks in each of the four layers.
        num_classes: outputs of the last layer.
        width: channels of the stem and of layer1; doubled in each later layer.
        in_channels: channels of the image.
    """

    #: Where Rudakov et al. (Activations and Gradients Compression for Model-Parallel Training,
    #: 2023) cut it: four stages, the stem in the first, pool and linear in the last.
    paper_cut: ClassVar[tuple[str, ...]] = ("layer1", "layer2", "layer3")

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        num_blocks: Sequence[int],
        num_classes: int = 10,
        *,
        width: int = 64,
        in_channels: int = 3,
    ) -> None:
        children: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=_conv3x3(in_channels, width), bn1=nn.BatchNorm2d(width), relu=nn.ReLU()
        )
        channels = width
        for i, depth in enumerate(num_blocks):
            layer = nn.Sequential()
            for j in range(depth):
                stride = 2 if i > 0 and j == 0 else 1
                layer.append(block(channels, width * 2**i, stride))
                channels = width * 2**i * block.expansion
            children[f"layer{i + 1}"] = layer
        # One value per channel: on 32x32 images the same as pytorch-cifar's 4x4 mean.
        children["pool"] = nn.AdaptiveAvgPool2d(1)
        children["flatten"] = nn.Flatten()
        children["linear"] = nn.Linear(channels, num_classes)
        super().__init__(children)


def resnet18(num_classes: int = 10, *, width: int = 64, in_channels: int = 3) -> ResNet:
    """ResNet-18: 11,173,962 parameters at width 64."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, width=width, in_channels=in_channels)


def resnet34(num_classes: int = 10, *, width: int = 64, in_channels: int = 3) -> ResNet:
    """ResNet-34: 21,282,122 parameters at width 64."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, width=width, in_channels=in_channels)


def resnet50(num_classes: int = 10, *, width: int = 64, in_channels: int = 3) -> ResNet:
    """ResNet-50: 23,520,842 parameters at width 64."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, width=width, in_channels=in_channels)


def resnet101(num_classes: int = 10, *, width: int = 64, in_channels: int = 3) -> ResNet:
    """ResNet-101: 42,512,970 parameters at width 64."""
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes, width=width, in_channels=in_channels)
