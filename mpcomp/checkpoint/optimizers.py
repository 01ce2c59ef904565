"""An optimizer's state by parameter name, so that it survives another cut and other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mpcomp.checkpoint.files import Part
from mpcomp.checkpoint.forms import check_like
from mpcomp.checkpoint.run_state import RunState
from mpcomp.core.dtensor import distribute_like, full_tensor

__all__ = ["optimizer_entry", "restored_optimizer"]


def optimizer_entry(
    run: RunState, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """The optimizer's state: tensors into ``tensors``, the rest returned."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    groups, plain = [], {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": [names[id(p)] for p in group["params"]], "settings": settings})
        for p in group["params"]:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{key}.{names[id(p)]}"] = full_tensor(value)
                else:
                    plain[f"{key}.{names[id(p)]}"] = value
    return {"class": type(optimizer).__name__, "groups": groups, "plain": plain}


def restored_optimizer(
    folder: Path, run: RunState, optimizer: torch.optim.Optimizer, parts: Sequence[Part]
) -> dict[str, Any]:
    """The form that ``optimizer.load_state_dict`` takes.

    Args:
        folder: of the checkpoint, for messages.
        run: to be loaded.
        optimizer: over parameters of this rank, in the groups that it was saved with.
        parts: which together have the state of these parameters.

    Raises:
        ValueError: another kind of optimizer, or other groups.
    """
    entries = [part.meta["optimizer"] for part in parts if part.meta["optimizer"] is not None]
    for entry in entries:
        if entry["class"] != type(optimizer).__name__:
            raise ValueError(
                f"{folder} holds the state of {entry['class']}, not of {type(optimizer).__name__}"
            )
    parameters = dict(run.model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    own = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    here = set(names.values())
    settings: list[dict[str, Any]] = [group["settings"] for group in entries[0]["groups"]]
    for entry in entries:
        if [group["settings"] for group in entry["groups"]] != settings:
            raise ValueError(
                f"{folder}: the optimizers of its ranks had other groups or settings (learning "
                "rate, ...) than each other; load it on the same ranks"
            )
    saved = [
        {name for entry in entries for name in entry["groups"][i]["params"]}
        for i in range(len(settings))
    ]
    if [group & here for group in saved] != [set(group) for group in own]:
        raise ValueError(
            f"{folder}: the optimizer's parameter groups are not those it was saved with"
        )
    index = {name: i for i, name in enumerate(name for group in own for name in group)}
    state: dict[int, dict[str, Any]] = {}
    for part in parts:
        entry = part.meta["optimizer"] or {"plain": {}}
        tensors = part.read_state("optimizer.", lambda rest: rest.partition(".")[2] in index)
        for compound, value in {**tensors, **entry["plain"]}.items():
            key, _, name = compound.partition(".")
            if name in index:
                state.setdefault(index[name], {})[key] = _ordered_as(parameters[name], value)
    groups = []
    for group, of_group, names_of in zip(optimizer.param_groups, settings, own, strict=True):
        present = {key: value for key, value in group.items() if key != "params"}
        of_group = check_like(present, of_group, f"{folder}: the optimizer's setting")
        groups.append({**of_group, "params": [index[name] for name in names_of]})
    return {"state": state, "param_groups": groups}


def _ordered_as(parameter: Tensor, value: Any) -> Any:
    """A tensor of the parameter's shape in its memory order, in which a norm adds it up."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if isinstance(parameter, DTensor):
        return distribute_like(value, parameter)
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
