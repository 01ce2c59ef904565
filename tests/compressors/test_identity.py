"""Identity, and sending dense what would not shrink."""

import warnings

import pytest
import torch
from methods import COMPRESSORS, FLOATS, round_trip, same_bits

from mpcomp import Cast, Identity, Quantize, TensorMeta, TopK
from mpcomp.compressors.base import or_dense


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_arrives(dtype):
    x = torch.randn(3, 4, 5, 6).to(dtype)
    x[0, 0, 0] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0]).to(dtype)
    for y in (x, x.contiguous(memory_format=torch.channels_last), x[..., ::2]):
        assert same_bits(round_trip(Identity(), y), y)
    assert Identity().wire_bytes(TensorMeta.of(x)) == x.numel() * x.element_size()


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_dense_exactly_where_it_would_not_shrink(compressor):
    """Both ends decide from meta alone; what is never smaller is never sent compressed.

    What varies in length may turn out smaller, and goes compressed.
    """
    for meta in (TensorMeta((1,)), TensorMeta((2, 3)), TensorMeta((4, 512), torch.bfloat16)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen = or_dense(compressor, meta)
        shrinks = compressor.variable_length or compressor.wire_bytes(meta) < meta.dense_bytes
        assert chosen == (compressor if shrinks else Identity())


def test_says_so_once():
    """Python's own filter folds the repeats of one message."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            or_dense(Cast("bf16"), TensorMeta((2, 3), torch.bfloat16))
            or_dense(Identity(), TensorMeta((2, 3)))
            or_dense(TopK(0.1), TensorMeta((2, 300)))
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1
    assert (
        "bf16 would not shrink [2, 3] torch.bfloat16" in texts[0] and "12 of 12 bytes" in texts[0]
    )


def test_a_tensor_of_one_element_is_no_smaller_in_four_bits():
    with pytest.warns(UserWarning, match="would not shrink"):
        assert or_dense(Quantize(4), TensorMeta((1,))) == Identity()
