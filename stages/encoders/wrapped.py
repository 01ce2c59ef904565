"""Modules in place of a model's own, in the shallow copy that a stage runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Reached(Exception):
    """The stage's last block has run; nothing that stands after it is the stage's."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class Wrapped(nn.Module):
    """In place of a block, with all attributes that a model may ask it for."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["inside"] = block  # no child: the stage has it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inside"], name)


class Given(Wrapped):
    """A block that is given what crossed the cut, or sizes that blocks before it would tell."""

    def __init__(self, block: nn.Module, given: Mapping[int, Any]) -> None:
        super().__init__(block)
        self.__dict__["_given"] = given

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args:  # the activation by its name
            return self.inside(**{**kwargs, "hidden_states": self._given[0]})
        return self.inside(*[self._given.get(i, x) for i, x in enumerate(args)], **kwargs)


class Ending(Wrapped):
    """A block after which the forward ends."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inside(*args, **kwargs)
        raise Reached(output[0] if isinstance(output, tuple) else output)


class Passing(Wrapped):
    """No block: gives what crossed the cut, as the blocks give theirs."""

    def __init__(self, like: nn.Module, output: object) -> None:
        super().__init__(like)
        self.__dict__["_output"] = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output


def in_place_of(embeddings: nn.Module, output: object) -> nn.Module:
    """A copy of a module before the blocks that computes nothing: the first stage has done it."""
    if isinstance(embeddings, nn.Conv1d) and isinstance(output, Tensor):
        output = output.transpose(1, 2)  # of sounds: its channels stand before its positions
    shell = _without_weights(embeddings)
    vars(shell)["forward"] = lambda *args, **kwargs: output
    return shell


def in_shape(x: Tensor, row: Sequence[int]) -> Tensor:
    """Zeros in place of a model's input, of rows of that size, for what asks for its shape."""
    return x.new_zeros(()).expand(len(x), *row)


def _without_weights(module: nn.Module) -> nn.Module:
    """A copy that can be asked for its dtype and sizes; another rank has its weights."""
    shell = copy.copy(module)
    weights = {name: None if p is None else _meta(p) for name, p in module._parameters.items()}
    inside = {n: None if m is None else _without_weights(m) for n, m in module._modules.items()}
    vars(shell).update(_parameters=weights, _modules=inside)
    return shell


def _meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
