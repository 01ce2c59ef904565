"""A loss with parameters of its own: a temperature, weights of tasks, centres of classes, a head.

As beside a plain model, the optimizer is given both: ``[*pipe.parameters(), *loss.parameters()]``.
All else is done as for the model. The last stage holds the loss: it is moved to that stage's
device, replicas average its gradients, a checkpoint has it under ``loss_fn.*``, clipping and loss
scalers count it. Ranks without the last stage have the loss's parameters on "meta"::

    rank 0    stage 0                      pipe.parameters()    loss.parameters() on "meta"
    rank 1    stage 1, and loss_fn.*       pipe.parameters()    loss.parameters()
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import loss as torchs

import stages as staging
from mpcomp.checkpoint.weights import parameters_to_meta
from mpcomp.core.loss import LossFn
from mpcomp.engines.graph import leaves

__all__ = ["LeafCheck", "check_loss", "place_loss"]


def check_loss(loss_fn: LossFn | None, cut: Sequence[staging.Stage], *, shard: bool) -> None:
    """Raises ValueError for a loss with a state that cannot be in the last stage."""
    own, others = _parameters(loss_fn, cut)
    if own and others:
        raise ValueError(
            f"loss_fn has parameters of its own ({own[0]}) and the model's ({others[0]}): only the "
            "former can be in the last stage; give it modules that the model has not, or let a "
            "layer of the model compute what it needs"
        )
    if own and shard:
        raise ValueError(
            f"shard=True and a loss_fn with the parameter {own[0]}: outside of a stage's forward "
            "FSDP2 has a part of each parameter; leave shard out, or let a layer of the model "
            "hold it"
        )
    if (own or _remembers(loss_fn)) and hasattr(cut[-1].original, "loss_fn"):
        raise ValueError(
            "loss_fn has parameters or buffers, and the model has a 'loss_fn' of its own, so that "
            "a checkpoint would have two of that name; rename it in the model"
        )


def place_loss(
    loss_fn: LossFn | None, cut: Sequence[staging.Stage], device: torch.device | None
) -> None:
    """Moves a loss to the last stage's device, and puts it into that stage if it has a state.

    Args:
        loss_fn: that `check_loss` has let pass.
        cut: all stages.
        device: of the last stage; None where another rank has it.
    """
    loss = _module_of(loss_fn)
    if loss is None:
        return
    own, others = _parameters(loss_fn, cut)
    if device is not None and not others:
        loss.to(device)
    if device is None and own:
        parameters_to_meta(loss)
    if own or _remembers(loss_fn):
        cut[-1].adopt_loss(loss)


def _remembers(loss_fn: Any) -> bool:
    """Whether a loss without parameters has buffers that training may change.

    Those of torch's losses are constants. A frozen network is no part of a checkpoint.
    """
    loss = _module_of(loss_fn)
    if loss is None or type(loss).__module__ == torchs.__name__:
        return False
    return any(True for _ in loss.buffers()) and not any(True for _ in loss.parameters())


def _module_of(loss_fn: Any) -> nn.Module | None:
    """The module that a loss is, or that a `functools.partial` or one of its methods calls."""
    while isinstance(loss_fn, functools.partial | types.MethodType):
        loss_fn = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn.__self__
    return loss_fn if isinstance(loss_fn, nn.Module) else None


def _parameters(loss_fn: Any, cut: Sequence[staging.Stage]) -> tuple[list[str], list[str]]:
    """Names of the parameters that a loss trains, its own and those that the model has too."""
    loss = _module_of(loss_fn)
    if loss is None:
        return [], []
    held = (*cut[-1].original.parameters(), *(p for stage in cut for p in stage.parameters()))
    of_model = {id(parameter) for parameter in held}
    own: list[str] = []
    others: list[str] = []
    for name, parameter in loss.named_parameters():
        if id(parameter) in of_model:
            others.append(name)
        elif parameter.requires_grad:
            own.append(name)
    return own, others


class LeafCheck:
    """A check, made once: what a loss trains beside the output must be the pipeline's.

    A function may use a parameter that it closes over, or a global one. Replicas would not average
    it, and a checkpoint would not have it. Only the graph of a loss tells that.

    Args:
        known: parameters of this rank, the loss's own among them.
    """

    def __init__(self, known: Collection[nn.Parameter]) -> None:
        self._known = {id(parameter) for parameter in known}
        self.due = True

    def __call__(self, loss: Tensor, output: Any) -> None:
        """Looks at the graph of a microbatch's loss.

        Args:
            loss: 0-d.
            output: the node of the graph that made the model's output, where the look ends.

        Raises:
            ValueError: a tensor gets a gradient that is no parameter of the pipeline.
        """
        if not self.due:
            return
        self.due = False
        for leaf in leaves(loss, until=output):
            if id(leaf) not in self._known:
                raise ValueError(
                    f"loss_fn trains a tensor of shape {list(leaf.shape)} that is no parameter of "
                    "the pipeline, so that replicas would not average it and no checkpoint would "
                    "have it: make loss_fn an nn.Module that holds it as an nn.Parameter "
                    "(loss_fn=Loss(), not a function that uses it), or freeze it by "
                    "requires_grad_(False)"
                )
