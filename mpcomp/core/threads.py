"""Loops over large arrays on several threads: machine code runs without the interpreter's lock.

Slices follow from the shape alone, never from the machine, so that what is made of each does too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["each", "slices_of"]

T = TypeVar("T")
R = TypeVar("R")

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
    """The function's results, in the order of the items, on as many threads as torch may use.

    Args:
        function: machine code for the most part. It calls `each` for no more than one item.
        items: its arguments.
    """
    num_threads = min(torch.get_num_threads(), len(items))
    if num_threads <= 1:
        return [function(item) for item in items]
    return list(_pool(torch.get_num_threads()).map(function, items))


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="mpcomp")


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads
