"""The flat message: header, alignment, length known beforehand, nothing lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import COMPRESSORS, drawn, same_bits

from mpcomp import TensorMeta
from mpcomp.core.message import (
    COMPRESSED,
    DENSE,
    HEADER_BYTES,
    Header,
    frame,
    message_bytes,
    unframe,
)


@given(
    kind=st.sampled_from([DENSE, COMPRESSED]),
    status=st.integers(0, 1),
    check=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**40),
    ratio=st.floats(0, 1, width=32),
)
def test_header_comes_back_in_sixteen_bytes(kind, status, check, step, ratio):
    header = Header(kind, status, check, step, ratio)
    message = frame(header, ())
    assert message.dtype == torch.uint8 and message.numel() == HEADER_BYTES == 16
    again = Header.of(message)
    assert again == Header(kind, status, check, step % 2**32, ratio)
    assert message[2] == status  # where links write it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_payload_comes_back_and_the_length_is_known(compressor, dtype):
    """Law 2: the message is as long as the layout says, at odd sizes too."""
    for shape in ((3, 17), (5,), (2, 3, 5, 3)):
        x = torch.randn(shape).to(dtype)
        layout = compressor.layout(TensorMeta.of(x))
        payload = compressor.compress(x, drawn())
        message = frame(Header(COMPRESSED), payload)
        assert message.numel() == message_bytes(layout)
        again = unframe(message, layout)
        assert all(same_bits(a, b) for a, b in zip(again, payload, strict=True))
        assert compressor.wire_bytes(TensorMeta.of(x)) <= message.numel() - HEADER_BYTES


def test_parts_are_aligned_and_the_gaps_are_zero():
    """Views of wider types need aligned offsets; equal payloads are equal messages."""
    payload = (torch.ones(3, dtype=torch.uint8), torch.ones(1, dtype=torch.float64))
    messages = [frame(Header(COMPRESSED), payload) for _ in range(3)]
    assert all(torch.equal(message, messages[0]) for message in messages)
    assert messages[0].numel() == 16 + 8 + 8 and not messages[0][19:24].any()


def test_odd_strides_are_framed():
    """One element of a larger tensor is contiguous and yet has a stride."""
    part = torch.arange(6.0).reshape(3, 2)[:1, 0]
    layout = (TensorMeta((1,)),)
    assert unframe(frame(Header(DENSE), (part,)), layout)[0].item() == 0.0
    strided = torch.arange(6.0)[::2]
    assert unframe(frame(Header(DENSE), (strided,)), (TensorMeta((3,)),))[0].tolist() == [0, 2, 4]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_message_of_another_length_is_refused(change):
    layout = (TensorMeta((10,)),)
    with pytest.raises(
        RuntimeError, match=f"message of {56 + change} bytes where 56 were expected"
    ):
        unframe(torch.zeros(56 + change, dtype=torch.uint8), layout)
