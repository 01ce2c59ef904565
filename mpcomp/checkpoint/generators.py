"""States of torch's own generators, which augmentation and the like draw from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mpcomp.comm.mesh import Mesh

__all__ = ["check_generators", "generator_states", "set_generators"]


def generator_states(mesh: Mesh) -> dict[str, Tensor]:
    """By device: "cpu", "cuda.0"."""
    states = {"cpu": torch.get_rng_state()}
    for i in _own_gpus(mesh):
        states[f"cuda.{i}"] = torch.cuda.get_rng_state(i)
    return states


def check_generators(folder: Path, states: Mapping[str, Tensor]) -> None:
    """Checks that torch takes the `generator_states` of a checkpoint.

    Raises:
        ValueError: that of the CPU is missing, or one is of another form.
    """
    try:
        torch.Generator().set_state(states["cpu"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{folder} is damaged: its state of torch's generator is none ({error})"
        ) from error
    for name, state in states.items():
        if name != "cpu" and (state.dtype != torch.uint8 or state.shape != (16,)):
            raise ValueError(f"{folder} is damaged: its state of the generator {name} is none")


def set_generators(mesh: Mesh, states: Mapping[str, Tensor]) -> None:
    """Restores `generator_states`, where there is one for a device."""
    torch.set_rng_state(states["cpu"])
    on_gpus = [state for name, state in states.items() if name != "cpu"]
    for i in _own_gpus(mesh):
        state = states.get(f"cuda.{i}")
        if state is None and mesh.num_ranks > 1 and len(on_gpus) == 1:
            state = on_gpus[0]  # this rank's, which had another number on its machine
        if state is not None:
            torch.cuda.set_rng_state(state, i)


def _own_gpus(mesh: Mesh) -> list[int]:
    """Of one process all GPUs; of several its own: touching another takes memory there."""
    if mesh.num_ranks == 1:
        return list(range(torch.cuda.device_count()))
    if mesh.device.type != "cuda":
        return []
    index = mesh.device.index
    return [torch.cuda.current_device() if index is None else index]
