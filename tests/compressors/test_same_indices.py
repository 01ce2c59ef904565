"""SameIndices' wire: the elements at given positions, and nothing that says which."""

import pytest
import torch
from methods import same_bits

from mpcomp import EF21, Cast, Quantize, SameIndices, TensorMeta, TopK, parse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_at_the_positions_and_zeros_elsewhere(dtype):
    x = torch.randn(3, 40).to(dtype)
    positions = torch.tensor([0, 7, 41, 119])
    compressor = SameIndices().at(positions)
    meta = TensorMeta.of(x)
    payload = compressor.compress(x)
    assert [TensorMeta.of(part) for part in payload] == list(compressor.layout(meta))
    assert compressor.wire_bytes(meta) == 4 * dtype.itemsize  # no index bytes
    y = compressor.decompress(payload, meta)
    expected = torch.zeros(120, dtype=dtype)
    expected[positions] = x.reshape(-1)[positions]
    assert same_bits(y, expected.reshape(3, 40))


def test_positions_are_in_memory_order():
    x = torch.randn(2, 5, 3, 4).contiguous(memory_format=torch.channels_last)
    act = TopK(0.2)
    payload = act.compress(x)
    meta = TensorMeta.of(x)
    gradient = torch.randn_like(x)
    compressor = SameIndices().at(act.indices(payload, meta))
    arrived = compressor.decompress(compressor.compress(gradient), meta)
    kept = act.decompress(payload, meta) != 0
    assert torch.equal(arrived, torch.where(kept, gradient, torch.zeros(())))
    assert arrived.is_contiguous(memory_format=torch.channels_last)


def test_values_may_be_compressed_but_not_selected_again():
    positions = torch.arange(0, 100, 3)
    meta = TensorMeta((100,))
    assert SameIndices(Cast("fp16")).at(positions).wire_bytes(meta) == 2 * 34
    assert SameIndices(Quantize(8)).at(positions).wire_bytes(meta) == 8 + 34
    with pytest.raises(ValueError, match="cannot be selected again"):
        SameIndices(TopK(0.1))
    with pytest.raises(TypeError, match="takes? a compressor"):
        SameIndices(EF21(TopK(0.1)))
    with pytest.raises(ValueError, match="SameIndices knows sent, nonzero"):
        SameIndices(where="somewhere")


def test_positions_that_nothing_is_at():
    compressor = parse("same:where=nonzero+step:1:scale=tensor").at(
        torch.zeros(0, dtype=torch.int64)
    )
    x = torch.randn(3, 40)
    payload = compressor.compress(x)
    assert not compressor.decompress(payload, TensorMeta.of(x)).any()
