"""SameSign and MeanValue: one sign, one number, and what the mean costs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import round_trip, same_bits

from mpcomp import MeanValue, SameSign, TensorMeta, TopK
from mpcomp.compressors.bits import index_bytes


def test_the_largest_of_a_sign_arrive_as_their_mean():
    x = torch.tensor([[0.5, -3.0, 2.0, -1.0, 4.0, 0.0, -9.0, 1.0]])
    up = round_trip(SameSign(0.25, sign="positive"), x)
    assert up.tolist() == [[0, 0, 3, 0, 3, 0, 0, 0]]
    down = round_trip(SameSign(0.25, sign="negative"), x)
    assert down.tolist() == [[0, -6, 0, 0, 0, 0, -6, 0]]
    assert same_bits(round_trip(SameSign(0.25), x), down)
    assert torch.equal(round_trip(SameSign(0.25), -x), -down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sign", ["positive", "negative"])
def test_the_selection_is_top_k_of_that_sign(sign, dtype):
    x = torch.randn(1, 5000).to(dtype)
    one_sided = (x if sign == "positive" else -x).clamp(min=0)
    kept = round_trip(TopK(0.01), one_sided)
    y = round_trip(SameSign(0.01, sign=sign), x)
    assert torch.equal(y != 0, kept != 0)
    [value] = y[y != 0].unique().tolist()
    mean = kept[kept != 0].double().mean().item()
    assert value == pytest.approx(mean if sign == "positive" else -mean, rel=2**-8)


def test_payload_is_one_number_and_indices():
    meta = TensorMeta((1, 10_000))
    assert SameSign(0.01).wire_bytes(meta) == 4 + index_bytes(10_000, 100)
    assert SameSign(0.01).layout(meta)[0] == TensorMeta((1,), torch.float32)
    signs = {SameSign(0.01, sign=sign).layout(meta) for sign in ("positive", "negative", "larger")}
    assert len(signs) == 1  # so that they may take turns


def test_ties_go_to_the_lowest_index():
    positions = SameSign(0.25, sign="positive").choose(torch.tensor([1.0, -2, 1, 1, 1, 0, 0, 1]), 3)
    assert positions.tolist() == [0, 2, 3]


def test_too_few_of_a_sign_are_filled_up_by_the_smallest_of_the_other():
    x = torch.tensor([[-1.0, -0.1, 5.0, -3.0, 0.0, -0.2]])
    y = round_trip(SameSign(0.5, sign="positive"), x)  # 5, 0 and -0.1
    assert torch.equal(y != 0, torch.tensor([[False, True, True, False, True, False]]))
    assert y[0, 2].item() == pytest.approx(4.9 / 3)
    none = round_trip(SameSign(0.5, sign="positive"), -torch.ones(1, 4))
    assert none.tolist() == [[-1, -1, 0, 0]]


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=50),
    keep=st.floats(0.01, 1.0),
    sign=st.sampled_from(["larger", "positive", "negative"]),
)
def test_error_is_that_of_a_mean(values, keep, sign):
    """‖x − C(x)‖² = ‖x‖² − k mean², so a contraction whatever was chosen."""
    x = torch.tensor(values).reshape(1, -1)
    compressor = SameSign(keep, sign=sign)
    y = round_trip(compressor, x).double()
    k = compressor.num_kept(x.numel())
    [mean] = compressor.compress(x)[0].double().tolist()
    total = x.double().square().sum().item()
    expected = total - k * mean**2
    error = (x.double() - y).square().sum()
    assert error == pytest.approx(expected, rel=1e-5, abs=1e-5 * total)
    assert error <= total * (1 + 1e-6)


def test_mean_value():
    x = torch.tensor([[1.0, -2.0], [4.0, 5.0]])
    assert round_trip(MeanValue(), x).tolist() == [[2, 2], [2, 2]]
    assert MeanValue().wire_bytes(TensorMeta((7, 9))) == 4
    assert round_trip(MeanValue(), torch.full((40,), 3.4e38)).isfinite().all()
    behind = round_trip(TopK(0.5, scope="tensor", values=MeanValue()), x)
    assert behind.tolist() == [[0, 0], [4.5, 4.5]]


def test_bad_settings():
    with pytest.raises(ValueError, match=r"keep=2.*\(0, 1\]"):
        SameSign(2)
    with pytest.raises(ValueError, match="sign='up'.*larger, positive, negative"):
        SameSign(0.1, sign="up")
