"""Tables of frequencies: as they are sent, and what both ends make of them."""

import numpy as np
import pytest

from mpcomp.entropy import ans, frequencies
from mpcomp.entropy.frequencies import ALIKE, Table, costs_from, costs_of, starts_of

COUNTS = {
    "Gaussian": [80000, 60000, 30000, 9000, 1500, 200, 9, 1],
    "steep": [2**20, 3, 0, 0, 0, 0, 0, 1],
    "far from zero": [0, 0, 0, 5, 0, 900, 0, 0],
    "two modes": [1000, 2, 1, 3, 2, 900, 2, 0],
    "one": [0, 0, 7, 0, 0, 0, 0, 0],
    "zeros": [4000, 0, 0, 0, 0, 0, 0, 0],
}


def read(raw: bytes):
    """The costs that bytes behind others say."""
    costs, at = costs_from(np.frombuffer(b"xy" + raw, np.uint8), 2, 1)
    assert at == 2 + len(raw)
    return costs


@pytest.mark.parametrize("name", COUNTS)
def test_a_table_comes_back_and_has_what_occurs(name):
    counts = np.array([COUNTS[name]])
    (table,) = Table.of_each(counts)
    (starts,) = starts_of(costs_of([table]))
    assert np.array_equal(starts, starts_of(read(table.to_bytes()))[0])
    assert starts[0] == 0 and starts[-1] == ans.TOTAL
    found = np.diff(starts)
    assert (found >= 0).all() and (found[np.flatnonzero(counts)] > 0).all()


@pytest.mark.parametrize("name", COUNTS)
def test_its_bytes_are_near_the_entropy(name):
    """But for a few bytes, where a symbol is rarer than the least frequency."""
    counts = np.array(COUNTS[name])
    (table,) = Table.of_each(counts[None])
    (starts,) = starts_of(costs_of([table]))
    there = np.flatnonzero(counts)
    share = counts[there] / counts.sum()
    least = -(counts[there] * np.log2(share)).sum() / 8
    taken = -(counts[there] * np.log2(np.diff(starts)[there] / ans.TOTAL)).sum() / 8
    assert taken <= 1.02 * least + 12
    assert table.num_bytes == pytest.approx(taken + len(table.to_bytes()), rel=0.03, abs=12)


def test_tables_of_several_lengths_are_a_matrix():
    tables = Table.of_each(np.array(list(COUNTS.values())))
    together = starts_of(costs_of([*tables, ALIKE]))
    for row, table in zip(together, [*tables, ALIKE], strict=True):
        (alone,) = starts_of(costs_of([table]))
        assert np.array_equal(row[: len(alone)], alone) and (row[len(alone) :] == ans.TOTAL).all()


def test_several_tables_are_read_as_they_were_sent():
    tables = [*Table.of_each(np.array(list(COUNTS.values()))), ALIKE]
    raw = np.frombuffer(b"".join(table.to_bytes() for table in tables) + b"more", np.uint8)
    costs, at = costs_from(raw, 0, len(tables))
    assert at == len(raw) - 4 == sum(table.own_bytes for table in tables)
    assert np.array_equal(costs, costs_of(tables))
    for end in range(at):
        with pytest.raises(ValueError, match="ends too early"):
            costs_from(raw[:end], 0, len(tables))


def test_damaged_bytes_are_no_table_or_one():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        raw = rng.bytes(3) + bytes([255] * 256)  # symbols that do not occur
        try:
            costs, _ = costs_from(np.frombuffer(raw, np.uint8), 0, 1)
        except ValueError:
            continue
        (starts,) = starts_of(costs)
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
    raw = b"".join(table.to_bytes() for table in Table.of_each(counts))
    empty = np.full((len(counts), 256), 255, np.uint8)
    for end in range(len(raw) + 1):
        taken = np.frombuffer(raw[:end], np.uint8), 0, frequencies._CURVES
        here = frequencies._read(*taken, empty.copy())
        there = frequencies._read.__wrapped__(*taken, empty.copy())
        assert all(map(np.array_equal, here, there))
