"""Cast: rounds to nearest, and clamps to the largest finite value instead of inf or NaN."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import FLOATS, round_trip, same_bits

from mpcomp import Cast, TensorMeta

LARGEST = {"fp32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "fp16": 65504.0}
LARGEST |= {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


@pytest.mark.parametrize("dtype", LARGEST)
@given(values=st.lists(st.floats(-400, 400, width=32), min_size=1, max_size=30))
def test_rounds_to_nearest_inside_the_range(dtype, values):
    x = torch.tensor(values)
    assert torch.equal(round_trip(Cast(dtype), x), x.to(Cast(dtype).wire_dtype).float())


@pytest.mark.parametrize("dtype", LARGEST)
def test_finite_values_beyond_the_range_become_the_largest(dtype):
    largest = LARGEST[dtype]
    x = torch.tensor([1e60, -1e60, largest * 1.0001, -largest * 1.0001, 1.0], dtype=torch.float64)
    expected = [largest, -largest, largest, -largest, 1.0]
    assert round_trip(Cast(dtype), x).tolist() == expected
    just = torch.tensor([3.4028e38, -3.4028e38])
    assert round_trip(Cast(dtype), just).isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("wire", LARGEST)
def test_the_largest_of_every_dtype_stays_finite(wire, dtype):
    """bf16 rounds fp16's 65504 to 65536, which is beyond fp16 again."""
    largest = torch.finfo(dtype).max
    y = round_trip(Cast(wire), torch.tensor([largest, -largest], dtype=dtype))
    assert y.isfinite().all() and y.dtype == dtype


@pytest.mark.parametrize("wire", LARGEST)
def test_nan_stays_nan(wire):
    """Clamping must not hide what has diverged."""
    assert round_trip(Cast(wire), torch.tensor([torch.nan, 1.0])).isnan().tolist() == [True, False]


def test_bytes_per_element():
    meta = TensorMeta((3, 10))
    sizes = {dtype: Cast(dtype).wire_bytes(meta) // 30 for dtype in LARGEST}
    assert sizes == {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def test_the_same_dtype_loses_nothing():
    x = torch.randn(100).half()
    assert same_bits(round_trip(Cast("fp16"), x), x)


def test_unknown_dtype():
    with pytest.raises(ValueError, match="dtype='int8'.*bf16, fp16, fp8_e4m3"):
        Cast("int8")
