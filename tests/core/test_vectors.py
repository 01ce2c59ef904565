"""Steps over eight numbers: each operation against numpy's, for all masks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpcomp.core.compiled import compiled
from mpcomp.core.vectors import EIGHT, vectorized

NUMBERS = np.array([0, 1, 2, 77, 65535, 65536, 2**31, 2**32 - 1], np.uint32)
OTHERS = np.array([5, 0, 2**32 - 1, 77, 65536, 3, 2**31, 2**32 - 1], np.uint32)
WORDS = np.arange(1000, 1000 + EIGHT, dtype=np.uint16)


@vectorized(results=1)
def _arithmetic(a, b, out, at):
    x, y = a.load(at), b.load(at)
    made = [x + y, x - y, x * y, x & y, x | y, x ^ y, x << 3, x >> 3, x + 9, 9 - x]
    made += [(x < y).choose(x, y), (x > y).choose(x, y), (x > 76).choose(y, x), at.onwards()]
    for n, values in enumerate(made):
        out.store(at + n * EIGHT, values)
    return at + len(made)


@compiled
def arithmetic(a, b, out):
    """All operations on 32 bits."""
    return _arithmetic(a, b, out, 0)


def test_operations_are_those_of_numpy():
    x, y = NUMBERS, OTHERS
    expected = [x + y, x - y, x * y, x & y, x | y, x ^ y, x << 3, x >> 3, x + 9, 9 - x]
    expected += [np.minimum(x, y), np.maximum(x, y), np.where(x > 76, y, x), np.arange(EIGHT)]
    out = np.zeros((len(expected), EIGHT), np.uint32)
    assert arithmetic(x, y, out.reshape(-1)) == len(expected)
    assert np.array_equal(out, np.stack(expected).astype(np.uint32))


@vectorized(results=2)
def _moves(bits, words, out, read_at, write_at):
    meant = bits.load(0) > 0
    out.store(0, meant.expand(words.load(read_at).to(32)).to(16))
    out.store(write_at - EIGHT, meant.compress(words.load(read_at)))
    return read_at + meant.count(), write_at - meant.count()


@compiled
def moves(bits, words, out):
    """Words that are taken by a mask, and words that are left by it."""
    return _moves(bits, words, out, 1, 2 * EIGHT)


@pytest.mark.parametrize("mask", range(1 << EIGHT))
def test_words_are_taken_and_left_in_order(mask):
    meant = (mask >> np.arange(EIGHT) & 1).astype(np.uint32)
    words, out = np.append(np.uint16(7), WORDS), np.zeros(2 * EIGHT, np.uint16)
    count = int(meant.sum())
    assert moves(meant, words, out) == (1 + count, 2 * EIGHT - count)
    assert np.array_equal(out[:EIGHT][meant > 0], WORDS[:count])
    assert np.array_equal(out[2 * EIGHT - count :], WORDS[meant > 0])


@vectorized(results=1)
def _gathered(table, places, out, at):
    out.store(0, table.gather(places.load(at)))
    return at


@compiled
def gathered(table, places, out):
    """Numbers of a table."""
    return _gathered(table, places, out, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.uint64])
def test_numbers_of_any_places_and_type_are_gathered(dtype):
    table = (np.arange(5000) * 31 % 251).astype(dtype)
    places = np.array([0, 4999, 17, 17, 256, 255, 4096, 1], np.uint32)
    out = np.zeros(EIGHT, dtype)
    gathered(table, places, out)
    assert np.array_equal(out, table[places])


@vectorized(results=1)
def _divided(a, b, out, at):
    out.store(0, a.load(0) // b.load(0))
    return at


@compiled
def divided(a, b, out):
    """Whole quotients."""
    return _divided(a, b, out, 0)


@given(
    divisor=st.integers(1, 1 << 12),
    multiples=st.lists(st.integers(0, (1 << 20) - 1), min_size=EIGHT, max_size=EIGHT),
    off=st.integers(-2, 2),
)
def test_quotients_are_exact(divisor, multiples, off):
    """Of states as an entropy coder's: next to multiples of a divisor, and below 2^20 of it."""
    states = np.clip(np.array(multiples) * divisor + off, 0, min(divisor << 20, 2**32) - 1)
    out = np.zeros(EIGHT, np.uint32)
    divided(states.astype(np.uint32), np.full(EIGHT, divisor, np.uint32), out)
    assert np.array_equal(out, states // divisor)


def test_only_compiled_functions_call_a_step():
    with pytest.raises(TypeError, match="_divided is called by compiled functions alone"):
        _divided(NUMBERS, OTHERS, NUMBERS, 0)
