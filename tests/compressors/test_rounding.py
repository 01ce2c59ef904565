"""Rounding in one pass over memory: it gives the bits that torch's operations give."""

import numpy as np
import pytest
import torch

from mpcomp.compressors import rounding
from mpcomp.compressors.rounding import Grid, means_of, norms_of, parts_of, restored, rounded
from mpcomp.core import threads

LIMIT = 32767
WIDTHS = (1, 7, 8, 29)  # fewer than lanes, as many, and a rest


def vectors(width, num=12):
    """Of all sizes, with what is no number among them."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(num, width, generator=generator) * torch.logspace(-3, 6, num)[:, None]
    x[1, 0], x[2, 0], x[3, 0] = torch.nan, torch.inf, -torch.inf
    x[4] = 0
    x[5] = 3e38
    x[6, 0] = -0.5  # a tie
    return x


def grid(width, *, centred, alone=False, num=12):
    """Of each vector or of all together; one unit is zero."""
    generator = torch.Generator().manual_seed(100 + width)
    count = 1 if alone else num
    units = torch.rand(count, 1, generator=generator) + 0.1
    units[6 % count] = 1
    if not alone:
        units[7] = 0
    means = torch.randn(width, generator=generator) * 3 if centred else None
    have = (torch.rand(count, 1, generator=generator) < 0.7).float() if not alone else units[:1] * 1
    return Grid(units, means, have)


def dither(width, num=12):
    return torch.rand(num, width, generator=torch.Generator().manual_seed(5)) - 0.5


# Whether there are means, whether all have one unit, whether there is a dither, and the dead zone.
CASES = [
    *((False, False, False, 0.5), (True, False, False, 0.5), (True, True, False, 0.5)),
    *((False, False, False, 0.8), (True, False, False, 1.0)),
    *((False, True, True, 0.5), (True, False, True, 0.5)),
]


@pytest.mark.parametrize("centred, alone, dithered, dead_zone", CASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_one_pass_gives_the_bits_of_torch(width, centred, alone, dithered, dead_zone):
    x, on = vectors(width), grid(width, centred=centred, alone=alone)
    v = dither(width) if dithered else None
    before = x.clone()
    q = rounded(x, on, v, dead_zone, LIMIT)
    expected = rounded.anywhere(x, on, v, dead_zone, LIMIT)
    assert q.dtype == torch.int16 and torch.equal(q, expected) and q.any()
    assert torch.equal(x.nan_to_num(), before.nan_to_num()), "what was given is as it was"
    for limit in (3.0e38, 100.0):
        back = restored(q, on, v, limit)
        there = restored.anywhere(q, on, v, limit)
        assert torch.equal(back, there) and back.abs().max() <= limit


def test_a_number_that_is_none_counts_as_zero_and_what_is_too_large_is_clipped():
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e30, 2.5, -2.5]])
    one = Grid(torch.ones(1, 1), None, torch.ones(1, 1))
    assert rounded(x, one, None, 0.5, LIMIT).tolist() == [[0, LIMIT, -LIMIT, LIMIT, 2, -2]]
    assert rounded(x, one._replace(units=torch.zeros(1, 1)), None, 0.5, LIMIT).any().item() is False


@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width):
    """In fp64: the square of no number of fp32 is too large."""
    x = vectors(width)
    expected = torch.linalg.vector_norm(x.nan_to_num(), dim=1, dtype=torch.float64).numpy()
    assert norms_of(x) == pytest.approx(expected, rel=1e-12) and np.isfinite(norms_of(x)).all()


def num_of(x, grid):
    return int(grid.centred.expand(len(x), 1).sum())


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_means_are_of_centred_vectors(width, alone):
    x, on = vectors(width)[5:], grid(width, centred=False, alone=alone)
    on = on if alone else Grid(on.units[5:], None, on.centred[5:])
    counting = on.centred.expand(7, 1) > 0
    y = x.double() / torch.where(on.units > 0, on.units, torch.inf).double()
    expected = y[counting[:, 0]].mean(0).numpy()
    assert means_of(x, on, num_of(x, on)) == pytest.approx(expected, rel=1e-6)
    none = on._replace(centred=torch.zeros_like(on.centred))
    assert not means_of(x, none, 0).any() and not means_of(x[:0], none, 0).any()


def test_parts_of_a_dither():
    v = torch.tensor([[-0.5, -0.126, -0.125, -1e-9, 0.0, 0.124, 0.125, 0.4999999]])
    assert parts_of(v, 8).tolist() == [[-4, -2, -1, -1, 0, 0, 1, 3]]


@pytest.mark.parametrize("width", WIDTHS)
def test_machine_code_does_what_the_interpreter_does(width):
    """Types that round otherwise would show."""
    x, on, v = vectors(width).numpy(), grid(width, centred=True), dither(width).numpy()
    given = on.units.numpy(), on.means.numpy(), on.centred.numpy()
    q, none = np.arange(x.size).reshape(x.shape).astype(np.int16), np.empty((0, width), np.float32)
    into = {
        rounding.fill_norms: ((x,), np.zeros(len(x))),
        rounding.fill_parts: ((v, 8), np.zeros(v.shape, np.int8)),
    }
    for function, (arguments, out) in into.items():
        check_alike(function, arguments, out)
    summed = x, given[0], given[2]
    expected = pytest.approx(rounding.added_up.__wrapped__(*summed), rel=1e-12)
    assert rounding.added_up(*summed) == expected
    for between, dead_zone in ((v, 0.5), (none, 0.5), (none, 0.75)):
        out = np.zeros(x.shape, np.int16)
        check_alike(rounding.fill_rounded, (x, *given, between, dead_zone, LIMIT), out)
        out = np.zeros(x.shape, np.float32)
        check_alike(rounding.fill_restored, (q, *given, between, 3.0e38), out)


def test_slices_give_what_one_pass_gives(monkeypatch):
    """Large tensors are rounded in slices of rows, of which threads take some each."""
    x, on, v = vectors(29), grid(29, centred=True), dither(29)

    def everything():
        q = rounded(x, on, v, 0.5, LIMIT)
        back = restored(q, on, v, 3.0e38)
        return [torch.from_numpy(norms_of(x)), parts_of(v, 8), q, back]

    whole, means = everything(), means_of(x, on, num_of(x, on))
    monkeypatch.setattr(threads, "_ELEMENTS", 64)
    assert len(threads.slices_of(*x.shape)) > 4
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        assert all(torch.equal(*both) for both in zip(whole, everything(), strict=True))
        assert means_of(x, on, num_of(x, on)) == pytest.approx(means, rel=1e-12)


def check_alike(function, arguments, out):
    here, there = out.copy(), out.copy()
    function(*arguments, here)
    with np.errstate(over="ignore", divide="ignore"):
        function.__wrapped__(*arguments, there)
    if out.dtype == np.float64:  # sums, which numpy adds up in another order
        assert here == pytest.approx(there, rel=1e-12), function.__name__
    else:
        assert np.array_equal(here, there), function.__name__
