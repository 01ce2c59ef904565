"""Cuts behind a ReLU: where what crosses is zero, the stage before makes its gradient zero too.

A chain is followed back from the cut through modules that leave such zeros as they are (pooling,
dropout, flattening). A block with a forward of its own is traced for that, as `stages.graph` traces
models. What cannot be traced is not known to end in a ReLU.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from stages.chain import is_plain, run_chain
from stages.containers import has_hooks
from stages.graph import Program, traced
from stages.stage import Stage

_RELU_MODULES: Final = (nn.ReLU, nn.ReLU6)
_RELU_FUNCTIONS: Final = (F.relu, F.relu_, F.relu6, torch.relu, torch.relu_)
_RELU_METHODS: Final = ("relu", "relu_")
#: An output of theirs is zero only where a gradient behind a ReLU comes to nothing.
_KEEPING_MODULES: Final = (
    nn.Identity,
    nn.Flatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
)
_KEEPING_FUNCTIONS: Final = (
    F.dropout,
    F.max_pool2d,
    F.avg_pool2d,
    F.adaptive_max_pool2d,
    F.adaptive_avg_pool2d,
    torch.flatten,
)
_KEEPING_METHODS: Final = ("flatten", "contiguous", "reshape", "view")


def is_behind_relu(stage: Stage) -> bool:
    """Whether the output of `stage` is zero only where its gradient would come to nothing."""
    if isinstance(stage._run, Program):
        return _of_graph(stage._run.graph, stage)
    blocks = [stage.get_submodule(name) for name in stage.block_names]
    return stage._run is run_chain and _of_chain(blocks)


def _of_chain(modules: Sequence[nn.Module]) -> bool:
    last = next((m for m in reversed(modules) if not isinstance(m, _KEEPING_MODULES)), None)
    return last is not None and _of_module(last)


def _of_module(module: nn.Module) -> bool:
    if isinstance(module, _RELU_MODULES):
        return not has_hooks(module)
    if isinstance(module, nn.Sequential) and is_plain(module):
        return _of_chain(list(module))
    if has_hooks(module) or type(module).__module__.startswith("torch.nn."):
        return False  # a hook may return anything; what of torch's own ends in a ReLU is known
    try:
        graph = traced(module)
    except ValueError:
        return False
    return _of_graph(graph, module)


def _of_graph(graph: fx.Graph, module: nn.Module) -> bool:
    node = next(iter(reversed(graph.nodes))).args[0]
    while isinstance(node, fx.Node):
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            if not isinstance(called, _KEEPING_MODULES):
                return _of_module(called)
        elif node.op in ("call_function", "call_method"):
            if node.target in (*_RELU_FUNCTIONS, *_RELU_METHODS):
                return True
            if node.target not in (*_KEEPING_FUNCTIONS, *_KEEPING_METHODS):
                return False
        else:
            return False
        node = node.args[0] if node.args else node.kwargs.get("input")
    return False
