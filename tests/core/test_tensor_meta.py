"""TensorMeta: shape, dtype and memory order, and flattening in that order."""

import pytest
import torch
from methods import same_bits

from mpcomp import TensorMeta

SHAPES = [
    (),
    (0,),
    (7,),
    (3, 5),
    (3, 0),
    (0, 5),
    (2, 3, 4),
    (2, 3, 4, 5),
    (1, 3, 1, 5),
    (2, 1, 4, 4),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flattening_comes_back_with_the_memory_order(shape):
    x = torch.randn(shape)
    orders = [x, x.transpose(0, -1) if len(shape) > 1 else x]
    if len(shape) == 4:
        orders.append(x.contiguous(memory_format=torch.channels_last))
    for one in orders:
        meta = TensorMeta.of(one)
        flat = meta.flatten(one)
        assert flat.shape == (meta.num_rows, meta.row_numel) and flat.is_contiguous()
        again = meta.unflatten(flat)
        assert same_bits(again, one)
        assert TensorMeta.of(again) == meta


def test_channels_last_is_only_what_is_not_contiguous_as_well():
    """Sizes of one make both orders true; the plain one is taken then, on both ends."""
    x = torch.randn(2, 3, 4, 5)
    assert TensorMeta.of(x.contiguous(memory_format=torch.channels_last)).channels_last
    assert not TensorMeta.of(x).channels_last
    for shape in ((2, 1, 4, 5), (2, 3, 1, 1)):
        y = torch.randn(shape).contiguous(memory_format=torch.channels_last)
        assert not TensorMeta.of(y).channels_last


def test_flattening_dense_tensors_copies_nothing():
    for x in (torch.randn(2, 3, 4, 5), torch.randn(6)):
        assert TensorMeta.of(x).flatten(x).data_ptr() == x.data_ptr()
    y = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    flat = TensorMeta.of(y).flatten(y)
    assert flat.data_ptr() == y.data_ptr()
    assert torch.equal(flat[0, :3], y[0, :, 0, 0])  # channels lie side by side


def test_sizes():
    meta = TensorMeta((4, 3, 5), torch.bfloat16)
    assert (meta.numel, meta.num_rows, meta.row_numel, meta.last_dim) == (60, 4, 15, 5)
    assert meta.dense_bytes == 120 and meta.with_dtype(torch.float32).dense_bytes == 240
    assert meta.with_rows(2).shape == (2, 3, 5)
    scalar = TensorMeta(())
    assert (scalar.numel, scalar.num_rows, scalar.row_numel, scalar.last_dim) == (1, 1, 1, 1)
    assert scalar.with_rows(3) == scalar
    assert TensorMeta((2, 3, 4, 5), channels_last=True).last_dim == 3
