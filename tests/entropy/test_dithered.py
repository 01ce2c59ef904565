"""Integers under a dither: symbols that say them, and contexts."""

import numpy as np
import pytest

from mpcomp.entropy import dithered
from mpcomp.entropy.classes import CONTEXTS

MAGNITUDE = 127
OFFSETS = np.arange(-4, 4, dtype=np.int8)


def test_a_symbol_says_an_integer_and_the_side_of_its_dither_first():
    q = np.arange(-MAGNITUDE, MAGNITUDE + 1, dtype=np.int16)
    for offset in OFFSETS:
        offsets = np.full((1, len(q)), offset)
        symbols = dithered.symbols_of(q[None], offsets)
        assert np.array_equal(dithered.integers_of(symbols, offsets)[0], q)
        assert sorted(symbols[0]) == list(range(2 * MAGNITUDE + 1))
        assert symbols[0, MAGNITUDE + (1 if offset >= 0 else -1)] == 1


def test_contexts_are_of_a_class_and_of_the_size_of_an_offset():
    """Offsets as far from zero on both sides have one."""
    rows, columns = np.array([0, 9, 15], np.uint8), np.array([0, 3, 15, 15, 1, 0, 2, 9], np.uint8)
    contexts = dithered.contexts_of(rows, columns, np.tile(OFFSETS, (3, 1)), CONTEXTS)
    classes = np.minimum(np.add.outer(rows, columns), CONTEXTS - 1)
    assert np.array_equal(contexts // CONTEXTS, np.tile([3, 2, 1, 0, 0, 1, 2, 3], (3, 1)))
    assert np.array_equal(contexts % CONTEXTS, classes)


@pytest.mark.parametrize("seed", range(3))
def test_machine_code_does_what_the_interpreter_does(seed):
    rng = np.random.default_rng(seed)
    q = np.rint(rng.standard_normal((6, 9)) * 5).astype(np.int16)
    offsets = rng.integers(-4, 4, q.shape).astype(np.int8)
    rows, columns = (rng.integers(0, 16, count).astype(np.uint8) for count in q.shape)
    for function, given in (
        (dithered.symbols_of, (q, offsets)),
        (dithered.integers_of, (np.abs(q), offsets)),
        (dithered.contexts_of, (rows, columns, offsets, CONTEXTS)),
    ):
        here, there = function(*given), function.__wrapped__(*given)
        assert here.dtype == there.dtype and np.array_equal(here, there)
