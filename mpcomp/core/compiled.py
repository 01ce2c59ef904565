"""Loops over single elements, compiled (by numba) when they first run."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

__all__ = ["compiled", "content_of"]

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as machine code, of scalars and arrays of numpy, without the interpreter's lock.

    It may call others that are compiled. What was compiled is kept beside the module, or in the
    user's cache, so that it takes seconds once an installation and not once a process.
    """

    @functools.cache
    def machine_code() -> Callable[P, R]:
        import numba  # takes a third of a second, which those who code nothing do not wait for

        calling = _with_machine_code(function)
        try:
            made: Callable[P, R] = numba.njit(cache=True, nogil=True)(calling)
        except RuntimeError:  # there is no folder that could be written to
            made = numba.njit(nogil=True)(calling)
        return made

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return machine_code()(*args, **kwargs)

    call.machine_code = machine_code  # type: ignore[attr-defined]
    call.content = functools.partial(content_of, function)  # type: ignore[attr-defined]
    return call


def _with_machine_code(function: Callable[P, R]) -> Callable[P, R]:
    """The function, calling as machine code what else it calls that is `compiled`.

    What was kept of it is found by its name, which here says the code of those others, too: a
    change of theirs would not be seen otherwise.
    """
    known = function.__globals__
    called: dict[str, Any] = {
        name: known[name]
        for name in function.__code__.co_names
        if hasattr(known.get(name), "machine_code")
    }
    if not called:
        return function
    others = [other.content() for other in called.values()]
    mark = zlib.crc32(repr(others).encode())
    as_machine_code = {name: other.machine_code() for name, other in called.items()}
    made = FunctionType(function.__code__, known | as_machine_code, function.__name__)
    made.__qualname__ = f"{function.__qualname__}_{mark:08x}"
    return made


def content_of(function: Callable[..., Any]) -> tuple[bytes, tuple[Any, ...], list[Any]]:
    """Code, constants in it, and numbers of its module."""
    code, known = function.__code__, function.__globals__
    numbers = [
        known.get(name) for name in code.co_names if isinstance(known.get(name), int | float)
    ]
    constants = tuple(getattr(constant, "co_code", constant) for constant in code.co_consts)
    return code.co_code, constants, numbers
