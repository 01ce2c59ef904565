"""Integers of images by their neighbours: what is expected, and what says how far off it is."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpcomp.entropy import ans, neighbours

LARGEST = 2**15 - 1


@given(expected=st.integers(0, LARGEST), q=st.integers(0, LARGEST))
def test_a_symbol_says_an_integer_that_is_not_negative(expected, q):
    s = neighbours.symbol(q, expected, False)
    assert 0 <= s <= 2 * max(expected, q) and neighbours.integer(s, expected, False) == q


@given(expected=st.integers(-LARGEST, LARGEST), q=st.integers(-LARGEST, LARGEST))
def test_a_symbol_says_an_integer(expected, q):
    s = neighbours.symbol(q, expected, True)
    assert 0 <= s <= 2 * abs(q - expected) and neighbours.integer(s, expected, True) == q


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("expected", [0, 1, 5])
def test_symbols_rise_with_the_distance_and_none_is_left_out(expected, signed):
    integers = range(-40 if signed else 0, 41)
    by_distance = sorted(integers, key=lambda q: (abs(q - expected), q > expected))
    found = [neighbours.symbol(q, expected, signed) for q in by_distance]
    assert found[:30] == list(range(30)) and found == sorted(found)


@given(s=st.integers(0, ans.ESCAPE), expected=st.integers(-LARGEST, LARGEST), signed=st.booleans())
def test_any_symbol_says_an_integer_that_may_be(s, expected, signed):
    assert abs(neighbours.integer(s, expected if signed else abs(expected), signed)) <= LARGEST


def images(seed: int, *, signed: bool) -> NDArray[np.int16]:
    """Integers of 2 images of 5 lines of 4 pixels, [40, 3]."""
    rng = np.random.default_rng(seed)
    q = np.rint(rng.standard_normal((40, 3)) * rng.choice([0.5, 3, 20], (40, 1))).astype(np.int16)
    return q if signed else np.maximum(q, 0)


def test_expected_is_the_median_of_left_above_and_their_plane():
    q = images(0, signed=True)
    grid = q.reshape(2, 5, 4, 3).astype(int)
    errors = np.zeros(40, np.int64)
    for i in range(40):
        image, y, x = i // 20, i % 20 // 4, i % 4
        around = {
            "left": grid[image, y, x - 1] if x else None,
            "above": grid[image, y - 1, x] if y else None,
        }
        if x and y:
            corner = grid[image, y - 1, x - 1]
            planes = around["left"] + around["above"] - corner
            want = np.median([around["left"], around["above"], planes], 0)
        else:  # the only one there is
            want = next((each for each in around.values() if each is not None), np.zeros(3))
        expected, sizes = np.empty(3, np.int64), np.empty(3, np.uint8)
        neighbours.expect(q, i, 5, 4, errors, expected, sizes)
        assert np.array_equal(expected, want), (image, y, x)


@pytest.mark.parametrize("seed", range(3))
def test_any_integers_are_expected_as_whole_images_are(seed):
    """As large ones as damaged data may say: what is expected has no room to overflow."""
    rng = np.random.default_rng(seed)
    q = rng.choice([-LARGEST, -LARGEST + 1, -70, 0, 5, 64, LARGEST - 1, LARGEST], (40, 3))
    expected, contexts = neighbours.expect_all(torch.from_numpy(q.reshape(2, 5, 4, 3)))
    q, errors = q.astype(np.int16), np.zeros(40, np.int64)
    for i in range(40):
        of_pixel, sizes = np.empty(3, np.int16), np.empty(3, np.uint8)
        of_class = neighbours.expect(q, i, 5, 4, errors, of_pixel, sizes)
        assert np.array_equal(of_pixel, expected.reshape(40, 3)[i])
        assert np.array_equal(of_class + sizes.astype(int), contexts.reshape(40, 3)[i])
        errors[i] = np.abs(q[i].astype(int) - of_pixel).sum()


def test_contexts_tell_sizes_errors_and_first_pixels_apart():
    """All within what tables are made for."""
    q = images(1, signed=True)
    _, pixels, sizes = neighbours.symbols_of(q, 5, 4, True)
    assert (
        pixels[0] == pixels[20] == pixels.max() and (np.delete(pixels, [0, 20]) < pixels[0]).all()
    )
    contexts = pixels[:, None].astype(int) + sizes
    assert contexts.min() >= 0 and contexts.max() < neighbours.CONTEXTS
    smooth = np.repeat(q[:1], 40, 0)
    assert not neighbours.symbols_of(smooth, 5, 4, True)[0][1:20].any()
    assert len(set(neighbours.symbols_of(smooth, 5, 4, True)[1][1:20])) < len(set(pixels[1:20]))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_machine_code_does_what_the_interpreter_does(seed, signed):
    q = images(seed, signed=signed)

    def everything(function):
        found = list(function(neighbours.symbols_of)(q, 5, 4, signed))
        symbols, pixels, sizes = found
        starts = np.arange(ans.ESCAPE + 2, dtype=np.int64)[None].copy()
        starts[0, 1:] += ans.TOTAL - ans.ESCAPE - 1
        table_of = np.zeros(neighbours.CONTEXTS, np.int64)
        states, out = np.full(4, ans.LOWEST, np.int64), np.empty(2 * q.size, np.uint8)
        places, divisors = (pixels, sizes, table_of), ans.divisors(starts)
        at = function(ans.push)(symbols, *places, *divisors, states, out, len(out))
        popped, first = np.empty_like(q), ans.buckets(starts)
        end, escaped = function(neighbours.pop)(
            out, at, signed, 5, 4, table_of, starts, first, states, popped
        )
        assert np.array_equal(popped, q) and (end, escaped) == (len(out), 0)
        assert (states == ans.LOWEST).all()
        return [*found, out[at:]]

    for here, there in zip(
        everything(lambda compiled: compiled),
        everything(lambda compiled: compiled.__wrapped__),
        strict=True,
    ):
        assert np.array_equal(here, there)
