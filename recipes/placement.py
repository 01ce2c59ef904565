"""The placement of a run: how its model is cut, on which processes and devices, in which dtype."""

from __future__ import annotations

import platform
from typing import Literal, TypeAlias

import torch
from torch import nn

import stages
from mpcomp.core.precision import compute_dtype
from mpcomp.engines.schedules import schedule_named
from recipes.config import RunConfig
from recipes.ranks import Ranks

Split: TypeAlias = Literal["paper"] | int | list[int] | list[str]


def parse_split(text: str) -> Split:
    """The form that `mpcomp.pipeline` takes: "paper", stages, block counts, or block names."""
    if text == "paper":
        return "paper"
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(
            f"split is {text!r}; pass paper, a number of stages as in 4, block counts as in "
            "3,2,2,3, or block names to cut after as in layer1,layer2"
        )
    if all(part.isdecimal() for part in parts):
        counts = [int(part) for part in parts]
        return counts[0] if len(counts) == 1 else counts
    return parts


def check_ranks(config: RunConfig, model: nn.Module, num_ranks: int) -> None:
    """Whether the stages fit the processes; one process takes any number, without links.

    Raises:
        ValueError: they do not, or the model cannot be cut like this.
    """
    if num_ranks == 1:
        if config.mbps is not None:
            raise ValueError(
                f"mbps is {config.mbps:g}, and one process sends nothing over links; start one for "
                "each stage, as with torchrun --nproc-per-node 2 -m ... --split 2"
            )
        return
    ranks, rest = divmod(num_ranks, config.replicas)
    if rest:
        raise ValueError(
            f"replicas is {config.replicas}, but there are {num_ranks} processes; a replica is a "
            "whole pipeline, so start a multiple of the replicas"
        )
    num_stages = len(stages.split(model, parse_split(config.split)))
    schedule = schedule_named(config.schedule)
    try:
        schedule.check_stages(num_stages, ranks)
    except ValueError as error:
        per_rank = schedule.default_stages_per_rank
        whose = " of a replica" if config.replicas > 1 else ""
        needed = -(-num_stages // per_rank) * config.replicas
        raise ValueError(
            f"split is {config.split}, which makes {num_stages} stages, but the {ranks} processes"
            f"{whose} take {per_rank * ranks} with the schedule {schedule.name}; pass --split "
            f"{per_rank * ranks}, or start {needed} processes (torchrun --nproc-per-node {needed})"
        ) from error


def devices_of(config: RunConfig, ranks: Ranks) -> list[torch.device]:
    """The device of all stages, or one for each; under torchrun that of this process.

    Raises:
        ValueError: there is no such device.
    """
    text, num_gpus = config.device, torch.cuda.device_count()
    if ranks.size > 1:
        text = _own_device(text, ranks)
    elif text == "auto":
        text = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        devices = [torch.device(name.strip()) for name in text.split(",")]
    except RuntimeError as error:
        raise ValueError(
            f"device is {text!r}; pass auto, cpu, cuda, or one for each stage as in cuda:0,cuda:1"
        ) from error
    for device in devices:
        if device.type == "cuda" and (device.index or 0) >= num_gpus:
            raise ValueError(
                f"device is {text!r}, but torch sees {num_gpus} GPUs; pass one of them"
            )
    return [torch.device("cuda", 0) if str(device) == "cuda" else device for device in devices]


def device_name(device: torch.device) -> str:
    """A GPU's name, or the processor's kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _own_device(text: str, ranks: Ranks) -> str:
    """The name of this process's device."""
    num_gpus, names = torch.cuda.device_count(), text.split(",")
    if text == "auto" and not num_gpus:
        return "cpu"
    if text in ("auto", "cuda"):
        if ranks.local_size > num_gpus:
            raise ValueError(
                f"device is {text!r}: there are {ranks.local_size} processes on this machine, but "
                f"torch sees {num_gpus} GPUs; start one process for each, or pass --device cpu"
            )
        return f"cuda:{ranks.local_rank}"
    if len(names) not in (1, ranks.size):
        raise ValueError(
            f"device is {text!r}, which names {len(names)} for {ranks.size} processes; pass one "
            "for each, or one for all"
        )
    return names[ranks.rank % len(names)]


def common_dtype(precision: str, device: torch.device, ranks: Ranks) -> torch.dtype | None:
    """`compute_dtype`, where every rank's device computes in it; else plain fp32."""
    own = compute_dtype(precision, device)
    return own if len(set(ranks.gather(str(own)))) == 1 else None
