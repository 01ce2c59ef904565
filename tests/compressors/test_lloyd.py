"""LloydMax: the published code books and errors, the nearest centroid, and a contraction always."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import round_trip
from test_quantize import SCALES, members
from torch import Tensor

from mpcomp import LloydMax, TensorMeta, parse
from mpcomp.compressors.lloyd import gaussian_centroids

#: Max 1960, table I: centroids above zero, and relative squared error, by bits.
PUBLISHED = {
    1: ([0.7979], 0.3634),
    2: ([0.4528, 1.5104], 0.1175),
    3: ([0.2451, 0.7560, 1.3439, 2.1520], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326], 0.009497),
}


@pytest.mark.parametrize("bits", PUBLISHED)
def test_centroids_are_the_published_ones(bits):
    above, _ = PUBLISHED[bits]
    found = gaussian_centroids(bits)
    assert found[len(above) :] == pytest.approx(above, abs=1e-4)
    assert found[: len(above)] == tuple(-c for c in reversed(found[len(above) :]))


@pytest.mark.parametrize("bits", range(1, 9))
def test_centroids_are_the_means_of_their_cells(bits):
    """The fixed point of Lloyd and Max, by the formula for the mean between two edges."""
    c = torch.tensor(gaussian_centroids(bits), dtype=torch.float64)
    assert len(c) == 2**bits and (c.diff() > 0).all()
    positive = c[len(c) // 2 :]  # the other half is its mirror image; tails by erfc keep precision
    edges = torch.tensor([0.0, *((positive[1:] + positive[:-1]) / 2), math.inf])
    density = torch.exp(-edges.double().square() / 2) / math.sqrt(2 * math.pi)
    above = torch.special.erfc(edges.double() / math.sqrt(2)) / 2
    torch.testing.assert_close(density.diff() / above.diff(), positive, rtol=0, atol=1e-8)


@pytest.mark.parametrize("bits", PUBLISHED)
@pytest.mark.parametrize("scale", ["token", "tensor", "sample", 512])
def test_error_on_gaussian_elements_is_the_published_one(bits, scale):
    x = torch.randn(256, 576) * 3
    error = (round_trip(LloydMax(bits, scale), x) - x).square().sum() / x.square().sum()
    assert error == pytest.approx(PUBLISHED[bits][1], rel=0.03)


@pytest.mark.parametrize("bits", range(1, 9))
def test_elements_go_to_the_nearest_centroid(bits):
    """All that arrives is s c, with the c nearest to x / rms: no other is nearer."""
    x = torch.randn(1, 5000, dtype=torch.float64).float()
    x[0, :4] = torch.tensor([0.0, -9.0, 9.0, 1e-20])
    y = round_trip(LloydMax(bits, "tensor"), x)
    centroids = torch.tensor(gaussian_centroids(bits), dtype=torch.float64)
    z = x.double() / x.double().square().mean().sqrt()
    distances = (z.reshape(-1, 1) - centroids).abs()
    least, nearest = distances.min(dim=1)
    c = centroids[nearest]
    scale = (x.double().reshape(-1) * c).sum() / c.square().sum()  # least squares
    book = centroids * scale
    taken = (y.double().reshape(-1, 1) - book).abs().argmin(dim=1)
    torch.testing.assert_close(y.double().reshape(-1), book[taken], rtol=1e-4, atol=1e-4)
    at_taken = distances.gather(1, taken[:, None])[:, 0]
    assert (at_taken <= least + 1e-4).all()  # of a tie fp32 may think otherwise
    assert (taken == nearest).double().mean() > 0.99


def assert_contracts(x: Tensor, compressor: LloydMax) -> None:
    """‖x − C(x)‖² = ‖x‖² − <x, c>² / ‖c‖² in each group, where C(x) is a multiple of c."""
    y = round_trip(compressor, x)
    coarse = 0.0 if compressor.scale == "tensor" else 2**-16  # the square of bf16's rounding
    for group in members(x, compressor.scale):
        a, b = x.reshape(-1)[group].double(), y.reshape(-1)[group].double()
        energy = a.square().sum()
        along = (a @ b).square() / b.square().sum() if b.any() else energy.new_zeros(())
        error = (a - b).square().sum()
        assert error <= energy * (1 + 1e-5)
        assert error <= energy - along + energy * (coarse + 1e-5)


@given(
    values=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=60),
    bits=st.integers(1, 8),
    scale=st.sampled_from(SCALES),
)
def test_contracts_whatever_the_numbers(values, bits, scale):
    x = torch.tensor(values)
    largest = x.abs().max()
    if 0 < largest < 2.0**-60:  # squares and scales above the denormals of fp32 and bf16
        x = x / largest
    assert_contracts(x.reshape(1, -1), LloydMax(bits, scale))


@pytest.mark.parametrize("bits", range(1, 9))
def test_contracts_where_the_source_is_nothing_like_a_gaussian(bits):
    """With the rms for a scale, the error of these would be up to ten times what there is."""
    outlier = torch.zeros(1, 4096)
    outlier[0, 7] = 50
    signs = torch.where(torch.rand(3, 100) < 0.5, -1.0, 1.0)
    for x in (outlier, outlier + torch.randn(4096) / 1000, signs, torch.ones(2, 30)):
        assert_contracts(x, LloydMax(bits))


@pytest.mark.parametrize("scale", SCALES)
def test_a_constant_arrives_as_it_is(scale):
    x = torch.full((3, 4, 5), -7.0)
    torch.testing.assert_close(round_trip(LloydMax(4, scale), x), x, rtol=2**-8, atol=0)


def test_padding_of_the_last_group_weighs_nothing():
    x = torch.randn(1, 131)
    last = round_trip(LloydMax(3, 128), x)[0, 128:]
    torch.testing.assert_close(last, round_trip(LloydMax(3, 3), x[:, 128:])[0])


def test_sizes():
    """b bits an element, and a bf16 number a token or an fp32 one for the tensor."""
    meta = TensorMeta((2, 7, 64))
    assert LloydMax(3).wire_bytes(meta) == 14 * (2 + 24)
    assert LloydMax(2, "tensor").wire_bytes(meta) == 4 + 14 * 16


def test_spec():
    assert parse("lloyd:3") == LloydMax(3) == LloydMax(3, "token")
    assert parse("lloyd:2:scale=128") == LloydMax(2, 128)
    assert parse("ef+lloyd:1").inner == LloydMax(1)
    assert LloydMax(3).with_cf(16.0) == LloydMax(2)


@pytest.mark.parametrize("bits", [0, 9, -1, 2.5, "4"])
def test_bits_outside_1_to_8(bits):
    with pytest.raises(ValueError, match=f"bits={bits}.*1 to 8"):
        LloydMax(bits)


def test_bad_settings():
    with pytest.raises(ValueError, match="scale='row'.*'token'"):
        LloydMax(4, "row")
    with pytest.raises(ValueError, match="scale=0"):
        LloydMax(4, 0)
    with pytest.raises(ValueError, match="bits=9"):
        parse("lloyd:9")
