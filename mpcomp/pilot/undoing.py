"""A training state that is put back: whatever is done within a block, nothing is left of it.

Weights, buffers, gradients, the optimizer, the loss scaler, and the generators that training and
loaders draw from. Tensors keep their identity, and their bits.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpcomp.checkpoint.generators import generator_states, set_generators
from mpcomp.comm.mesh import Mesh

__all__ = ["Start", "undone"]


class Start:
    """The state that training begins with, as often as one wants.

    Args:
        model: whose tensors are kept; they are on this rank.
        optimizer: of its parameters, if any.
        scaler: of its losses, if any.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._parameters = list(model.parameters())
        self._grads = [parameter.grad for parameter in self._parameters]
        self._buffers = [
            (owner._buffers, name, buffer)
            for owner in model.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        tensors = [*self._parameters, *(buffer for *_, buffer in self._buffers)]
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._optimizer = optimizer
        if optimizer is not None:
            self._state = optimizer.state
            self._groups = [dict(group) for group in optimizer.param_groups]
        self._scaler = scaler
        self._scaling = None if scaler is None else copy.deepcopy(scaler.state_dict())

    def begin(self) -> None:
        """Begins anew from it: without gradients, with a copy of the optimizer's state."""
        self._put_tensors()
        for parameter in self._parameters:
            parameter.grad = None
        if self._optimizer is not None:
            self._optimizer.state = defaultdict(
                dict, {key: copy.deepcopy(value) for key, value in self._state.items()}
            )
            for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update({k: v if k == "params" else copy.deepcopy(v) for k, v in kept.items()})

    def put_back(self) -> None:
        """Ends what `begin` has begun."""
        self._put_tensors()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        if self._optimizer is not None:
            self._optimizer.state = self._state
            for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.clear()
                group.update(kept)

    def _put_tensors(self) -> None:
        with torch.no_grad():
            for buffers, name, buffer in self._buffers:
                buffers[name] = buffer  # a module may have put another in its place
            for tensor, value in self._values:
                tensor.copy_(value)
        if self._scaler is not None and self._scaling:
            self._scaler.load_state_dict(copy.deepcopy(self._scaling))


@contextmanager
def undone(
    mesh: Mesh,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
    data: Any,
) -> Iterator[Start]:
    """Within it one may train; then all is as before.

    Args:
        mesh: the ranks.
        model: of this rank.
        optimizer: of its parameters, if any.
        scaler: of its losses, if any.
        data: a loader, whose own generators count, too.
    """
    generators = [
        found
        for owner in (data, getattr(data, "sampler", None))
        if isinstance(found := getattr(owner, "generator", None), torch.Generator)
    ]
    put: list[Callable[[], Any]] = [
        _putting(generator.set_state, generator.get_state()) for generator in generators
    ]
    put += [
        _putting(random.setstate, random.getstate()),
        # Augmentation may draw from numpy's global one, whatever we think of that.
        _putting(np.random.set_state, np.random.get_state()),  # noqa: NPY002
    ]
    of_torch: dict[str, Tensor] = generator_states(mesh)
    start = Start(model, optimizer, scaler)
    try:
        yield start
    finally:
        start.put_back()
        set_generators(mesh, of_torch)
        for each in put:
            each()


def _putting(setter: Callable[[Any], Any], state: Any) -> Callable[[], Any]:
    return lambda: setter(state)
