"""FixedPoint against AC-SGD's formula (reference §3.3), computed apart in fp64."""

import numpy as np
import pytest
import torch
from methods import round_trip

from mpcomp import FixedPoint, TensorMeta


def formula(
    x: np.ndarray, bits: int, axis: tuple[int, ...] | None
) -> tuple[np.ndarray, np.ndarray]:
    """(decoded, distance of the code from a tie) by s = fp16(max |x|), q = clip(round(...))."""
    half = 2 ** (bits - 1)
    s = np.abs(x).max(axis=axis, keepdims=True).astype(np.float16).astype(np.float64)
    exact = half * x / (s + 1e-6)
    q = np.clip(np.round(exact), -half, half - 1)
    return q * s / half, np.abs(np.abs(exact - np.floor(exact)) - 0.5)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("scale", ["hidden", "tensor"])
def test_decodes_to_the_published_formula(bits, scale):
    x = torch.randn(3, 17, 8) * torch.logspace(-2, 2, 8)
    expected, from_tie = formula(x.double().numpy(), bits, (0, 1) if scale == "hidden" else None)
    got = round_trip(FixedPoint(bits, scale), x).double().numpy()
    sure = from_tie > 1e-4  # elsewhere fp32 and fp64 may round apart
    assert sure.mean() > 0.99
    np.testing.assert_allclose(got[sure], expected[sure], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits, book", [(1, [-1, 0]), (2, [-1, -0.5, 0, 0.5]), (3, None)])
def test_code_book_is_asymmetric_as_published(bits, book):
    """Levels −1 … 1 − 2^(1−b) of the scale: the largest positive value is clipped by a step."""
    x = torch.linspace(-4, 4, 1001)
    step = 2.0 ** (1 - bits)
    levels = round_trip(FixedPoint(bits, "tensor"), x).unique() / 4
    assert levels.tolist() == (book or [-1 + step * i for i in range(2**bits)])
    assert levels[-1] == 1 - step


def test_one_fp16_scale_for_each_hidden_channel():
    layout = FixedPoint(4).layout(TensorMeta((2, 16, 48)))
    assert layout[0] == TensorMeta((48,), torch.float16)
    assert layout[1] == TensorMeta((2 * 16 * 48 // 2,), torch.uint8)
    assert FixedPoint(4, "tensor").layout(TensorMeta((2, 16, 48)))[0].shape == (1,)


def test_published_weaknesses_are_kept_for_parity():
    """Scales near 1e-6 shrink the codes; below fp16's range everything decodes to zero."""
    x = torch.full((1, 16, 4), 1e-6)
    assert (round_trip(FixedPoint(8), x) < 0.7e-6).all()
    assert not round_trip(FixedPoint(8), torch.full((1, 16, 4), 1e-8)).any()


def test_scales_beyond_fp16_are_clamped_not_infinite():
    x = torch.full((2, 4), 1e30)
    y = round_trip(FixedPoint(4), x)
    assert y.isfinite().all() and (y == 65504 * 7 / 8).all()


def test_bad_settings():
    for bits in (0, 9, 4.0):
        with pytest.raises(ValueError, match=f"bits={bits}.*1 to 8"):
            FixedPoint(bits)
    with pytest.raises(ValueError, match="scale='sample'.*'hidden' and 'tensor'"):
        FixedPoint(4, "sample")
