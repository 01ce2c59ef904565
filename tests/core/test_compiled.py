"""Compiled loops: the same results, and no need of a folder for what was compiled."""

import os
import subprocess
import sys

import numpy as np
import pytest

from mpcomp.core.compiled import compiled

CALLED = """
from mpcomp.core.compiled import compiled
from mpcomp.core.vectors import vectorized

@{decorator}
def inner(x):
    return x + {number}
"""
CALLING = """
from called import inner
from mpcomp.core.compiled import compiled

@compiled
def outer(x):
    return inner(x)
"""


def doubled(x):
    """Twice the sum."""
    total = 0
    for i in range(len(x)):
        total += 2 * x[i]
    return total


def test_results_and_name_are_the_functions():
    made = compiled(doubled)
    assert made(np.arange(5)) == doubled(range(5)) == 20
    assert made.__name__ == "doubled" and made.__doc__ == doubled.__doc__


def test_code_without_a_file_is_compiled_too():
    """There is no folder beside it, nor a cache that could know it again."""
    names = {}
    exec("def plus_one(x):\n    return x + 1", names)
    assert compiled(names["plus_one"])(3) == 4


@compiled
def one_more(x):
    """A function that another calls."""
    return x + 1


def two_more(x):
    """A function that calls it."""
    return one_more(one_more(x))


def test_compiled_functions_call_each_other():
    assert compiled(two_more)(3) == two_more(3) == 5


@pytest.mark.parametrize("decorator", ["compiled", "vectorized(results=1)"])
def test_code_that_was_kept_is_not_used_with_other_code_that_it_calls(decorator, tmp_path):
    """Though its own file is as it was: what is kept says what is called."""
    (tmp_path / "called.py").write_text(CALLED.format(decorator=decorator, number=1))
    (tmp_path / "calling.py").write_text(CALLING)
    run = [sys.executable, "-c", "import calling; print(calling.outer(3))"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}

    def said() -> str:
        paths = os.pathsep.join([str(tmp_path), *sys.path])
        done = subprocess.run(
            run, env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert said() == said() == "4"
    (tmp_path / "called.py").write_text(CALLED.format(decorator=decorator, number=20))
    assert said() == "23"
