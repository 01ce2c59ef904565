"""Tables of frequencies: as they are sent, and what both ends make of them."""

import numpy as np
import pytest

from mpcomp.entropy import ans, frequencies
from mpcomp.entropy.frequencies import ALIKE, Table, starts_of

COUNTS = {
    "Gaussian": [80000, 60000, 30000, 9000, 1500, 200, 9, 1],
    "steep": [2**20, 3, 0, 0, 0, 0, 0, 1],
    "far from zero": [0, 0, 0, 5, 0, 900, 0, 0],
    "two modes": [1000, 2, 1, 3, 2, 900, 2, 0],
    "one": [0, 0, 7, 0, 0, 0, 0, 0],
    "zeros": [4000, 0, 0, 0, 0, 0, 0, 0],
}


def reader(raw: bytes):
    """Gives the next bytes, so many."""
    data, at = np.frombuffer(raw, np.uint8), 0

    def take(num_bytes):
        nonlocal at
        at += num_bytes
        return data[at - num_bytes : at]

    return take


@pytest.mark.parametrize("name", COUNTS)
def test_a_table_comes_back_and_has_what_occurs(name):
    counts = np.array([COUNTS[name]])
    (table,) = Table.of_each(counts)
    (starts,) = starts_of([table])
    assert np.array_equal(starts, starts_of([Table.read(reader(table.to_bytes()))])[0])
    assert starts[0] == 0 and starts[-1] == ans.TOTAL
    found = np.diff(starts)
    assert (found >= 0).all() and (found[np.flatnonzero(counts)] > 0).all()


@pytest.mark.parametrize("name", COUNTS)
def test_its_bytes_are_near_the_entropy(name):
    """But for a few bytes, where a symbol is rarer than the least frequency."""
    counts = np.array(COUNTS[name])
    (table,) = Table.of_each(counts[None])
    (starts,) = starts_of([table])
    there = np.flatnonzero(counts)
    share = counts[there] / counts.sum()
    least = -(counts[there] * np.log2(share)).sum() / 8
    taken = -(counts[there] * np.log2(np.diff(starts)[there] / ans.TOTAL)).sum() / 8
    assert taken <= 1.02 * least + 12
    assert table.num_bytes == pytest.approx(taken + len(table.to_bytes()), rel=0.03, abs=12)


def test_tables_of_several_lengths_are_a_matrix():
    tables = Table.of_each(np.array(list(COUNTS.values())))
    together = starts_of([*tables, ALIKE])
    for row, table in zip(together, [*tables, ALIKE], strict=True):
        (alone,) = starts_of([table])
        assert np.array_equal(row[: len(alone)], alone) and (row[len(alone) :] == ans.TOTAL).all()


def test_damaged_bytes_are_no_table_or_one():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        raw = rng.bytes(3) + bytes([255] * 256)  # symbols that do not occur
        try:
            table = Table.read(reader(raw))
        except ValueError:
            continue
        (starts,) = starts_of([table])
        assert starts[-1] == ans.TOTAL and (np.diff(starts) >= 0).all()


def test_machine_code_does_what_the_interpreter_does():
    counts = np.array(list(COUNTS.values()))
    fitted = frequencies._fitted
    constants = frequencies._CURVE_BITS, frequencies._CURVE_TOTALS
    costs = fitted(counts, *constants)[4]
    for here, there in zip(
        fitted(counts, *constants), fitted.__wrapped__(counts, *constants), strict=True
    ):
        assert np.allclose(here, there, rtol=1e-12)
    summed = frequencies._summed
    there = summed.__wrapped__(costs, frequencies._WEIGHTS, ans.TOTAL)
    assert np.array_equal(summed(costs, frequencies._WEIGHTS, ans.TOTAL), there)
