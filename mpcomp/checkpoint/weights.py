"""Each rank holds the weights of its own stages: the others are freed, or never read.

A model can be built on the "meta" device, where tensors have shapes and no memory; its weights are
then read from safetensors files, by each rank those of its stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stages as staging
from mpcomp.checkpoint.files import WeightsFile, weights_files

__all__ = [
    "add_partial_guard",
    "check_weights",
    "load_weights",
    "parameters_to_meta",
    "remove_partial_guard",
    "to_meta",
]


def check_weights(stages: Iterable[staging.Stage], weights: str | Path | None) -> None:
    """Raises ValueError unless every tensor of ``stages`` has a value, or will get one.

    Args:
        stages: modules under the model's own names.
        weights: folder with safetensors files, which may be a checkpoint, or None.
    """
    if weights is None:
        empty = [name for stage in stages for name, tensor in _tensors(stage) if tensor.is_meta]
        if empty:
            raise ValueError(
                f"{empty[0]} and {len(empty) - 1} more tensors are on the meta device, without "
                "values: pass weights=, a folder with the model's .safetensors files"
            )
        return
    there = _files_of(Path(weights))
    for stage in stages:
        stored = _stored(stage)
        missing = [names[0] for names, _ in stored if not any(name in there for name in names)]
        if missing:
            raise ValueError(
                f"weights={weights}: the .safetensors files there lack {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            )
        for names, own in stored:
            name = _name_of(names, there)
            shape = list(there[name].shapes[name])
            if shape != list(own.shape):
                raise ValueError(
                    f"weights={weights}: {name} has shape {shape}, the model {list(own.shape)}"
                )
        for name, tensor in _tensors(stage):
            if tensor.is_meta and not any(name in names for names, _ in stored):
                raise ValueError(
                    f"buffer {name} is on the meta device and not part of the state_dict, so no "
                    "file has its value: build the model with that buffer on the CPU"
                )


def load_weights(stage: staging.Stage, weights: str | Path) -> None:
    """Reads the parameters and buffers of one stage, and nothing else, from a folder.

    `check_weights` has found them all there.

    Raises:
        ValueError: the folder is a checkpoint, and a weight is not what was written.
    """
    there = _files_of(Path(weights))
    own_names = stage.state_dict().keys()
    values: dict[str, Tensor] = {}
    for names, own in _stored(stage):
        name = _name_of(names, there)
        value = there[name].read(name)
        assert value.shape == own.shape, name
        # A copy in the model's own memory order.
        value = torch.empty_like(own, device="cpu", requires_grad=False).copy_(value)
        if isinstance(own, nn.Parameter):
            value = nn.Parameter(value, own.requires_grad)
        values.update({name: value for name in names if name in own_names})
    stage.load_state_dict(values, assign=True)


def to_meta(stage: nn.Module) -> None:
    """Frees the parameters and buffers of a stage that another rank trains.

    Shapes stay, on the meta device. Buffers that no state_dict has stay whole, as nothing could
    bring them back.
    """
    parameters_to_meta(stage)
    made: dict[int, Any] = {}  # one for one, so that what is shared stays shared
    for module in stage.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = made.setdefault(id(buffer), buffer.to("meta"))


def parameters_to_meta(module: nn.Module) -> None:
    """Frees the parameters of a module that another rank trains; buffers stay."""
    made: dict[int, Any] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                kept = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                # Not into _parameters: an nn.LSTM has a second list of its weights.
                setattr(owner, name, made.setdefault(id(parameter), kept))


def add_partial_guard(model: nn.Module) -> None:
    """Makes ``state_dict`` of a model an error as long as other ranks have a part of its weights.

    `remove_partial_guard` takes that from a copy which has them all.
    """
    remove_partial_guard(model)  # of an earlier pipeline
    model.register_state_dict_post_hook(_check_whole)  # type: ignore[no-untyped-call]


def remove_partial_guard(model: nn.Module) -> None:
    """Takes back `add_partial_guard`, so that nothing of this library is saved with a model."""
    hooks = model._state_dict_hooks
    for number in [number for number, hook in hooks.items() if hook is _check_whole]:
        del hooks[number]


def _check_whole(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    elsewhere = [name for name, x in state.items() if isinstance(x, Tensor) and x.is_meta]
    if elsewhere:
        raise ValueError(
            f"state_dict of a model that is cut over several ranks: {elsewhere[0]} and "
            f"{len(elsewhere) - 1} more of its {len(state)} tensors are trained on other ranks and "
            "have no values here. Take pipe.merge().state_dict(), on every rank, or write a "
            "checkpoint with pipe.save(folder)"
        )


def _tensors(stage: nn.Module) -> list[tuple[str, Tensor]]:
    return [*stage.named_parameters(), *stage.named_buffers()]


def _stored(stage: staging.Stage) -> list[tuple[list[str], Tensor]]:
    """The tensors that a checkpoint has, with their names: several where weights are tied."""
    tensors = stage.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    for tie in staging.ties([stage]):
        for group in names.values():
            if not set(group).isdisjoint(name for _, name in tie):
                group += [name for _, name in tie if name not in group]
    return [(group, tensors[group[0]]) for group in names.values()]


def _name_of(names: list[str], there: Mapping[str, WeightsFile]) -> str:
    """The one of a tensor's names that the files have: that of tied weights may be any."""
    return next(name for name in names if name in there)


def _files_of(folder: Path) -> Mapping[str, WeightsFile]:
    """The file that has each tensor."""
    files = weights_files(folder)
    if not files:
        raise ValueError(f"weights={folder}: no .safetensors file there")
    return {name: file for file in reversed(files) for name in file.shapes}
