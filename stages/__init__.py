"""From a model to a list of stage modules, and back: ResNets, VGG, LSTMs, balance, split, merge.

This package knows nothing of communication. A stage is an ordinary `nn.Module` from one tensor
to one tensor; it shares its parameters with the model and keeps the model's names for them.

    model = resnet18()
    stages = split(model, "paper")        # or 4, or [3, 2, 2, 5], or ["layer1", "layer2"]
    for stage in stages:
        x = stage(x)                      # the same bits as model(x)
    assert merge(stages) is model
"""

from stages.balance import balance, partition, seconds
from stages.blocks import Block, blocks
from stages.lstm import LSTMLM, lstm_lm
from stages.relu import is_behind_relu
from stages.resnet import ResNet, resnet18, resnet34, resnet50, resnet101
from stages.sharing import shared_parameters
from stages.split import split
from stages.stage import Stage, StageState, Tie, merge, owner_of, tie_names, ties
from stages.together import unit_seconds
from stages.vgg import VGG, vgg16
from stages.wide_resnet import WideResNet, wide_resnet

__all__ = [
    "LSTMLM",
    "VGG",
    "Block",
    "ResNet",
    "Stage",
    "StageState",
    "Tie",
    "WideResNet",
    "balance",
    "blocks",
    "is_behind_relu",
    "lstm_lm",
    "merge",
    "owner_of",
    "partition",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "seconds",
    "shared_parameters",
    "split",
    "tie_names",
    "ties",
    "unit_seconds",
    "vgg16",
    "wide_resnet",
]
