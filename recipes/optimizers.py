"""The optimizers that recipes offer, and what their learning rates have in common.

LARS (You et al. 2017) stands beside this file; LAMB (You et al. 2020) and Muon (Jordan et al. 2024)
are those of pytorch-optimizer. They scale the step of each layer by norms of that layer alone, or
make its singular values alike, and never go by a norm over all gradients, so that ranks which each
have some of the layers take the same steps as one process that has them all.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from recipes.config import RunConfig
from recipes.lars import LARS


def make_optimizer(
    config: RunConfig, model: nn.Module, *, outputs: int | None = None, decay_all: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that a configuration names, at its highest learning rate.

    Weight decay is for matrices (and kernels): biases and norms have none, and with LARS and LAMB
    their rate is not adapted, as in the authors' experiments. Muon is for hidden matrices;
    embeddings, the output layer, biases and norms are AdamW's, whose steps are about as long
    (Liu et al. 2025, equation 4), so that one rate is for both. NAdam has the betas of Ajanthan et
    al. 2025, for gradients of weights that lack some updates.

    Args:
        model: the whole, or this rank's part of it; what is not trained is left out.
        outputs: classes, or tokens of the vocabulary: a linear layer with so many outputs is the
            output layer.
        decay_all: with SGD, weight decay also for biases and norms.

    Raises:
        ValueError: the package that has the optimizer is not installed.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate: dict[str, Any] = {"lr": config.peak_lr}
    momentum: dict[str, Any] = {"momentum": config.momentum, "nesterov": config.nesterov}
    if config.optimizer == "sgd" and decay_all:
        return torch.optim.SGD(trained, **rate, **momentum, weight_decay=config.optimizer_decay)
    groups = _groups(trained, config.optimizer_decay)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, **rate, **momentum, weight_decay=0.0)
    if config.optimizer == "adamw":
        # On a CPU torch's default is a loop of single operations; on others it is as fast.
        on_cpu = all(parameter.device.type == "cpu" for parameter in trained)
        return torch.optim.AdamW(groups, **rate, weight_decay=0.0, fused=on_cpu or None)
    if config.optimizer == "nadam":
        lagging: dict[str, Any] = {"betas": (0.99, 0.999), "decoupled_weight_decay": True}
        return torch.optim.NAdam(groups, **rate, **lagging, weight_decay=0.0)
    if config.optimizer == "lars":
        return LARS(groups, **rate, **momentum)
    if importlib.util.find_spec("pytorch_optimizer") is None:
        raise ValueError(
            f"optimizer is {config.optimizer}, but pytorch-optimizer is not installed: "
            "pip install pytorch-optimizer"
        )
    # Two seconds, which other optimizers need not wait.
    from pytorch_optimizer import Lamb, Muon

    if config.optimizer == "muon":
        # One matrix at a time: in batches of like shapes the last bits depend on what is cut where.
        return Muon(
            _with_muon(groups, _at_the_ends(model, outputs)),
            **rate,
            adamw_lr=config.peak_lr,
            use_adjusted_lr=True,
            foreach=False,
        )
    for group in groups:
        group["adam"] = group["params"][0].dim() < 2  # not adapted
    lamb = Lamb(
        groups,
        **rate,
        weight_decouple=False,  # decay is a part of the update whose norm is taken
        adam_debias=True,  # else steps that the norms have scaled are made up to 10 times as long
        pre_norm=False,  # by all gradients, of which a rank has some; `clip` is the same for all
    )
    lamb.clamp = math.inf  # of a layer's norm; the authors have no bound
    return lamb


def warm_up(config: RunConfig, step: int, num_steps: int) -> float:
    """The learning rate of a step of the warm-up (from 0), as a part of the highest.

    It rises by the same amount each step and arrives with step ``num_steps``: from `lr` where that
    is scaled by `base_batch` (Goyal et al. 2017), else from almost 0. A highest rate that is less
    than `lr` is kept from the beginning.
    """
    if config.base_batch is None:
        return (step + 1) / (num_steps + 1)
    first = min(config.lr / config.peak_lr, 1.0)
    return first + (1.0 - first) * step / num_steps


def milestone_rate(config: RunConfig, epoch: int) -> float:
    """The learning rate of an epoch (from 0) by the milestones, as a part of the highest."""
    return config.lr_factor ** sum(epoch >= milestone for milestone in config.lr_milestones)


def _groups(trained: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices, and biases and norms; one that would be empty is left out."""
    groups: list[dict[str, Any]] = [
        {"params": [one for one in trained if one.dim() >= 2], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _at_the_ends(model: nn.Module, outputs: int | None) -> set[nn.Parameter]:
    """The parameters of embeddings and of the output layer."""
    found = set[nn.Parameter]()
    for module in model.modules():
        is_output = isinstance(module, nn.Linear) and module.out_features == outputs
        if is_output or isinstance(module, nn.Embedding):
            found.update(module.parameters(recurse=False))
    return found


def _with_muon(
    groups: Iterable[dict[str, Any]], at_the_ends: Collection[nn.Parameter]
) -> list[dict[str, Any]]:
    """Groups that say whether Muon is for them: it is for matrices that are not at the ends."""
    divided = []
    for group in groups:
        for hidden in (True, False):
            chosen = [
                one
                for one in group["params"]
                if hidden == (one.dim() >= 2 and one not in at_the_ends)
            ]
            if chosen:
                divided.append({**group, "params": chosen, "use_muon": hidden})
    return divided
