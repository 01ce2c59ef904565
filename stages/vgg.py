"""VGG-16 as a plain chain that can be cut anywhere, in the form for small images.

K. Simonyan and A. Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition,
2015 (configuration D): thirteen 3x3 convolutions in five blocks, each ended by a max-pool, and a
classifier of three linear layers that has most of the weights.

Shape suffixes: B batch, C channels, H and W image sides.
"""

from collections import OrderedDict
from typing import ClassVar, Final

from torch import nn

#: Convolutions of each block, and their channels as multiples of the first block's.
_BLOCKS: Final = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))


class VGG(nn.Sequential):
    """block1 to block5, pool, flatten, classifier: [B, C, H, W] -> [B, classes].

    Pools halve a side and round up, so that images smaller than 32x32 go through all five: a side
    of 1 stays 1. Convolutions begin with He's initialization, without which a network so deep and
    without batch norm does not learn.

    Args:
        num_classes: outputs of the last layer.
        width: channels of block1; those of other blocks and of the classifier grow with it, 64
            gives the original's 512 and 4096.
        in_channels: channels of the image.
        batch_norm: after each convolution; False is the original.
        dropout: probability, after the classifier's first two layers.
        pooled_side: side of the image that the classifier reads, to which the last block's output
            is averaged (or repeated, where it is smaller). 1 is usual for CIFAR; 7 is the original.

    Raises:
        ValueError: a size below 1.
    """

    #: Four stages, the first three of nearly the same compute, as Rudakov et al. cut ResNets. Each
    #: cut comes after a pool, where a message is a quarter of what it is before.
    paper_cut: ClassVar[tuple[str, ...]] = ("block2", "block3", "block4")

    def __init__(
        self,
        num_classes: int = 10,
        *,
        width: int = 64,
        in_channels: int = 3,
        batch_norm: bool = True,
        dropout: float = 0.5,
        pooled_side: int = 1,
    ) -> None:
        if width < 1 or pooled_side < 1:
            raise ValueError(
                f"width is {width}, pooled_side is {pooled_side}; pass 1 or more for both"
            )
        children: OrderedDict[str, nn.Module] = OrderedDict()
        channels = in_channels
        for i, (depth, factor) in enumerate(_BLOCKS, start=1):
            children[f"block{i}"] = _block(channels, width * factor, depth, batch_norm)
            channels = width * factor
        children["pool"] = nn.AdaptiveAvgPool2d(pooled_side)
        children["flatten"] = nn.Flatten()
        hidden = 64 * width
        children["classifier"] = nn.Sequential(
            OrderedDict(
                linear1=nn.Linear(channels * pooled_side**2, hidden),
                relu1=nn.ReLU(),
                dropout1=nn.Dropout(dropout),
                linear2=nn.Linear(hidden, hidden),
                relu2=nn.ReLU(),
                dropout2=nn.Dropout(dropout),
                linear3=nn.Linear(hidden, num_classes),
            )
        )
        super().__init__(children)


def _block(in_channels: int, channels: int, depth: int, batch_norm: bool) -> nn.Sequential:
    """`depth` convolutions with their activations, and a max-pool."""
    children: OrderedDict[str, nn.Module] = OrderedDict()
    for j in range(1, depth + 1):
        # A batch norm takes away any bias before it, and has its own.
        conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=not batch_norm)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        children[f"conv{j}"] = conv
        if batch_norm:
            children[f"bn{j}"] = nn.BatchNorm2d(channels)
        children[f"relu{j}"] = nn.ReLU()
        in_channels = channels
    children["pool"] = nn.MaxPool2d(2, ceil_mode=True)
    return nn.Sequential(children)


def vgg16(
    num_classes: int = 10,
    *,
    width: int = 64,
    in_channels: int = 3,
    batch_norm: bool = True,
    dropout: float = 0.5,
    pooled_side: int = 1,
) -> VGG:
    """VGG-16: 33,642,442 parameters by default; for arguments see `VGG`.

    The original, with `vgg16(1000, batch_norm=False, pooled_side=7)`: 138,357,544, or 528 MiB.
    """
    return VGG(
        num_classes,
        width=width,
        in_channels=in_channels,
        batch_norm=batch_norm,
        dropout=dropout,
        pooled_side=pooled_side,
    )
