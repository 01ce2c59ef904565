"""Calls of a user's function that leave no trace.

A loss may count, remember or draw. Found are the objects that a function reaches in a few steps:
what it closes over, the globals that it names, its attributes and theirs. They are put back as they
were. What lies outside of the process, such as a line that was printed, stays.
"""

from __future__ import annotations

import functools
import operator
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpcomp.core.randomness import default_generator

__all__ = [
    "attributes_back",
    "attributes_kept",
    "generators_back",
    "own_attributes",
    "reached",
    "undone",
    "way_back",
]

#: Steps from a function to what it may change: a meter in a dict in an object, say.
_STEPS = 5
#: Attributes that every module has.
_EVERYWHERE = frozenset(vars(nn.Module()))
#: Types of others that have a way back of their own elsewhere, or need none.
_APART = (int, float, str, type(None), Tensor, types.FunctionType)


@contextmanager
def undone(function: Callable[..., Any], device: torch.device) -> Iterator[None]:
    """Puts back what calls of ``function`` within it change, the states of generators included.

    Args:
        function: any callable.
        device: of its tensors.
    """
    with ExitStack() as stack:
        for back in [*generators_back(device), *map(way_back, reached(function))]:
            if back is not None:
                stack.callback(back)
        yield


@contextmanager
def attributes_kept(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back what a forward within it sets on modules, and generators.

    Args:
        module: whose forward it is.
        device: of the module.
    """
    ways = [*generators_back(device), *attributes_back(module)]
    try:
        yield
    finally:
        for back in ways:
            back()


def generators_back(device: torch.device) -> list[Callable[[], None]]:
    """Functions that put the generators of the process back as they are now.

    Args:
        device: whose generator is among them, beside torch's on the CPU, Python's and NumPy's.
    """
    of_torch = {default_generator(torch.device("cpu")), default_generator(device)}
    return [
        *(functools.partial(_generator_back, each, each.get_state()) for each in of_torch),
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),  # noqa: NPY002  (users do)
    ]


def attributes_back(module: nn.Module) -> list[Callable[[], None]]:
    """Functions that put back what modules hold, but for what is written into tensors.

    Args:
        module: it and all in it: their attributes and buffers, and what a container, an array or a
            generator among the attributes holds itself.
    """
    ways: list[Callable[[], None] | None] = []
    for each in module.modules():
        ways.append(functools.partial(_dict_back, vars(each), vars(each).copy()))
        if each._buffers:
            ways.append(functools.partial(_dict_back, each._buffers, each._buffers.copy()))
        for value in own_attributes(each).values():
            if not isinstance(value, _APART):
                ways.append(way_back(value))
    return [back for back in ways if back is not None]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that not every module has, by name."""
    return {name: value for name, value in vars(module).items() if name not in _EVERYWHERE}


def reached(function: Callable[..., Any]) -> list[Any]:
    """Everything that a function may change: objects, containers, tensors, cells of closures."""
    found: dict[int, Any] = {}
    _reach(function, _STEPS, found)
    return list(found.values())


def _reach(value: Any, steps: int, found: dict[int, Any]) -> None:
    if id(value) in found or not steps or isinstance(value, type | types.ModuleType):
        return
    for part in _parts(value, found):
        _reach(part, steps - 1, found)


def _parts(value: Any, found: dict[int, Any]) -> list[Any]:
    """Notes a value, and gives what it holds."""
    if isinstance(value, nn.Module):
        held: list[Any] = []
        for module in value.modules():
            found |= {id(module): module, id(vars(module)): vars(module)}
            held += [*vars(module).values(), *module.buffers(recurse=False)]
        return held
    if isinstance(value, str | bytes | int | float | None | nn.Parameter):
        return []
    found[id(value)] = value
    if isinstance(value, types.FunctionType):
        return [*(value.__closure__ or ()), *_globals_of(value).values(), vars(value)]
    if isinstance(value, types.CellType):
        return [_content(value)]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, value.keywords]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return list(value)
    return [] if isinstance(value, Tensor) else [getattr(value, "__dict__", None)]


def way_back(value: Any) -> Callable[[], None] | None:
    """A function that puts a value back as it is now; None where nothing can be changed."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else _tensor_back(value)
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            return None
        return functools.partial(np.copyto, value, value.copy(), casting="no")
    if isinstance(value, torch.Generator):
        return functools.partial(_generator_back, value, value.get_state())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, types.CellType):
        return functools.partial(setattr, value, "cell_contents", _content(value))
    if isinstance(value, types.FunctionType):
        return functools.partial(_names_back, value.__globals__, _globals_of(value))
    if isinstance(value, dict):
        return functools.partial(_dict_back, value, dict(value))
    if isinstance(value, list | set | deque):
        return functools.partial(_items_back, value, value.copy())
    return None


def _tensor_back(tensor: Tensor) -> Callable[[], None]:
    kept, version = tensor.detach().clone(), tensor._version

    def back() -> None:
        if tensor._version != version:  # else autograd would take it for changed
            tensor.detach().copy_(kept)

    return back


def _generator_back(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _names_back(names: dict[str, Any], kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        if names.get(name) is not value:
            names[name] = value


def _dict_back(items: dict[Any, Any], kept: dict[Any, Any]) -> None:
    if items.keys() == kept.keys() and all(map(operator.is_, items.values(), kept.values())):
        return  # in a hurry: most modules have not changed
    for key in items.keys() - kept.keys():
        del items[key]
    _names_back(items, kept)


def _items_back(items: Any, kept: Any) -> None:
    if len(items) == len(kept) and all(a is b for a, b in zip(items, kept, strict=True)):
        return
    items.clear()
    (items.update if isinstance(items, set) else items.extend)(kept)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that has no value yet
        return None


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    names = function.__globals__
    return {name: names[name] for name in function.__code__.co_names if name in names}
