"""Processes for the parts of `recipes.bench.gpu_check`: one alone, or ranks that may hang.

    outcome = together(work, 2, *arguments, seconds=12)     # "ran", "hung, ...", "failed: ..."

They are forked from a part's process, with all modules in place. CUDA survives no fork, so that
process leaves the GPU to them.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

__all__ = ["GLOO", "NCCL", "Outcome", "alone", "together"]

T = TypeVar("T")

GLOO: Final = "gloo"
#: The group that a pipeline on GPUs makes for itself.
NCCL: Final = "cpu:gloo,cuda:nccl"


class Outcome(NamedTuple):
    """The end of some ranks.

    Attributes:
        text: "ran", "hung, killed after ..." or "failed: ...".
        values: of each rank, if they ran.
    """

    text: str
    values: list[Any] | None = None


def alone(function: Callable[..., T], *arguments: Any) -> T:
    """The function's value, from a process of its own: this one has touched no GPU then.

    Raises:
        RuntimeError: the function raised, or its process died.
    """
    outcome = together(function, 1, *arguments)
    if outcome.values is None:
        raise RuntimeError(outcome.text.removeprefix("failed: "))
    value: T = outcome.values[0]
    return value


def together(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    seconds: float | None = None,
    backend: str = GLOO,
) -> Outcome:
    """Calls a function in each of several processes, which a group connects; none is left behind.

    Args:
        function: gives what can be pickled.
        num_ranks: number of processes; a single one is in no group.
        arguments: of the function.
        seconds: after which all are killed.
        backend: of the group.
    """
    context = multiprocessing.get_context("fork")
    ends, processes = list[Connection](), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                here, there = context.Pipe(duplex=False)
                group = (rank, num_ranks, backend, folder)
                process = context.Process(target=_rank, args=(there, group, function, arguments))
                process.start()
                there.close()
                ends.append(here)
                processes.append(process)
            return _outcome(ends, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _outcome(ends: Sequence[Connection], seconds: float | None) -> Outcome:
    """Waits for a value of each rank, the first error, or the end of the time."""
    until = None if seconds is None else time.monotonic() + seconds
    values: dict[Connection, Any] = {}
    while len(values) < len(ends):
        silent = [end for end in ends if end not in values]
        ready = wait(silent, None if until is None else max(0.0, until - time.monotonic()))
        if not ready:
            return Outcome(f"hung, killed after {seconds:g} s")
        for end in ends:
            if end in ready:
                error, value = "its process died", None
                with suppress(EOFError):
                    error, value = end.recv()
                if error:
                    return Outcome(f"failed: {error}")
                values[end] = value
    return Outcome("ran", [values[end] for end in ends])


def _rank(
    end: Connection,
    group: tuple[int, int, str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """A rank's process."""
    rank, num_ranks, backend, folder = group
    try:
        if num_ranks > 1:
            store = FileStore(str(Path(folder) / "store"), num_ranks)
            limit = timedelta(seconds=180)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=num_ranks, timeout=limit
            )
        value = function(*arguments)
        if num_ranks > 1:
            dist.all_reduce(torch.zeros(1))  # on the CPU: none leaves while another needs it
        said = ("", value)
    except BaseException as error:
        traceback.print_exc()
        said = (f"{type(error).__name__}: {error}", None)
    end.send(said)
    end.close()
    os._exit(0)  # without destructors, which may wait for peers that are gone
