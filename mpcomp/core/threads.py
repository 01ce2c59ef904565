"""Loops over large arrays on several threads: machine code runs without the interpreter's lock.

They are not torch's threads. Beside a GPU the coder has the machine's cores, shared by its ranks:
torchrun gives torch one thread, which is for computing on CPUs.

Slices follow from the shape alone, never from the machine, so that what is made of each does too.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from mpcomp.core.launchers import local_size

__all__ = ["BACKGROUND", "codes_beside", "each", "num_cores", "num_threads", "slices_of"]

T = TypeVar("T")
R = TypeVar("R")

#: Environment variable with the number of the coder's threads.
_THREADS = "MPCOMP_THREADS"
#: Environment variable: 1 to code in the background, 0 to code in turn.
BACKGROUND = "MPCOMP_BACKGROUND"
# Elements of a slice: milliseconds of coding, beside which the handing over to a thread is nothing.
_ELEMENTS = 1 << 20


def slices_of(num_rows: int, num_columns: int, together: int = 1) -> list[slice]:
    """Rows of an array in slices of about a million elements.

    Args:
        num_rows: of the array.
        num_columns: elements of a row.
        together: rows that stay in one slice, a divisor of their number.
    """
    blocks = num_rows // max(1, together)
    num_slices = max(1, min(blocks, num_rows * num_columns // _ELEMENTS))
    bounds = [k * blocks // num_slices * together for k in range(num_slices)]
    return [slice(*between) for between in zip(bounds, [*bounds[1:], num_rows], strict=True)]


def each(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The function's results, in the order of the items, on `num_threads` threads.

    Args:
        function: machine code for the most part. It calls `each` for no more than one item.
        items: its arguments.
    """
    threads = num_threads() if len(items) > 1 else 1
    if threads == 1:
        return [function(item) for item in items]
    return list(_pool(threads).map(function, items))


def num_threads() -> int:
    """Threads of the coder: `MPCOMP_THREADS`; else beside a GPU this rank's cores, else torch's.

    Raises:
        ValueError: `MPCOMP_THREADS` is no number of threads.
    """
    given = os.environ.get(_THREADS)
    if given is not None:
        if not given.isdecimal() or not int(given):
            raise ValueError(f"{_THREADS}={given!r}: expected a whole number of threads, 1 or more")
        return int(given)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return max(1, num_cores() // (local_size() or 1))
    return torch.get_num_threads()


def codes_beside(device: torch.device, num_ranks: int) -> bool:
    """Whether messages are coded beside computing: `MPCOMP_BACKGROUND`; else with a core to spare.

    That is where this rank has more cores than torch computes with. On an accelerator it is so
    only where somebody says it.

    Args:
        device: that computes.
        num_ranks: of the run; all are taken to be here where no launcher says how many are.

    Raises:
        ValueError: `MPCOMP_BACKGROUND` is neither 0 nor 1.
    """
    given = os.environ.get(BACKGROUND)
    if given is not None:
        if given not in ("0", "1"):
            raise ValueError(
                f"{BACKGROUND}={given!r}: expected 1, to code in the background, or 0, in turn"
            )
        return given == "1"
    cores = num_cores() // (local_size() or num_ranks)
    return device.type == "cpu" and cores > torch.get_num_threads()


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="mpcomp")


def _begin_child() -> None:
    """A forked child, such as a loader's worker, has none of its parent's threads.

    It never frees what its parent has thrown away: a process group waits there for its thread,
    without end.
    """
    _pool.cache_clear()
    gc.freeze()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_child)
