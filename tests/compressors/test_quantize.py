"""Quantize: error bounds per group, unbiased stochastic rounding, scales that cover the range."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import drawn, epsilon, round_trip, same_bits
from torch import Tensor

from mpcomp import Quantize, TensorMeta

SCALES = ["tensor", "sample", "channel", "token", 5, 128]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def members(x: Tensor, scale: str | int) -> list[Tensor]:
    """Flat positions (in x's logical order) of the elements that share a scale."""
    order = torch.arange(x.numel()).reshape(x.shape)
    if scale == "tensor" or (isinstance(scale, str) and x.dim() < 2):
        return [order.reshape(-1)]
    if scale == "sample":
        return list(order.reshape(x.shape[0], -1))
    if scale == "channel":
        dim = 1 if x.dim() >= 4 else -1
        return list(order.movedim(dim, 0).reshape(x.shape[dim], -1))
    if scale == "token":
        return list(order.reshape(-1, x.shape[-1]))
    return list(order.reshape(-1).split(scale))


def step_of(group: Tensor, compressor: Quantize) -> float:
    """The step that the formula gives for a group."""
    low, high = group.double().min().item(), group.double().max().item()
    minmax = compressor.mode == "minmax" or (
        compressor.mode is None and compressor.scale in ("tensor", "sample")
    )
    if minmax:
        return (high - low) / (2**compressor.bits - 1)
    levels = 2**compressor.bits - (1 if compressor.bits <= 3 else 2)
    return max(-low, high) / (levels / 2)


def assert_error_is_bounded(x: Tensor, compressor: Quantize, steps: float) -> None:
    """|x − x̂| ≤ steps × step in each group, roundings of scales and of the result allowed for."""
    y = round_trip(compressor, x)
    for group in members(x, compressor.scale):
        a, b = x.reshape(-1)[group].double(), y.reshape(-1)[group].double()
        size = a.abs().max().item()
        # bf16 scales are rounded outwards: low by 2^-7 of itself, the step by 2^-7 and by
        # what that adds to the range.
        coarse = 0.0 if compressor.scale == "tensor" else 2**-7
        step = step_of(a, compressor) * (1 + coarse) + coarse * size / (2**compressor.bits - 1)
        allowed = steps * step + 8 * epsilon(x.dtype) * size + torch.finfo(x.dtype).tiny
        assert (a - b).abs().max() <= allowed, (compressor, a, b)


@pytest.mark.each_once
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mode", ["minmax", "maxabs"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_half_a_step_or_below_a_step(dtype, mode, scale):
    """Nearest rounding: step / 2. Stochastic rounding: step. For every number of bits."""
    for shape in ((3, 4, 7), (2, 3, 4, 5), (11,)):
        x = (torch.randn(shape) * 3 + 1).to(dtype)
        for bits in range(1, 9):
            nearest = Quantize(bits, scale, mode)
            assert_error_is_bounded(x, nearest, 0.5)
            assert_error_is_bounded(x, Quantize(bits, scale, mode, "stochastic"), 1.0)


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    bits=st.integers(1, 8),
    mode=st.sampled_from(["minmax", "maxabs"]),
    scale=st.sampled_from(SCALES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_half_a_step_for_any_numbers(values, bits, mode, scale, dtype):
    x = torch.tensor(values).to(dtype).reshape(1, -1)
    assert_error_is_bounded(x, Quantize(bits, scale, mode), 0.5)


@pytest.mark.parametrize("bits", range(1, 9))
def test_minmax_levels_are_those_of_the_formula(bits):
    """x̂ = min + (max − min) q / (2^b − 1), both ends included: Rudakov et al."""
    levels = 2**bits - 1
    x = torch.cat([torch.tensor([-1.5, 2.5]), torch.rand(4000) * 4 - 1.5])
    exact = (x.double() + 1.5) / 4 * levels
    sure = (exact - exact.floor() - 0.5).abs() > 1e-4  # of a tie fp32 may think otherwise
    got, expected = round_trip(Quantize(bits), x).double(), -1.5 + 4 * exact.round() / levels
    assert (got - expected)[sure].abs().max() < 1e-6 and sure.double().mean() > 0.99
    assert len(got.unique()) == 2**bits


@pytest.mark.parametrize("bits", range(1, 9))
def test_maxabs_code_book_is_symmetric(bits):
    """2^b levels without zero up to 3 bits, 2^b − 1 with it above."""
    x = torch.linspace(-2, 2, 4001)
    book = round_trip(Quantize(bits, mode="maxabs"), x).unique()
    assert torch.equal(book, -book.flip(0)) and book[-1] == 2
    assert len(book) == (2**bits if bits <= 3 else 2**bits - 1)
    assert (0 in book) == (bits > 3)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("scale", SCALES)
def test_relu_zeros_stay_zero_above_three_bits(bits, scale):
    x = torch.relu(torch.randn(4, 6, 5, 5))
    y = round_trip(Quantize(bits, scale, mode="maxabs"), x)
    assert not y[x == 0].any()
    assert not round_trip(Quantize(bits, "sample"), x)[x == 0].any()  # min-max: zero is the low end


@pytest.mark.parametrize("compressor", [Quantize(b, rounding="stochastic") for b in (1, 2, 4, 8)])
@pytest.mark.parametrize("mode", ["minmax", "maxabs"])
def test_stochastic_rounding_is_unbiased(compressor, mode):
    """E x̂ = x inside the range: 20,000 copies of each number, 5 standard deviations."""
    compressor = Quantize(compressor.bits, mode=mode, rounding="stochastic")
    points = torch.tensor([-1.0, -0.77, -0.5, 0.013, 0.3, 0.999, 1.0])
    copies = 20_000
    x = points.repeat(copies, 1)
    y = round_trip(compressor, x, seed=5).double()
    deviation = y.std(dim=0) / copies**0.5
    assert ((y.mean(dim=0) - points.double()).abs() <= 5 * deviation + 1e-6).all()
    if compressor.bits <= 4:  # it did round up and down
        assert (y.std(dim=0)[1:5] > 0).all()


def test_nearest_rounding_is_biased_where_stochastic_is_not():
    """The test above can tell the two apart."""
    x = torch.cat([torch.tensor([0.0, 1.0]), torch.full((5000,), 0.2)])
    assert round_trip(Quantize(1), x)[2:].mean() == 0
    mean = round_trip(Quantize(1, rounding="stochastic"), x)[2:].mean()
    assert abs(mean - 0.2) < 5 * (0.2 * 0.8 / 5000) ** 0.5


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.3, -7.0, 1e-30])
def test_a_constant_arrives_as_it_is(scale, value):
    """No range to divide by. Exact with an fp32 scale; else within bf16's rounding."""
    x = torch.full((3, 4, 5), value)
    tolerance = 0 if scale == "tensor" else 2**-7
    torch.testing.assert_close(
        round_trip(Quantize(4, scale, "minmax"), x), x, rtol=tolerance, atol=0
    )


def test_one_outlier_costs_its_own_group_alone():
    """What scales per sample, channel and group are for."""
    x = torch.randn(4, 6, 8, 8)
    x[1, 2, 3, 4] = 1000
    for scale, clean in (("sample", x[0]), ("channel", x[:, 0]), (64, x[0])):
        y = round_trip(Quantize(4, scale), x)
        arrived = y[:, 0] if scale == "channel" else y[0]
        assert (arrived - clean).norm() < 0.2 * clean.norm(), scale
    assert (round_trip(Quantize(4), x)[0] - x[0]).norm() > 0.5 * x[0].norm()


def test_padding_of_the_last_group_does_not_widen_its_range():
    x = torch.cat([torch.randn(128), torch.full((3,), 5.0)])
    y = round_trip(Quantize(2, scale=128, mode="minmax"), x)
    torch.testing.assert_close(y[128:], x[128:], rtol=2**-7, atol=0)


def test_scales_per_channel_follow_the_channel_dimension():
    """dim 1 of images, the last dimension of sequences."""
    image, sequence = torch.randn(2, 3, 4, 5), torch.randn(2, 7, 6)
    assert Quantize(4, "channel").compress(image)[0].shape == (3,)
    assert Quantize(4, "channel").compress(sequence)[0].shape == (6,)
    assert Quantize(4, "sample").layout(TensorMeta((9, 5)))[0].shape == (9,)
    assert Quantize(4, 7).layout(TensorMeta((9, 5)))[0].shape == (7,)


def test_scales_per_token_are_those_of_the_innermost_dimension_in_memory():
    """A hidden vector of a sequence; the channels of a pixel of a channels-last image."""
    compressor = Quantize(4, "token")
    sequence = torch.randn(2, 7, 6)
    sequence[1, 3] *= 1000
    y = round_trip(compressor, sequence)
    others = torch.ones(2, 7, dtype=torch.bool)
    others[1, 3] = False
    assert compressor.compress(sequence)[0].shape == (14,)
    assert (y - sequence)[others].norm() < 0.2 * sequence[others].norm()

    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    pixels = image.permute(0, 2, 3, 1).contiguous()
    assert compressor.layout(TensorMeta.of(image))[0].shape == (2 * 4 * 5,)
    arrived = round_trip(compressor, image)
    assert same_bits(arrived.permute(0, 2, 3, 1), round_trip(compressor, pixels))


def test_a_token_has_one_number_unless_two_are_asked_for():
    """bf16 each, beside 4 bits an element."""
    meta = TensorMeta((2, 7, 64))
    assert Quantize(4, "token").wire_bytes(meta) == 14 * (2 + 32)
    assert Quantize(4, "token", "minmax").wire_bytes(meta) == 14 * (4 + 32)


def test_the_generator_decides_the_noise():
    x = torch.randn(1000)
    compressor = Quantize(2, rounding="stochastic")
    assert same_bits(round_trip(compressor, x, 1), round_trip(compressor, x, 1))
    assert not same_bits(round_trip(compressor, x, 1), round_trip(compressor, x, 2))
    assert same_bits(Quantize(2).compress(x)[-1], Quantize(2).compress(x, drawn(9))[-1])


@pytest.mark.parametrize("bits", [0, 9, -1, 2.5, "4"])
def test_bits_outside_1_to_8(bits):
    with pytest.raises(ValueError, match=f"bits={bits}.*1 to 8"):
        Quantize(bits)


def test_bad_settings():
    with pytest.raises(ValueError, match="scale='row'.*'tensor', 'sample', 'channel', 'token'"):
        Quantize(4, "row")
    with pytest.raises(ValueError, match="scale=0"):
        Quantize(4, 0)
    with pytest.raises(ValueError, match="mode='absmax'.*minmax, maxabs"):
        Quantize(4, mode="absmax")
    with pytest.raises(ValueError, match="rounding='up'.*nearest, stochastic"):
        Quantize(4, rounding="up")
