"""The place of this process on its machine, as whoever launched it says in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final

__all__ = ["LOCAL_RANKS", "local_rank", "local_size"]

#: Number of a process on its machine, and how many there are there: of torchrun, Slurm (whose
#: second is a list), Open MPI, and MPICH with Intel's.
LOCAL_RANKS: Final = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
)
_LOCAL_SIZES: Final = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_SLURM: Final = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")


def local_rank() -> int | None:
    """The number of this process on its machine; None where no launcher says it."""
    return _first(LOCAL_RANKS)


def local_size() -> int | None:
    """The number of processes of the run on this machine; None where no launcher says it."""
    size = _first(_LOCAL_SIZES)
    if size is None and all(name in os.environ for name in _SLURM):
        counts, node = (os.environ[name] for name in _SLURM)
        # Of each node in turn: "2(x3),1" is two processes on three of them, and one on the last.
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
        size = [int(count) for count, times in parts for _ in range(int(times or 1))][int(node)]
    return size


def _first(names: Sequence[str]) -> int | None:
    return next((int(os.environ[name]) for name in names if name in os.environ), None)
