"""Tables of frequencies: as they are sent, and what both ends make of them."""

import numpy as np
import pytest

from mpcomp.entropy import ans, frequencies
from mpcomp.entropy.frequencies import Tables, costs_from, starts_of

COUNTS = {
    "Gaussian": [80000, 60000, 30000, 9000, 1500, 200, 9, 1],
    "steep": [2**20, 3, 0, 0, 0, 0, 0, 1],
    "far from zero": [0, 0, 0, 5, 0, 900, 0, 0],
    "two modes": [1000, 2, 1, 3, 2, 900, 2, 0],
    "one": [0, 0, 7, 0, 0, 0, 0, 0],
    "zeros": [4000, 0, 0, 0, 0, 0, 0, 0],
}


ALL = np.array(list(COUNTS.values()))


@pytest.mark.parametrize("name", COUNTS)
def test_a_table_comes_back_and_has_what_occurs(name):
    counts = np.array([COUNTS[name]])
    tables = Tables.of(counts)
    raw = tables.to_bytes()
    costs, at = costs_from(np.frombuffer(b"xy" + raw, np.uint8), 2, 1)
    assert at == 2 + len(raw)
    (starts,) = starts_of(tables.costs)
    (there,) = starts_of(costs)
    assert np.array_equal(starts[: len(there)], there) and (starts[len(there) :] == ans.TOTAL).all()
    assert starts[0] == 0 and starts[-1] == ans.TOTAL
    found = np.diff(starts)
    assert (found >= 0).all() and (found[np.flatnonzero(counts)] > 0).all()


@pytest.mark.parametrize("name", COUNTS)
def test_its_bytes_are_near_the_entropy(name):
    """But for a few bytes, where a symbol is rarer than the least frequency."""
    counts = np.array(COUNTS[name])
    tables = Tables.of(counts[None])
    (starts,) = starts_of(tables.costs)
    there = np.flatnonzero(counts)
    share = counts[there] / counts.sum()
    least = -(counts[there] * np.log2(share)).sum() / 8
    taken = -(counts[there] * np.log2(np.diff(starts)[there] / ans.TOTAL)).sum() / 8
    assert taken <= 1.02 * least + 12
    assert tables.num_bytes == pytest.approx(taken + len(tables.to_bytes()), rel=0.03, abs=12)


def test_tables_are_made_and_sent_one_by_one():
    """Whatever others stand beside them; both kinds are among these."""
    together = Tables.of(ALL)
    assert {int(curve) == len(frequencies._CURVES) for curve in together.curves} == {True, False}
    alone = [together[n : n + 1] for n in range(len(ALL))]
    assert together.to_bytes() == b"".join(one.to_bytes() for one in alone)
    assert together.num_bytes == pytest.approx(sum(one.num_bytes for one in alone))
    for one, counts in zip(alone, ALL, strict=True):
        assert one.to_bytes() == Tables.of(counts[None]).to_bytes()


def test_several_tables_are_read_as_they_were_sent():
    tables = Tables.of(ALL)
    raw = np.frombuffer(tables.to_bytes() + b"more", np.uint8)
    costs, at = costs_from(raw, 0, len(tables))
    assert at == len(raw) - 4
    assert np.array_equal(costs, tables.costs)
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
    def both(name, *args):
        function = getattr(frequencies, name)
        here, there = function(*copies(args)), function.__wrapped__(*copies(args))
        if not isinstance(here, tuple):
            here, there = (here,), (there,)
        for one, other in zip(here, there, strict=True):
            assert np.allclose(one, other, rtol=1e-12), name
        return here

    def copies(args):
        return [one.copy() if isinstance(one, np.ndarray) else one for one in args]

    curves = frequencies._CURVES
    constants = curves, frequencies._CURVE_BITS, frequencies._CURVE_TOTALS
    chosen, costs, _ = both("_fitted", ALL, *constants)
    (raw,) = both("_written", chosen, costs)
    both("_summed", costs, frequencies._WEIGHTS, ans.TOTAL)
    for end in range(len(raw) + 1):
        both("_read", raw[:end], 0, curves, np.full((len(ALL), 256), 255, np.uint8))
