"""The contract of selecting compressors: choosing, then taking; adding what was sent alone."""

import pytest
import torch
from everyday import slow_but_one_a_class
from methods import COMPRESSORS, FLOATS, SELECTING, drawn, round_trip, same_bits

from mpcomp import Cast, Quantize, RandomBlock, RandomK, SameSign, Sign, TensorMeta, TopK

SHAPES = [(), (1,), (1, 1), (1, 97), (4, 50), (0,), (0, 3)]


def flat_of(x: torch.Tensor) -> torch.Tensor:
    return TensorMeta.of(x).flatten(x).reshape(-1)


@pytest.mark.parametrize("selecting", SELECTING, ids=str)
def test_compress_is_choose_and_take(selecting):
    """Over the whole tensor, which between replicas is one row."""
    selecting = selecting.over_tensor()
    for shape in SHAPES:
        x = torch.randn(shape)
        flat = flat_of(x)
        one, two = drawn(3), drawn(3)
        positions = selecting.choose(flat, selecting.num_kept(flat.numel()), one)
        payload = selecting.take(x, positions, one)
        expected = selecting.compress(x, two)
        assert all(same_bits(a, b) for a, b in zip(payload, expected, strict=True)), shape
        meta = TensorMeta.of(x)
        assert torch.equal(selecting.indices(payload, meta, drawn(3)), positions)


@pytest.mark.each_once
@pytest.mark.parametrize("selecting", SELECTING, ids=str)
@pytest.mark.parametrize("k", [0, 1, 7, 40])
def test_a_choice_is_of_k_ascending_positions(selecting, k):
    positions = selecting.choose(torch.randn(40), k, drawn())
    assert positions.shape == (k,) and positions.dtype == torch.int64
    assert (positions[1:] > positions[:-1]).all() and ((positions >= 0) & (positions < 40)).all()


@pytest.mark.each_once
@pytest.mark.parametrize("selecting", SELECTING, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_decoded_values_stand_at_the_positions(selecting, dtype):
    x = torch.randn(3, 40).to(dtype)
    payload, meta = selecting.compress(x, drawn()), TensorMeta.of(x)
    positions = selecting.indices(payload, meta, drawn())
    values = selecting.decoded(payload, meta, drawn())
    assert values.dtype == dtype
    expected = torch.zeros(120, dtype=dtype).index_copy_(0, positions, values)
    assert same_bits(round_trip(selecting, x), expected.reshape(3, 40))


@pytest.mark.each_once
@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3, -2.0])
@pytest.mark.parametrize("shape", [(1, 97), (4, 50), (0,), (2, 3, 4, 5)], ids=str)
def test_add_to_adds_what_would_be_decoded(compressor, scale, shape):
    """total += scale * decompress(payload), product and sum rounded one by one."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(shape).to(dtype)
        if len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        meta, payload = TensorMeta.of(x), compressor.compress(x, drawn())
        total = torch.randn(meta.numel)
        expected = total + flat_of(round_trip(compressor, x)).float() * scale
        held = total
        compressor.add_to(held, payload, meta, drawn(), scale=scale)
        assert torch.equal(total, expected)  # in place


@pytest.mark.parametrize("selecting", SELECTING, ids=str)
def test_add_to_believes_the_positions_it_is_given(selecting):
    x = torch.randn(1, 60)
    meta, payload = TensorMeta.of(x), selecting.compress(x, drawn())
    positions = selecting.indices(payload, meta, drawn())
    with_them, without = torch.ones(60), torch.ones(60)
    selecting.add_to(with_them, payload, meta, scale=0.5, positions=positions)  # no generator
    selecting.add_to(without, payload, meta, drawn(), scale=0.5)
    assert same_bits(with_them, without)


def test_shares_choice_is_claimed_where_decoding_draws():
    """All others decode without a generator."""
    claims = [c for c in COMPRESSORS if c.shares_choice]
    names = {type(c).__name__ for c in claims}
    # MultiLevel and Rotate go round those that do.
    assert names == {"RandomK", "RandomBlock", "MultiLevel", "Rotate", "ECSQ"}
    x = torch.randn(4, 30)
    for compressor in COMPRESSORS:
        payload, meta = compressor.compress(x, drawn()), TensorMeta.of(x)
        if compressor.shares_choice:
            with pytest.raises(AssertionError, match="generator both ends share"):
                compressor.decompress(payload, meta)
        else:
            decoded = compressor.decompress(payload, meta)
            assert same_bits(decoded, round_trip(compressor, x))


def test_what_draws_nothing_needs_no_generator():
    """Without one, and with any, the same bytes; torch's own generator is not felt either."""
    x = torch.randn(4, 60)
    quiet = [compressor for compressor in COMPRESSORS if not compressor.draws]
    assert {"Cast", "Quantize", "TopK", "ECSQ", "Sign"} <= {type(c).__name__ for c in quiet}
    for compressor in quiet:
        assert not compressor.shares_choice
        found = []
        for seed, generator in enumerate([None, drawn(), torch.Generator().manual_seed(77)]):
            torch.manual_seed(seed)
            found.append(compressor.compress(x, generator))
        for payload in found[1:]:
            for part, first in zip(payload, found[0], strict=True):
                assert same_bits(part, first), compressor


def test_by_matrix_is_claimed_by_methods_of_columns_and_factors():
    assert {type(c).__name__ for c in COMPRESSORS if c.by_matrix} == {"LowRank", "OneBitColumns"}


def test_over_tensor_leaves_all_but_the_scope():
    assert TopK(0.1, values=Sign()).over_tensor() == TopK(0.1, scope="tensor", values=Sign())
    for compressor in (RandomK(0.1), RandomBlock(0.2, values=Cast("fp16")), SameSign(0.1)):
        assert compressor.over_tensor() == compressor


def test_num_kept_and_with_keep():
    assert TopK(0.1).num_kept(30) == 3 and TopK(0.001).num_kept(30) == 1
    assert TopK(0.1).num_kept(0) == 0
    changed = TopK(0.1, values=Quantize(8)).with_keep(0.5)
    assert changed == TopK(0.5, values=Quantize(8))
