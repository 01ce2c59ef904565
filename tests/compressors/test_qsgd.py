"""QSGD: the levels of eq. 3, unbiased, with the variance of lemma 3.1."""

import pytest
import torch
from methods import drawn, round_trip, same_bits

from mpcomp import QSGD, TensorMeta


@pytest.mark.parametrize("bits", range(2, 9))
def test_levels_are_those_of_the_formula(bits):
    """x̂ s / ‖x‖ is a whole number next to x s / ‖x‖, of the same sign."""
    s = 2 ** (bits - 1) - 1
    x = torch.randn(4, 128)
    y = round_trip(QSGD(bits, group=128), x).double()
    norm = x.double().norm(dim=1, keepdim=True)
    level = y / norm * s
    torch.testing.assert_close(level, level.round(), rtol=0, atol=1e-5 * s)
    assert ((level.abs() - x.double().abs() / norm * s).abs() < 1 + 1e-5).all()
    assert (y * x >= 0).all() and (level.abs() <= s + 1e-4).all()


def test_norms_are_of_groups_and_the_last_one_of_what_is_there():
    x = torch.randn(10)
    norms, packed = QSGD(4, group=4).compress(x, drawn())
    expected = torch.stack([x[:4].norm(), x[4:8].norm(), x[8:].norm()])
    torch.testing.assert_close(norms, expected)
    assert packed.shape == (5,)
    alone = round_trip(QSGD(8), torch.tensor([0.0, -3.0, 0.0]))
    torch.testing.assert_close(alone, torch.tensor([0.0, -3.0, 0.0]))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_unbiased(bits):
    """E x̂ = x: 20,000 draws of each number, 5 standard deviations."""
    points = torch.tensor([-1.0, -0.77, -0.013, 0.0, 0.3, 0.999, 0.05, 2.5])
    y = round_trip(QSGD(bits, group=8), points.repeat(20_000), seed=5).double().reshape(-1, 8)
    deviation = y.std(dim=0) / 20_000**0.5
    assert ((y.mean(dim=0) - points.double()).abs() <= 5 * deviation + 1e-6).all()
    assert (y.std(dim=0)[[0, 1, 4, 5, 7]] > 0).all() and not y[:, 3].any()


@pytest.mark.parametrize(("bits", "group"), [(2, 512), (4, 512), (8, 512), (4, 16)])
def test_variance_is_bounded(bits, group):
    """E‖x − x̂‖² ≤ min(n / s², √n / s) ‖x‖², and close to it where s is small."""
    s = 2 ** (bits - 1) - 1
    x = torch.randn(group)
    error = (round_trip(QSGD(bits, group), x.repeat(300)).reshape(300, -1) - x).square().sum(dim=1)
    bound = min(group / s**2, group**0.5 / s)
    assert error.mean() / x.square().sum() <= bound * 1.05


def test_bytes():
    assert QSGD(4).wire_bytes(TensorMeta((1024,))) == 1024 // 2 + 2 * 4
    assert QSGD(8, group=100).wire_bytes(TensorMeta((3, 70))) == 210 + 3 * 4
    assert QSGD(5).wire_bytes(TensorMeta((9,))) == 5 + 2 + 4  # a 4-bit and a 1-bit field


def test_the_generator_decides_the_rounding():
    x = torch.randn(1000)
    assert same_bits(round_trip(QSGD(3), x, 1), round_trip(QSGD(3), x, 1))
    assert not same_bits(round_trip(QSGD(3), x, 1), round_trip(QSGD(3), x, 2))
    with pytest.raises(AssertionError, match="draws from a generator"):
        QSGD(3).compress(x)


def test_norms_do_not_overflow_or_vanish():
    for size in (3e38, 1e-30):
        x = torch.full((512,), size)
        y = round_trip(QSGD(8), x)
        assert y.isfinite().all() and (y >= 0).all() and y.any()


@pytest.mark.parametrize("bits", [1, 9, 2.5, "4"])
def test_bits_outside_2_to_8(bits):
    with pytest.raises(ValueError, match=f"bits={bits}: QSGD packs 2 to 8 bits"):
        QSGD(bits)


@pytest.mark.parametrize("group", [0, -1, 1.5, "tensor", True])
def test_bad_groups(group):
    with pytest.raises(ValueError, match="group=.*a number of elements"):
        QSGD(4, group)
