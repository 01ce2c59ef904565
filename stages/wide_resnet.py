"""Wide ResNets as plain chains that can be cut anywhere, in the form for small images.

S. Zagoruyko and N. Komodakis, Wide Residual Networks, 2016: three groups of blocks that normalize
before they convolve, so that nothing but additions lies on the way through the shortcuts. Layout
and initialization are those of the authors' code.

Shape suffixes: B batch, C channels, H and W image sides.
"""

from collections import OrderedDict
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn


def _conv(in_channels: int, channels: int, side: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(
        in_channels, channels, side, stride=stride, padding=(side - 1) // 2, bias=False
    )
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class WideBlock(nn.Module):
    """Norm, ReLU and a 3x3 convolution, twice, beside a shortcut.

    Args:
        in_channels: of the input.
        channels: of the output.
        stride: of the first convolution.
        dropout: probability, between the convolutions.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = _conv(in_channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = _conv(channels, channels, 3)
        self.projects = stride != 1 or in_channels != channels
        self.shortcut = _conv(in_channels, channels, 1, stride) if self.projects else nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        # Nothing here is in place: x may be a message that was received, and it is read twice.
        normed = F.relu(self.bn1(x_BCHW))
        out = self.dropout(F.relu(self.bn2(self.conv1(normed))))
        # A projection reads what is normalized, the identity what came in.
        kept = self.shortcut(normed if self.projects else x_BCHW)
        return self.conv2(out) + kept  # type: ignore[no-any-return]


class WideResNet(nn.Sequential):
    """conv1, layer1 to layer3, bn1, relu, pool, flatten, linear: [B, C, H, W] -> [B, classes].

    Args:
        num_classes: outputs of the last layer.
        depth: convolutions, with the three of the projections: 6 n + 4, for n blocks in each of
            the three layers.
        widen: how many times as many channels the blocks have as those of a narrow network.
        width: channels of conv1; layer1 has `widen` times as many, and each later one twice those
            of the one before. 16 is the papers'.
        in_channels: channels of the image.
        dropout: probability, inside each block.

    Raises:
        ValueError: a depth that is no sum of whole blocks, or a size below 1.
    """

    #: Three stages of nearly the same compute, as Rudakov et al. cut ResNets: after a layer, with
    #: conv1 in the first stage and pool and linear in the last.
    paper_cut: ClassVar[tuple[str, ...]] = ("layer1", "layer2")

    def __init__(
        self,
        num_classes: int = 10,
        *,
        depth: int = 28,
        widen: int = 10,
        width: int = 16,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        num_blocks, rest = divmod(depth - 4, 6)
        if rest or num_blocks < 1:
            raise ValueError(
                f"depth is {depth}; pass 6 n + 4, for n blocks in each of three layers: 10, 16, "
                "22, 28, ..."
            )
        if width < 1 or widen < 1:
            raise ValueError(f"width is {width}, widen is {widen}; pass 1 or more for both")
        children: OrderedDict[str, nn.Module] = OrderedDict(conv1=_conv(in_channels, width, 3))
        in_channels = width
        for i in range(3):
            channels = width * widen * 2**i
            layer = nn.Sequential()
            for j in range(num_blocks):
                stride = 2 if i > 0 and j == 0 else 1
                layer.append(WideBlock(in_channels, channels, stride, dropout))
                in_channels = channels
            children[f"layer{i + 1}"] = layer
        children["bn1"] = nn.BatchNorm2d(in_channels)
        children["relu"] = nn.ReLU()
        # One value per channel: on 32x32 images the same as the authors' 8x8 mean.
        children["pool"] = nn.AdaptiveAvgPool2d(1)
        children["flatten"] = nn.Flatten()
        linear = nn.Linear(in_channels, num_classes)
        nn.init.zeros_(linear.bias)
        children["linear"] = linear
        super().__init__(children)


def wide_resnet(
    num_classes: int = 10,
    *,
    depth: int = 28,
    widen: int = 10,
    width: int = 16,
    in_channels: int = 3,
    dropout: float = 0.0,
) -> WideResNet:
    """WideResNet-28-10, or another: 36,479,194 parameters by default; arguments of `WideResNet`."""
    return WideResNet(
        num_classes,
        depth=depth,
        widen=widen,
        width=width,
        in_channels=in_channels,
        dropout=dropout,
    )
