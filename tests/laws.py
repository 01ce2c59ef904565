"""Laws for methods that a test file defines itself.

A law is a test with a parameter of a certain name, such as ``compressor``, which runs over the list
of the library's methods. Another file runs it over its own::

    globals().update(laws_over("compressors/test_compressor_laws.py", compressor=[TernGrad()]))
"""

import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mpcomp import Compressor, Feedback
from mpcomp.core.spec import SpecValue

TESTS = Path(__file__).parent


def laws_of(
    module: types.ModuleType, parameter: str, kind: type = object
) -> Iterator[tuple[str, Callable[..., None]]]:
    """Name and function of each law of a module: what it tests over values of a kind."""
    for name, function in list(vars(module).items()):
        if not name.startswith("test_"):
            continue
        for mark in getattr(function, "pytestmark", []):
            if _sets(mark, parameter) and any(isinstance(value, kind) for value in mark.args[1]):
                yield name, function


def laws_over(
    file: str, *, without: Sequence[str] = (), **values: Sequence[Any]
) -> dict[str, Callable[..., None]]:
    """The laws of a test file, over other values.

    Args:
        file: path in the folder of the tests.
        without: tests that are about the values they name, and no laws.
        values: name of the parameter, and what it takes. Values of one kind; of the laws those
            that the library's values of this kind are under.

    Returns:
        Tests to be put among the names of a module.
    """
    ((parameter, chosen),) = values.items()
    kinds = (Compressor, Feedback, SpecValue, type)
    kind = next(kind for kind in kinds if isinstance(chosen[0], kind))
    module = module_of(file)
    found = {}
    for name, function in laws_of(module, parameter, kind):
        if name in without:
            continue
        law = types.FunctionType(
            function.__code__,
            function.__globals__,
            name,
            function.__defaults__,
            function.__closure__,
        )
        law.__dict__.update(function.__dict__)
        law.__kwdefaults__ = function.__kwdefaults__
        marks = [mark for mark in function.pytestmark if not _sets(mark, parameter)]
        law.pytestmark = [*_marks_of(module), *marks]
        over = pytest.mark.parametrize(parameter, chosen, ids=str)
        found[f"{name}__{module.__name__}"] = over(law)
    assert found, f"{file} has no law over {parameter}"
    return found


def _sets(mark: pytest.Mark, parameter: str) -> bool:
    return mark.name == "parametrize" and mark.args[0] == parameter


def _marks_of(module: types.ModuleType) -> list[pytest.Mark]:
    """The marks of all tests of a module, such as filters of warnings."""
    marks = getattr(module, "pytestmark", [])
    return [mark.mark for mark in (marks if isinstance(marks, list) else [marks])]


def module_of(file: str) -> types.ModuleType:
    """A test file as pytest imports it: by its name, with its folder on the path.

    Args:
        file: path in the folder of the tests.
    """
    path = TESTS / file
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)
