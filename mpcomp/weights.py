"""Each rank holds the weights of its own stages: the others are let go, or never read.

A model can be built on the "meta" device, where tensors have shapes and no memory; its weights are
then read from safetensors files, by each rank those of its stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

__all__ = ["check_weights", "let_go", "load_weights"]


def check_weights(stages: Iterable[nn.Module], weights: str | Path | None) -> None:
    """Raises ValueError unless every tensor of ``stages`` has a value, or will get one.

    Args:
        stages: modules under the model's own names.
        weights: folder with safetensors files, or None.
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
        stored = stage.state_dict().keys()
        missing = [name for name in stored if name not in there]
        if missing:
            raise ValueError(
                f"weights={weights}: the .safetensors files there lack {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            )
        for name, tensor in _tensors(stage):
            if tensor.is_meta and name not in stored:
                raise ValueError(
                    f"buffer {name} is on the meta device and not part of the state_dict, so no "
                    "file has its value: build the model with that buffer on the CPU"
                )


def load_weights(stage: nn.Module, weights: str | Path) -> None:
    """Reads the parameters and buffers of one stage, and nothing else, from a folder.

    Raises:
        ValueError: a tensor there has another shape.
    """
    there = _files_of(Path(weights))
    values: dict[str, Tensor] = {}
    for name, own in stage.state_dict().items():
        with safe_open(there[name], framework="pt") as file:
            value = file.get_tensor(name)
        if value.shape != own.shape:
            raise ValueError(
                f"weights={weights}: {name} has shape {list(value.shape)}, the model "
                f"{list(own.shape)}"
            )
        values[name] = value.to(own.dtype)
    stage.load_state_dict(values, assign=True)


def let_go(stage: nn.Module) -> None:
    """Frees the parameters and buffers of a stage that another rank trains.

    Shapes stay, on the meta device. Buffers that no state_dict has stay whole, as nothing could
    bring them back.
    """
    made: dict[int, Any] = {}  # one for one, so that what is shared stays shared
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                kept = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), kept)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = made.setdefault(id(buffer), buffer.to("meta"))


def _tensors(stage: nn.Module) -> list[tuple[str, Tensor]]:
    return [*stage.named_parameters(), *stage.named_buffers()]


def _files_of(folder: Path) -> Mapping[str, Path]:
    """The file that has each tensor."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights={folder}: no .safetensors file there")
    there: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                there.update(dict.fromkeys(file.keys(), path))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or foreign: {error}") from error
    return there
