"""The device of a rank on its machine, by what launched it, and what moves tensors between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from mpcomp.core.launchers import LOCAL_RANKS, local_rank, local_size

__all__ = ["backend_of", "device_of_rank", "identity_of", "model_of"]

#: Which GPUs a process may see.
VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def device_of_rank(
    given: str | torch.device | Sequence[str | torch.device] | None,
) -> torch.device:
    """This rank's device: as given, or a GPU for each process of a machine that has GPUs.

    Raises:
        ValueError: fewer devices than ranks, or nobody says which one is this rank's.
    """
    if isinstance(given, str | torch.device):
        return torch.device(given)
    if given is not None:
        rank = int(os.environ.get("RANK", "0"))
        if dist.is_initialized():
            rank = dist.get_rank()
        if not rank < len(given):
            raise ValueError(
                f"{len(given)} devices, but this is rank {rank}: give one for each rank, or one "
                "for all"
            )
        return torch.device(given[rank])
    num_gpus, own = torch.cuda.device_count(), local_rank()
    if not num_gpus:
        return torch.device("cpu")
    if num_gpus == 1 and any(_names_one(os.environ.get(name, "")) for name in VISIBLE):
        return torch.device("cuda", 0)  # its own; whether it is no other's, `join` finds out
    if own is None:
        if num_gpus > 1:
            raise ValueError(
                f"devices: torch sees {num_gpus} GPUs, and nobody says which one is this "
                f"process's: none of {', '.join(LOCAL_RANKS)} is set. Start with torchrun, srun or "
                "mpirun, export LOCAL_RANK, or pass devices"
            )
        own = 0
    here = local_size() or own + 1
    if here > num_gpus:
        raise ValueError(
            f"devices: there are {here} processes on this machine, but torch sees {num_gpus} of "
            "its GPUs; start one process for each, or pass devices='cpu', or 'cuda:0' for all to "
            "share that one"
        )
    return torch.device("cuda", own)


def _names_one(visible: str) -> bool:
    return len([each for each in visible.split(",") if each.strip()]) == 1


def identity_of(device: torch.device) -> str:
    """A name of a GPU that no other one has; "" of other devices."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def model_of(device: torch.device) -> str:
    """The model of a GPU; "" of other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def backend_of(identities: Sequence[str]) -> str:
    """The backend of all ranks' group: NCCL where each has a GPU to itself, else gloo alone.

    Args:
        identities: `identity_of` every rank's device.
    """
    alone = all(identities) and len(set(identities)) == len(identities)
    return "cpu:gloo,cuda:nccl" if alone and dist.is_nccl_available() else "gloo"
