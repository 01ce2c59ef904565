"""Sign: one bit an element, mean magnitudes, and the contraction of the scaled sign."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import round_trip
from test_quantize import members

from mpcomp import Sign, TensorMeta

SCALES = ["tensor", "sample", "channel", "token", 8, 128]


@pytest.mark.parametrize("scale", SCALES)
def test_sign_times_the_mean_magnitude_of_the_group(scale):
    for shape in ((3, 4, 7), (2, 3, 4, 5), (61,)):
        x = torch.randn(shape)
        y = round_trip(Sign(scale), x)
        for group in members(x, scale):
            a, b = x.reshape(-1)[group], y.reshape(-1)[group]
            expected = a.double().abs().mean().float()
            torch.testing.assert_close(b, torch.where(a >= 0, expected, -expected))


@given(
    values=st.lists(st.floats(-1e9, 1e9, width=32), min_size=1, max_size=200),
    scale=st.sampled_from(SCALES),
)
def test_contraction_formula(values, scale):
    """‖x − C(x)‖² = ‖x‖² − ‖x‖₁² / n in every group, the last and shorter one included."""
    x = torch.tensor(values).reshape(1, -1)
    y = round_trip(Sign(scale), x)
    for group in members(x, scale):
        a, b = x.reshape(-1)[group].double(), y.reshape(-1)[group].double()
        energy = a.square().sum()
        expected = energy - a.abs().sum() ** 2 / len(group)
        assert abs((a - b).square().sum() - expected) <= 1e-5 * energy + 1e-80


def test_the_sign_of_zero_is_plus():
    x = torch.tensor([0.0, -0.0, 2.0, -2.0])
    assert round_trip(Sign(), x).tolist() == [1, 1, 1, -1]


def test_sums_of_huge_magnitudes_do_not_overflow():
    x = torch.full((1000,), 3e38)
    torch.testing.assert_close(round_trip(Sign(), x), x)


def test_one_bit_and_one_scale():
    assert Sign().wire_bytes(TensorMeta((16, 64))) == 4 + 128
    assert Sign("sample").wire_bytes(TensorMeta((16, 64))) == 16 * (4 + 8)
    with pytest.raises(ValueError, match="scale='row'"):
        Sign("row")
