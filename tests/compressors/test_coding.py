"""The coding of one tensor: two ends that make it alike understand each other by the payload."""

from functools import partial

import pytest
import torch
from methods import COMPRESSORS, same_bits

from mpcomp import TensorMeta
from mpcomp.compressors.base import Coding, Selecting
from mpcomp.core.randomness import generator_for
from mpcomp.core.wire import aligned_length, pack

CODERS = [c for c in COMPRESSORS if not c.variable_length]
META = TensorMeta((1, 600))


def coding_of(compressor):
    return Coding(compressor, META, partial(generator_for, "coding", str(compressor)))


@pytest.mark.parametrize("compressor", CODERS, ids=str)
def test_an_equal_coding_decodes_what_stands_among_others(compressor):
    x = torch.randn(META.shape, generator=torch.Generator().manual_seed(1))
    here, there = coding_of(compressor), coding_of(compressor)
    sent = [here.encode(x), here.encode(x.flip(1))]
    buffer = pack(encoded.payload for encoded in sent)
    assert buffer.numel() == aligned_length([*here.layout, *here.layout])
    start = 0
    for encoded in sent:
        payload, start = there.unpack(buffer, start)
        assert all(map(same_bits, payload, encoded.payload))
        assert same_bits(there.decompress(payload), here.decompress(encoded.payload))
        assert encoded.num_bytes == compressor.wire_bytes(META)
    assert start <= buffer.numel()


@pytest.mark.parametrize("compressor", CODERS, ids=str)
def test_what_is_left_and_what_was_said_are_the_tensor(compressor):
    y = torch.randn(META.numel, generator=torch.Generator().manual_seed(2))
    encoded = coding_of(compressor).encode(y.reshape(META.shape))
    left = encoded.without(y)
    said = encoded.coding.decompress(encoded.payload).reshape(-1)
    torch.testing.assert_close(left + said, y)
    positions = encoded.coding.positions(encoded.payload)
    assert (positions is None) == (not isinstance(compressor, Selecting))
    if encoded.positions is not None:
        assert torch.equal(positions, encoded.positions)
