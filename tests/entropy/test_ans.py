"""The compiled coder: its arithmetic is exact, and that of the interpreter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpcomp.entropy import ans

ROWS = np.array([0, 0, 2, 1, 3, 3, 0], np.uint8)
COLUMNS = np.array([[1, 0, 2, 0, 0, 3, 1, 1, 0]], np.uint8)
TABLE_OF = np.array([0, 1, 1, 2, 3], np.int64)
NUM_TABLES = 4


def integers(seed: int) -> NDArray[np.int16]:
    """A matrix [7, 9], with zeros, magnitudes below and above `ans.ESCAPE`, and a row of zeros."""
    rng = np.random.default_rng(seed)
    q = np.rint(rng.standard_cauchy((7, 9)) * rng.choice([0.3, 4, 90], (7, 1))).astype(np.int16)
    q[3], q[1, 2], q[2, 8] = 0, -ans.ESCAPE, 32767
    return q


def tables(rng: np.random.Generator) -> NDArray[np.int64]:
    """Sums of frequencies, of which each symbol has one at least, and one has nearly all."""
    frequencies = np.ones((NUM_TABLES, ans.ESCAPE + 1), np.int64)
    for row in frequencies:
        row[rng.integers(len(row), size=9)] += rng.integers(3000, size=9)
        row[rng.integers(len(row))] += ans.TOTAL - row.sum()
    return np.pad(frequencies.cumsum(1), ((0, 0), (1, 0)))


def coded(q, starts, num_states, push):
    out = np.empty(2 * q.size, np.uint8)
    states = np.full(num_states, ans.LOWEST, np.int64)
    at = push(q, ROWS, COLUMNS, TABLE_OF, *ans.divisors(starts), states, out, len(out))
    return states, out[at:]


@pytest.mark.parametrize("num_states", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_what_was_pushed_is_popped(seed, num_states):
    q, starts = integers(seed), tables(np.random.default_rng(seed))
    states, words = coded(q, starts, num_states, ans.push)
    assert ((states >= ans.LOWEST) & (states < 1 << 32)).all()
    found = np.empty_like(q)
    of_tables = TABLE_OF, starts, ans.buckets(starts)
    end, _, escaped = ans.pop(words, 0, False, ROWS, COLUMNS, *of_tables, states, found)
    assert np.array_equal(found, np.minimum(np.abs(q), ans.ESCAPE))
    assert end == len(words) and (states == ans.LOWEST).all()
    assert escaped == (found == ans.ESCAPE).sum()


def test_words_that_end_too_early_are_said():
    q, starts = integers(0), tables(np.random.default_rng(0))
    states, words = coded(q, starts, 4, ans.push)
    of_tables = TABLE_OF, starts, ans.buckets(starts)
    for end in range(0, len(words) - 1, 5):
        at, _, _ = ans.pop(
            words[:end], 0, False, ROWS, COLUMNS, *of_tables, states.copy(), np.empty_like(q)
        )
        assert at == -1


@pytest.mark.parametrize("seed", range(3))
def test_machine_code_does_what_the_interpreter_does(seed):
    """Types that overflow or round would show."""
    q, starts = integers(seed), tables(np.random.default_rng(seed))

    def everything(function):
        found = [*function(ans.sums)(q)]
        by_row, nonzero = found[0], found[3]
        counts = function(ans.tally)(q, ROWS, COLUMNS, 5, ans.ESCAPE)
        signs = function(ans.signs_of)(q, by_row, nonzero)
        large = function(ans.large_of)(q, int(counts[:, ans.ESCAPE].sum()))
        assert np.array_equal(np.unpackbits(signs, bitorder="little")[:nonzero], q[q != 0] < 0)
        assert np.array_equal(large, np.abs(q[np.abs(q) >= ans.ESCAPE]))
        states, words = coded(q, starts, 4, function(ans.push))
        data = np.concatenate([words, signs[::-1]])
        first, popped, after = function(ans.buckets)(starts), np.empty_like(q), states.copy()
        found += [signs, large, counts, states, words, first, popped, after]
        found += function(ans.pop)(
            data, 0, True, ROWS, COLUMNS, TABLE_OF, starts, first, after, popped
        )
        assert np.array_equal(popped, np.clip(q, -ans.ESCAPE, ans.ESCAPE))
        return found

    for here, there in zip(
        everything(lambda compiled: compiled),
        everything(lambda compiled: compiled.__wrapped__),
        strict=True,
    ):
        assert np.array_equal(here, there)


def test_classes_of_each_integer_take_the_place_of_those_of_columns():
    q, starts = integers(1), tables(np.random.default_rng(1))
    counts = [
        ans.tally(q, ROWS, columns, 5, ans.ESCAPE)
        for columns in (COLUMNS, np.repeat(COLUMNS, len(q), 0), COLUMNS[:, ::-1].repeat(len(q), 0))
    ]
    assert np.array_equal(counts[0], counts[1]) and not np.array_equal(counts[0], counts[2])

    def push(columns):
        states, out = np.full(4, ans.LOWEST, np.int64), np.empty(2 * q.size, np.uint8)
        at = ans.push(q, ROWS, columns, TABLE_OF, *ans.divisors(starts), states, out, len(out))
        return states.tobytes() + out[at:].tobytes()

    mixed = np.repeat(COLUMNS, len(q), 0)
    same = push(mixed)
    mixed[2] = COLUMNS[0, ::-1]
    assert push(COLUMNS) == same != push(mixed)


@given(
    frequency=st.integers(1, ans.TOTAL),
    multiple=st.integers(0, 2**32),
    off=st.integers(-2, 2),
)
def test_the_quotient_by_an_inverse_is_exact(frequency, multiple, off):
    """Next to the multiples, where it would be wrong first: as in `ans.push`, and `lanes.push`."""
    x = min(max(multiple % (2**17) * frequency + off, 0), 2**17 * frequency - 1)
    inverses = ans.divisors(np.array([[0, frequency, ans.TOTAL]]))[0][0]
    assert ans.quotient(np.uint64(x), inverses[0]) == x // frequency
    x = min(max(multiple % (2**32 // frequency) * frequency + off, 0), 2**32 - 1)
    assert int((np.float64(x) + 0.5) * (1.0 / np.float64(frequency))) == x // frequency


def test_the_quotient_of_the_largest_state_is_exact_for_every_frequency():
    """There the product has all 64 bits."""
    for frequency in range(1, ans.TOTAL + 1):
        inverse, largest = -(-(1 << 47) // frequency), 2**17 * frequency - 1
        assert largest * inverse < 2**64 and largest * inverse >> 47 == 2**17 - 1
