"""Tensors of which each replica holds a piece, and whole ones."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["distribute_like", "local", "on_meta"]

_Module = TypeVar("_Module", bound=nn.Module)


def local(x: Tensor) -> Tensor:
    """This rank's piece of a sharded tensor; any other as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def distribute_like(x: Tensor, other: Tensor) -> Tensor:
    """A whole tensor cut as ``other`` is, without communication; as it is if that is whole."""
    if not isinstance(other, DTensor) or isinstance(x, DTensor):
        return x
    here = x.to(other.device)
    return distribute_tensor(here, other.device_mesh, other.placements, src_data_rank=None)


def on_meta(module: _Module) -> _Module:
    """A copy without data, which knows nothing of what becomes of the module."""
    named = module.named_parameters(remove_duplicate=False)  # a stage's second uses, too
    held = [*(parameter for _, parameter in named), *module.buffers()]
    memo: dict[int, object] = {}
    for x in held:
        empty = torch.empty_like(x, device="meta")
        if isinstance(x, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=x.requires_grad)
        memo[id(x)] = empty
    return copy.deepcopy(module, memo)
