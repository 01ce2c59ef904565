"""An optimizer's state by parameter name, so that it survives another cut and other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mpcomp.checkpoint.files import Part
from mpcomp.checkpoint.forms import check_like, plain_value
from mpcomp.checkpoint.run_state import RunState
from mpcomp.core.dtensor import distribute_like

__all__ = ["optimizer_entry", "restored_optimizer"]


def optimizer_entry(
    run: RunState, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """The optimizer's state: tensors into ``tensors``, the rest returned.

    Raises:
        ValueError: it has a parameter that is not the pipeline's, or would search on each rank by
            its own gradients.
        TypeError: it has what a checkpoint cannot hold.
    """
    groups, plain = [], {}
    for group, names in zip(optimizer.param_groups, _names_of(run, optimizer), strict=True):
        settings = {
            key: plain_value(value, f"the optimizer's setting {key!r}")
            for key, value in group.items()
            if key != "params"
        }
        groups.append({"params": [name for name in names if name], "settings": settings})
        for p, name in zip(group["params"], names, strict=True):
            for key, value in optimizer.state.get(p, {}).items() if name else ():
                if isinstance(value, list) and any(isinstance(each, Tensor) for each in value):
                    items = {f"{key}[{i}]": each for i, each in enumerate(value)}
                else:
                    items = {key: value}
                for of_item, each in items.items():
                    if isinstance(each, Tensor):
                        tensors[f"optimizer.{of_item}.{name}"] = run.mesh.whole(
                            each, "optimizer's state of other replicas"
                        )
                    else:
                        where = f"the optimizer's {of_item} of {name}"
                        plain[f"{of_item}.{name}"] = plain_value(each, where)
    return {"class": type(optimizer).__name__, "groups": groups, "plain": plain}


def _names_of(run: RunState, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names of the parameters in each group; "" where another rank trains it, as that of a loss.

    Raises:
        ValueError: as of `optimizer_entry`.
    """
    names = {id(p): name for name, p in run.model.named_parameters()}
    # A weight that all blocks read has one name in several stages, also in one process.
    elsewhere = {
        id(p): "" if p.is_meta else name
        for stage in run.cut
        for name, p in stage.named_parameters()
    }
    foreign = [
        f"group {i}, parameter {j}: shape {list(p.shape)}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if id(p) not in names and id(p) not in elsewhere
    ]
    if foreign:
        raise ValueError(
            f"the optimizer has {len(foreign)} parameters that are not the pipeline's "
            f"({'; '.join(foreign[:3])}), which neither replicas nor a checkpoint would have: make "
            "it of pipe.parameters(), after mpcomp.pipeline. A loss with parameters is given to "
            "the pipeline, mpcomp.pipeline(..., loss_fn=loss), and loss.parameters() to the "
            "optimizer beside them; another module becomes a layer of the model"
        )
    named = {**elsewhere, **names}
    return [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]


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
        ValueError: another kind of optimizer, or other groups, or as of `optimizer_entry`.
    """
    entries = [part.meta["optimizer"] for part in parts if part.meta["optimizer"] is not None]
    for entry in entries:
        if entry["class"] != type(optimizer).__name__:
            raise ValueError(
                f"{folder} holds the state of {entry['class']}, not of {type(optimizer).__name__}"
            )
    parameters = dict(run.model.named_parameters())
    own = _names_of(run, optimizer)
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
    if [group & parameters.keys() for group in saved] != [set(group) - {""} for group in own]:
        raise ValueError(
            f"{folder}: the optimizer's parameter groups are not those it was saved with"
        )
    index: dict[str, list[int]] = {}
    for i, name in enumerate(name for group in own for name in group):
        if name:
            index.setdefault(name, []).append(i)
    numbers = iter(range(sum(len(group) for group in own)))
    state: dict[int, dict[str, Any]] = {}
    for part in parts:
        entry = part.meta["optimizer"] or {"plain": {}}
        tensors = part.read_state("optimizer.", lambda rest: rest.partition(".")[2] in index)
        for compound, value in {**tensors, **entry["plain"]}.items():
            key, _, name = compound.partition(".")
            for nth, i in enumerate(index.get(name, ())):
                own_value = value.clone() if nth and isinstance(value, Tensor) else value
                state.setdefault(i, {})[key] = _ordered_as(parameters[name], own_value)
    state = {i: _with_lists(of_parameter) for i, of_parameter in state.items()}
    groups = []
    for group, of_group, names_of in zip(optimizer.param_groups, settings, own, strict=True):
        present = {key: value for key, value in group.items() if key != "params"}
        of_group = check_like(present, of_group, f"{folder}: the optimizer's setting")
        groups.append({**of_group, "params": [next(numbers) for _ in names_of]})
    return {"state": state, "param_groups": groups}


def _with_lists(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with lists where it had them: of "key[0]" and "key[1]" a "key"."""
    lists: dict[str, dict[int, Any]] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        name, bracket, number = key.removesuffix("]").partition("[")
        if bracket:
            lists.setdefault(name, {})[int(number)] = value
        else:
            rest[key] = value
    return {**rest, **{name: [of[i] for i in range(len(of))] for name, of in lists.items()}}


def _ordered_as(parameter: Tensor, value: Any) -> Any:
    """A tensor of the parameter's shape in its memory order, in which a norm adds it up."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if isinstance(parameter, DTensor):
        return distribute_like(value, parameter)
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
