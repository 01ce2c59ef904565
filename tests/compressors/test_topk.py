"""TopK: the largest magnitudes, ties to the lowest index, and its contraction."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import run_anywhere
from methods import FLOATS, round_trip, same_bits

from mpcomp import EF21, Cast, Quantize, TensorMeta, TopK
from mpcomp.compressors.base import num_kept
from mpcomp.compressors.topk import largest_positions


def chosen_by_sorting(values: list[float], k: int) -> list[int]:
    """Brute force: a stable sort by falling magnitude."""
    return sorted(sorted(range(len(values)), key=lambda i: -abs(values[i]))[:k])


_numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 65504.0, -65504.0, 6e-8]),  # ties are common
    st.floats(width=16, allow_nan=False, allow_infinity=False),
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("accelerator", [False, True])
@given(values=st.lists(_numbers, min_size=1, max_size=50), data=st.data())
def test_selection_is_that_of_a_stable_sort(values, data, accelerator, dtype):
    """Ties go to the lowest index, in every dtype and on both paths."""
    k = data.draw(st.integers(1, len(values)))
    x = torch.tensor(values).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if accelerator:
            run_anywhere(patch)
        positions = largest_positions(torch.stack([x, x.flip(0)]), k)
    n = len(values)
    expected = chosen_by_sorting(x.tolist(), k)
    mirrored = chosen_by_sorting(x.flip(0).tolist(), k)
    assert positions.tolist() == expected + [n + i for i in mirrored]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_relu_zeros_are_no_special_case(dtype):
    """With fewer non-zeros than k, all of them go, and k is still what was asked for."""
    x = torch.zeros(4, 1000, dtype=dtype)
    x[:, 500:530] = torch.rand(4, 30).to(dtype) + 1
    compressor = TopK(0.1)
    payload = compressor.compress(x)
    assert payload[0].shape == (4, 100)
    assert same_bits(compressor.decompress(payload, TensorMeta.of(x)), x)
    # The other 70 places go to the zeros of lowest index.
    positions = compressor.indices(payload, TensorMeta.of(x)).reshape(4, 100) % 1000
    assert positions[0].tolist() == [*range(70), *range(500, 530)]


def test_nan_counts_as_largest():
    """A message with NaN must not hide it."""
    x = torch.randn(100)
    x[63] = torch.nan
    assert 63 in largest_positions(x.reshape(1, -1), 3).tolist()


@pytest.mark.parametrize("scope, scopes", [("sample", 3), ("row", 12), ("tensor", 1)])
def test_scope_says_within_what_elements_compete(scope, scopes):
    x = torch.randn(3, 4, 50) * torch.tensor([1.0, 100.0, 1e-3]).reshape(3, 1, 1)
    sent = round_trip(TopK(0.1, scope=scope), x) != 0
    kept = sent.reshape(scopes, -1).sum(dim=1)
    n = 600 // scopes
    assert kept.tolist() == [math.ceil(0.1 * n - 1e-9)] * scopes
    for values, mask in zip(x.reshape(scopes, n), sent.reshape(scopes, n), strict=True):
        assert values[mask].abs().min() > values[~mask].abs().max()


def test_row_is_the_innermost_dimension_in_memory():
    """For a channels-last image a row is a pixel's channels."""
    x = torch.randn(2, 10, 3, 3).contiguous(memory_format=torch.channels_last)
    sent = round_trip(TopK(0.2, scope="row"), x) != 0
    assert (sent.sum(dim=1) == 2).all()


@pytest.mark.parametrize(
    "keep, n, k",
    [(0.1, 30, 3), (0.3, 10, 3), (0.1, 65536, 6554), (1e-9, 5, 1), (1.0, 7, 7), (0.5, 0, 0)],
)
def test_one_rounding_of_k(keep, n, k):
    """k = max(1, ceil(keep n - 1e-9)): products such as 0.1 × 30 round to what was meant."""
    assert num_kept(keep, n) == k


def test_everything_kept_sends_no_indices():
    x = torch.randn(3, 40)
    payload = TopK(1.0).compress(x)
    assert payload[-1].numel() == 0
    assert same_bits(TopK(1.0).decompress(payload, TensorMeta.of(x)), x)


@given(
    keep=st.floats(0.01, 1.0),
    values=st.lists(_numbers, min_size=1, max_size=60),
    scope=st.sampled_from(["sample", "row", "tensor"]),
)
def test_contraction(keep, values, scope):
    """‖x − C(x)‖² ≤ (1 − k/n) ‖x‖² in every scope."""
    x = torch.tensor(values).reshape(1, -1)
    error = (x - round_trip(TopK(keep, scope=scope), x)).double().square().sum()
    k = num_kept(keep, len(values))
    assert error <= (1 - k / len(values)) * x.double().square().sum() * (1 + 1e-12)


def test_values_are_coded_by_the_value_compressor():
    """What arrives is the selection, then the value compressor's error on it and no more."""
    x = torch.randn(4, 500)
    kept = round_trip(TopK(0.1), x)
    mask = kept != 0
    assert torch.equal(round_trip(TopK(0.1, values=Cast("fp16")), x), kept.half().float())
    coded = round_trip(TopK(0.1, values=Quantize(8)), x)
    assert not coded[~mask].any()
    chosen = x[mask].reshape(4, 50)
    assert torch.equal(coded[mask].reshape(4, 50), round_trip(Quantize(8), chosen))


def test_a_scale_per_sample_of_the_values_is_one_per_sample():
    values = Quantize(8, scale="sample")
    x = torch.randn(4, 500) * torch.tensor([1.0, 1e-3, 1e3, 1.0]).reshape(4, 1)
    low, step, _codes, _indices = TopK(0.1, values=values).compress(x)
    assert low.shape == step.shape == (4,)
    relative = (round_trip(TopK(0.1, values=values), x) - round_trip(TopK(0.1), x)).norm(dim=1)
    assert (relative / x.norm(dim=1) < 0.02).all()


def test_stochastic_values_draw_from_the_generator_given():
    x = torch.randn(4, 500)
    compressor = TopK(0.5, values=Quantize(2, rounding="stochastic"))
    assert same_bits(round_trip(compressor, x, 1), round_trip(compressor, x, 1))
    assert not same_bits(round_trip(compressor, x, 1), round_trip(compressor, x, 2))
    with pytest.raises(AssertionError, match="draws from a generator"):
        compressor.compress(x)


@pytest.mark.parametrize("keep", [0, -0.1, 1.0001, 10, float("nan")])
def test_keep_outside_its_range(keep):
    with pytest.raises(ValueError, match=rf"keep={keep}.*\(0, 1\].*topk:0.1"):
        TopK(keep)


def test_bad_settings():
    with pytest.raises(ValueError, match="scope='pixel'.*sample, row, tensor"):
        TopK(0.1, scope="pixel")
    with pytest.raises(ValueError, match="cannot be selected again; lower keep"):
        TopK(0.1, values=TopK(0.5))
    with pytest.raises(TypeError, match=r"feedback goes round the whole: ef21\+topk"):
        TopK(0.1, values=EF21(TopK(0.5)))
    with pytest.raises(TypeError, match="values='fp16'"):
        TopK(0.1, values="fp16")
