"""Compiled loops: the same results, and no need of a folder for what was compiled."""

import numpy as np

from mpcomp.core.compiled import compiled


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
