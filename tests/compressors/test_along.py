"""Components along vectors that both ends know: without them a tensor is orthogonal to these."""

import pytest
import torch
from methods import same_bits

from mpcomp import ECSQ, Cast, TensorMeta
from mpcomp.compressors.along import AlongVectors

SHAPES = [(3, 7, 12), (5, 8), (2, 6, 3, 4), (9,)]
VALUES = [Cast("fp32"), ECSQ(1.0)]


def dot(a, b):
    """<a, b> of each vector along the channels, in fp64."""
    dim = 1 if a.dim() >= 4 else -1
    return (a.double() * b.double()).sum(dim)


@pytest.mark.parametrize("values", VALUES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_left_is_orthogonal_to_the_vectors(shape, values):
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(shape, generator=generator) for _ in range(2))
    along = AlongVectors(lambda: 1e-6 * g, values)
    meta = TensorMeta.of(x)
    sent = along.decompress(along.compress(x), meta)
    assert sent.shape == x.shape and sent.dtype == x.dtype
    before, after = dot(x, g), dot(x - sent, g)
    # ECSQ's scales are quarters of an octave: a number is right to a factor of 2^(1/8).
    bound = 1e-5 if values == VALUES[0] else 2**0.125 - 1 + 1e-5
    assert (after.abs() <= bound * before.abs() + 1e-5).all()
    across = x - sent - dot(x - sent, g).div(dot(g, g)).unsqueeze(1 if x.dim() >= 4 else -1) * g
    whole = x - dot(x, g).div(dot(g, g)).unsqueeze(1 if x.dim() >= 4 else -1) * g
    torch.testing.assert_close(across, whole, atol=1e-5, rtol=1e-5)  # nothing else is touched


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_without_a_vector_nothing_is_said(values):
    x, g = torch.randn(4, 6), torch.randn(4, 6)
    g[1] = 0
    along = AlongVectors(lambda: g, values)
    sent = along.decompress(along.compress(x), TensorMeta.of(x))
    assert sent[1].eq(0).all() and sent[[0, 2, 3]].ne(0).any()


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_is_finite_whatever_the_vectors(dtype, scale):
    x = torch.randn(5, 8).mul(100).to(dtype)
    g = torch.randn(5, 8) * scale
    along = AlongVectors(lambda: g, ECSQ(1.0))
    sent = along.decompress(along.compress(x), TensorMeta.of(x))
    assert sent.dtype == dtype and sent.isfinite().all()
    vast = AlongVectors(lambda: torch.full((5, 8), 3e38), Cast("fp32"))
    payload = (torch.full((5, 1), 3e38),)  # of a damaged message
    assert vast.decompress(payload, TensorMeta.of(x)).isfinite().all()


def test_vectors_are_asked_for_when_they_are_needed():
    """A receiver plans all messages of a step at once, and must not hold vectors of all."""
    asked = []

    def vectors():
        asked.append(1)
        return torch.ones(3, 4)

    along = AlongVectors(vectors, ECSQ(1.0))
    meta = TensorMeta((3, 4))
    along.layout(meta), along.wire_bytes(meta), str(along)
    assert not asked
    payload = along.compress(torch.ones(3, 4))
    assert same_bits(along.decompress(payload, meta), torch.ones(3, 4))
    assert len(asked) == 2


@pytest.mark.parametrize("values", [*VALUES, Cast("bf16")], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sender_knows_what_its_message_says(shape, values):
    """Bit for bit what the receiver finds, for one look at the vectors."""
    asked = []
    g = torch.randn(shape)

    def vectors():
        asked.append(1)
        return g

    x, along = torch.randn(shape), AlongVectors(vectors, values)
    meta = TensorMeta.of(x)
    payload, said = along.round_trip(x, x, meta, torch.Generator)
    assert len(asked) == 1
    assert all(same_bits(a, b) for a, b in zip(payload, along.compress(x), strict=True))
    assert same_bits(said, along.decompress(payload, meta))
