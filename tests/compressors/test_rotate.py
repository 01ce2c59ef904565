"""Rotate: orthonormal for every width, the same bits in any batch; outliers cost others little."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import drawn, round_trip, same_bits
from torch import Tensor

from mpcomp import (
    EF21,
    Cast,
    ErrorFeedback,
    Identity,
    LloydMax,
    LowRank,
    OneBitColumns,
    Quantize,
    RandomK,
    Rotate,
    TensorMeta,
    TopK,
    parse,
)
from mpcomp.compressors.rotate import rotated, rotated_back
from mpcomp.core.randomness import generator_for, uniform

WIDTHS = [*range(1, 20), 37, 64, 100, 576, 577, 768, 1023, 1024]


def matrix(width: int, seed: int = 0) -> Tensor:
    """R [width, width] of the transform, in fp64."""
    return rotated(torch.eye(width), seed).T.double()


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of ones and minus ones, fp64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h


@pytest.mark.parametrize("width", WIDTHS)
def test_the_transform_is_orthonormal(width):
    r = matrix(width)
    torch.testing.assert_close(r @ r.T, torch.eye(width).double(), rtol=0, atol=1e-6)


@given(width=st.integers(1, 700), vectors=st.integers(0, 3), seed=st.integers(0, 9))
def test_back_is_the_inverse(width, vectors, seed):
    x = torch.randn(vectors, width)
    before = x.clone()
    there = rotated(x, seed)
    assert there.shape == x.shape and there.is_contiguous() and same_bits(x, before)
    torch.testing.assert_close(rotated_back(there, seed), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(there.norm(dim=1), x.norm(dim=1))


@pytest.mark.parametrize("width", [8192, 4096 + 5, 3 * 4096 + 77])
def test_rows_longer_than_the_largest_block(width):
    """Gradients between replicas have such rows: one of all elements."""
    x = torch.randn(2, width)
    there = rotated(x, 0)
    torch.testing.assert_close(rotated_back(there, 0), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(there.norm(dim=1), x.norm(dim=1))
    one = torch.zeros(1, width)
    one[0, -1] = 100
    assert rotated(one, 0).abs().max() < 10


@pytest.mark.parametrize("width", [1, 2, 16, 256])
def test_a_power_of_two_is_signs_and_a_hadamard_matrix(width):
    """R = H D / sqrt(d)."""
    r = matrix(width) * math.sqrt(width)
    signs = r[0].sign()  # H begins with a row of ones
    torch.testing.assert_close(r, hadamard(width) * signs, rtol=0, atol=1e-5)


def test_other_widths_have_two_overlapping_blocks():
    """R = [I 0; 0 H D'] [H D 0; 0 I]."""

    def block(index: int) -> Tensor:
        drawn = uniform(generator_for("rotate", 3, 8, index), 8, torch.device("cpu"))
        return hadamard(8) / math.sqrt(8) * torch.where(drawn < 0.5, -1.0, 1.0)

    eye = torch.eye(3, dtype=torch.float64)
    first, last = torch.block_diag(block(0), eye), torch.block_diag(eye, block(1))
    torch.testing.assert_close(matrix(11, seed=3), last @ first, rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [64, 100, 576, 768])
def test_any_one_element_is_spread(width):
    """Its square over at least half of the elements, whichever it is."""
    share = matrix(width).square()
    torch.testing.assert_close(share.sum(dim=0), torch.ones(width).double())
    assert share.max() < 40 / width
    assert ((share > 1e-9).sum(dim=0) > width / 2 - 1).all()


def test_signs_follow_from_the_seed_alone():
    x = torch.randn(5, 64)
    assert same_bits(rotated(x, 1), rotated(x, 1))
    assert not torch.equal(rotated(x, 1), rotated(x, 2))
    ends = [Rotate(LloydMax(3)).compress(x, generator) for generator in (None, drawn(1))]
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("width", [64, 576])
def test_a_row_has_the_same_bits_in_any_batch(width):
    """Sums and differences in a given order; those of matrix products depend on the batch."""
    x = torch.randn(33, width)
    for transform in (rotated, rotated_back):
        alone = torch.cat([transform(row.reshape(1, -1), 0) for row in x])
        assert same_bits(transform(x, 0), alone)


def test_vectors_are_those_of_the_innermost_dimension_in_memory():
    """A token's of a sequence, a pixel's of a channels-last image, all of a 1-d tensor."""
    coder = Rotate(Quantize(8, scale="token"))
    image = torch.randn(2, 12, 4, 5).contiguous(memory_format=torch.channels_last)
    pixels = image.permute(0, 2, 3, 1).contiguous()
    arrived = round_trip(coder, image)
    assert arrived.is_contiguous(memory_format=torch.channels_last)
    assert same_bits(arrived.permute(0, 2, 3, 1), round_trip(coder, pixels))
    assert same_bits(
        round_trip(coder, pixels), round_trip(coder, pixels.view(40, 12)).view(2, 4, 5, 12)
    )
    row = torch.randn(100)
    assert same_bits(round_trip(coder, row), round_trip(coder, row.view(1, -1)).view(-1))


@pytest.mark.parametrize(
    ("plain", "least", "most"),
    [(Quantize(4, scale="token"), 0.4, 0.1), (LloydMax(4), 0.1, 0.05), (Quantize(4), 2, 0.2)],
    ids=str,
)
def test_outlier_channels_cost_the_others_little(plain, least, most):
    """Three channels of 576 twenty times as large, the last one too."""
    x = torch.randn(256, 576)
    large = [5, 200, 575]
    x[:, large] *= 20
    others = torch.ones(576, dtype=torch.bool)
    others[large] = False

    def error(compressor):
        lost = (round_trip(compressor, x) - x)[:, others]
        return lost.square().sum() / x[:, others].square().sum()

    assert error(plain) > least
    assert error(Rotate(plain)) < most


@pytest.mark.parametrize(("bits", "expected"), [(1, 0.3634), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_lloyd_has_its_error_on_what_is_no_gaussian(bits, expected):
    """Laplacian elements, and a width that is no power of two."""
    x = torch.distributions.Laplace(0.0, 1.0).sample((256, 576))
    error = (round_trip(Rotate(LloydMax(bits)), x) - x).square().sum() / x.square().sum()
    assert error == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_arithmetic_is_fp32_whatever_the_dtype(dtype):
    """The largest of fp16, rotated, is beyond its range, and arrives within it."""
    x = torch.full((3, 64), torch.finfo(torch.float16).max).to(dtype)
    y = round_trip(Rotate(Quantize(8, scale="token")), x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), x.double(), rtol=0.03, atol=0)
    coder = Rotate(TopK(0.5))
    assert coder.layout(TensorMeta((3, 64), dtype))[0].dtype == torch.float32


INNER = [
    Quantize(4),
    Quantize(4, rounding="stochastic"),
    RandomK(0.2),
    RandomK(0.2, unbiased=True),
    TopK(0.1),
    Cast("bf16"),
    LowRank(1),
    OneBitColumns(),
]


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_it_can_do_what_the_inner_compressor_can(inner):
    rotate = Rotate(inner)
    for name in (
        "adaptable", "at_cuts", "between_replicas", "is_unbiased", "contractive", "summable",
        "by_matrix", "shares_choice", "draws", "variable_length",
    ):  # fmt: skip
        assert getattr(rotate, name) == getattr(inner, name), name
    assert not rotate.selects  # positions of rotated elements, which no other message may reuse
    assert rotate.wire_dtype is None
    meta = TensorMeta((7, 40), torch.float32)
    assert rotate.layout(meta) == inner.layout(meta)


def test_it_is_unbiased_where_the_inner_one_is():
    coder = Rotate(Quantize(3, scale="token", rounding="stochastic"))
    x = torch.randn(1, 40)
    draws = torch.cat([round_trip(coder, x, seed) for seed in range(1000)])
    deviation = draws.std(dim=0) / 1000**0.5
    # 6 standard deviations, and the rounding of a scale's end to bf16
    assert ((draws.mean(dim=0) - x[0]).abs() <= 6 * deviation + 0.01).all()


def test_spec():
    assert parse("rotate+quant:4:scale=token") == Rotate(Quantize(4, scale="token"))
    assert parse("rotate:seed=3+lloyd:3") == parse("rotate:3+lloyd:3") == Rotate(LloydMax(3), 3)
    assert str(Rotate(LloydMax(3), 3)) == "rotate:seed=3+lloyd:3"
    assert parse("ef21+rotate+lloyd:2") == EF21(Rotate(LloydMax(2)))
    assert parse("topk:0.1+rotate+lloyd:2") == TopK(0.1, values=Rotate(LloydMax(2)))
    assert Rotate(Quantize(4)).with_cf(16.0) == Rotate(Quantize(2))
    assert Rotate(Quantize(4)).cf_ladder(4, 16) == Quantize(4).cf_ladder(4, 16)


def test_bad_settings():
    with pytest.raises(TypeError, match=r"inner=ef\+topk:0.1.*compressor.*ef\+rotate\+lloyd:2"):
        Rotate(ErrorFeedback(TopK(0.1)))
    with pytest.raises(TypeError, match="inner='quant:4'.*compressor"):
        Rotate("quant:4")
    with pytest.raises(ValueError, match="inner=none.*gains nothing"):
        Rotate(Identity())
    for seed in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"seed={seed}.*whole number"):
            Rotate(Quantize(4), seed)
    with pytest.raises(ValueError, match="rotate needs inner"):
        parse("rotate")
    with pytest.raises(ValueError, match="unbiased=True inside feedback diverges"):
        parse("ef+rotate+randomk:0.1:unbiased=true")
