"""Loops over single elements, compiled (by numba) when they first run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["compiled"]

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as machine code, of scalars and arrays of numpy, without the interpreter's lock.

    What was compiled is kept beside the module, or in the user's cache, so that it takes seconds
    once an installation and not once a process.
    """

    @functools.cache
    def machine_code() -> Callable[P, R]:
        import numba  # takes a third of a second, which those who code nothing do not wait for

        try:
            made: Callable[P, R] = numba.njit(cache=True, nogil=True)(function)
        except RuntimeError:  # there is no folder that could be written to
            made = numba.njit(nogil=True)(function)
        return made

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return machine_code()(*args, **kwargs)

    return call
