"""The flat message: header, alignment, length known beforehand, nothing lost."""

from dataclasses import dataclass

import pytest
import torch
from everyday import slow_but_one_a_class
from hypothesis import given
from hypothesis import strategies as st
from methods import COMPRESSORS, drawn, same_bits

from mpcomp import TensorMeta
from mpcomp.compressors import Compressor
from mpcomp.core.wire import (
    CHECKED_HEADER_BYTES,
    COMPRESSED,
    DENSE,
    HEADER_BYTES,
    LONG_HEADER_BYTES,
    Form,
    Header,
    layout_check,
    status_of,
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
    message = Form(()).frame(header, ())
    assert message.dtype == torch.uint8 and message.numel() == HEADER_BYTES == 16
    again = Header.of(message)
    assert again == Header(kind, status, check, step % 2**32, ratio)
    assert status_of(message) == status and message[3] == 0 and again.length is None
    message = Form(()).frame(header, (), 1 - status)
    assert Header.of(message) == Header(kind, 1 - status, check, step % 2**32, ratio)


def test_the_bits_of_a_header_stay_as_they_are():
    """Ranks of two versions of the library talk to each other as long as this holds."""
    message = Form(()).frame(Header(COMPRESSED, 1, 0x01020304, 5, 10.0), ())
    assert bytes(message.tolist()).hex() == "0301010004030201050000000000" + "2041"


def test_the_status_is_a_view_and_takes_a_flag_of_the_device():
    form = Form((TensorMeta((4,)),))
    message = form.frame(Header(COMPRESSED), (torch.ones(4),), torch.tensor(True))
    status = status_of(message)
    assert status == 1 and status.dim() == 0 and Header.of(message).status == 1
    message[2] = 0
    assert status == 0


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
def test_payload_comes_back_and_the_length_is_known(compressor, dtype):
    """Law 2: the message is as long as the layout says, or at most, at odd sizes too."""
    variable = compressor.variable_length
    for shape in ((3, 17), (5,), (2, 3, 5, 3)):
        x = torch.randn(shape).to(dtype)
        form = Form(compressor.layout(TensorMeta.of(x)), variable=variable)
        payload = compressor.compress(x, drawn())
        message = form.frame(Header(COMPRESSED), payload)
        most = form.num_bytes
        assert message.numel() <= most if variable else message.numel() == most
        again = form.payload(message)
        assert all(same_bits(a, b) for a, b in zip(again, payload, strict=True))
        assert compressor.wire_bytes(TensorMeta.of(x)) <= most - HEADER_BYTES


def test_parts_are_aligned_and_the_gaps_are_zero():
    """Views of wider types need aligned offsets; equal payloads are equal messages."""
    payload = (torch.ones(3, dtype=torch.uint8), torch.ones(1, dtype=torch.float64))
    form = Form(tuple(map(TensorMeta.of, payload)))
    messages = [form.frame(Header(COMPRESSED), payload) for _ in range(3)]
    assert all(torch.equal(message, messages[0]) for message in messages)
    assert messages[0].numel() == 16 + 8 + 8 and not messages[0][19:24].any()


def test_odd_strides_are_framed():
    """One element of a larger tensor is contiguous and yet has a stride."""
    part = torch.arange(6.0).reshape(3, 2)[:1, 0]
    strided = torch.arange(6.0)[::2]
    for tensor, values in ((part, [0]), (strided, [0, 2, 4])):
        form = Form((TensorMeta.of(tensor),))
        assert form.payload(form.frame(Header(DENSE), (tensor,)))[0].tolist() == values


@pytest.mark.parametrize("change", [-1, 1])
def test_a_message_of_another_length_is_refused(change):
    form = Form((TensorMeta((10,)),))
    with pytest.raises(
        RuntimeError, match=f"message of {56 + change} bytes where 56 were expected"
    ):
        form.payload(torch.zeros(56 + change, dtype=torch.uint8))


# -- messages whose length is known only after coding ---------------------------------------------


@dataclass(frozen=True)
class NonZeros(Compressor):
    """Small whole numbers, without the zeros at the end."""

    variable_length = True

    def layout(self, meta):
        return (TensorMeta((1,), torch.float64), TensorMeta((meta.numel,), torch.uint8))

    def compress(self, x, generator=None):
        flat = TensorMeta.of(x).flatten(x).reshape(-1)
        end = int(flat.nonzero().max()) + 1 if flat.any() else 0
        return (flat.sum().double().reshape(1), flat[:end].to(torch.uint8))

    def decompress(self, payload, meta, generator=None):
        flat = torch.zeros(meta.numel, dtype=meta.dtype)
        flat[: payload[-1].numel()] = payload[-1].to(meta.dtype)
        assert flat.sum() == payload[0]
        return meta.unflatten(flat)


def sent(x: torch.Tensor) -> tuple[torch.Tensor, Form]:
    """The message of ``x``, and the form that its receiver knows."""
    form = Form(NonZeros().layout(TensorMeta.of(x)), variable=True)
    return form.frame(Header(COMPRESSED, step=7), NonZeros().compress(x)), form


@pytest.mark.parametrize("end", [0, 1, 5, 12])
def test_a_message_is_as_long_as_it_turned_out(end):
    """Also read from the larger buffer that was posted for it, whose rest is something stale."""
    x = torch.arange(1.0, 13.0).masked_fill_(torch.arange(12) >= end, 0).reshape(3, 4)
    message, form = sent(x)
    most = form.num_bytes
    assert message.numel() == LONG_HEADER_BYTES + 8 + end == most - (12 - end)
    assert Header.of(message) == Header(COMPRESSED, step=7)
    assert Header.of(message).length == message.numel()
    posted = torch.full((most,), 255, dtype=torch.uint8)
    posted[: message.numel()] = message
    for arrived in (message, posted):
        payload = form.payload(arrived)
        assert [part.numel() for part in payload] == [1, end]
        assert torch.equal(NonZeros().decompress(payload, TensorMeta.of(x)), x)


def changed(message: torch.Tensor, length: int) -> torch.Tensor:
    wrong = message.clone()
    wrong[HEADER_BYTES:LONG_HEADER_BYTES] = torch.tensor([*length.to_bytes(8, "little")])
    return wrong


def test_a_length_that_cannot_be_is_refused():
    x = torch.ones(3, 4)
    message, form = sent(x)
    for arrived, words in [
        (message[:-1], "message of 43 bytes that says it has 44: it was cut short"),
        (message[:31], "message of 31 bytes where 32 to 44 were expected"),
        (message[:5], "message of 5 bytes where 32 to 44 were expected"),
        (torch.cat([message, message]), "message of 88 bytes where 32 to 44 were expected"),
        (changed(message, 45), "says it has 45 bytes where 32 to 44 were expected"),
        (changed(message, 31), "says it has 31 bytes where 32 to 44 were expected"),
        (changed(message, 2**63), "says it has 9223372036854775808 bytes where 32 to 44"),
        (
            Form((TensorMeta((5,)),)).frame(Header(COMPRESSED), (torch.ones(5),)),
            "does not say its length",
        ),
    ]:
        with pytest.raises(RuntimeError, match=words):
            form.payload(arrived)


def test_a_message_that_varies_is_no_message_of_one_length():
    message, form = sent(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="message of 44 bytes where 36 were expected"):
        Form(form.layout).payload(message)


# -- messages with a sum over their bits -----------------------------------------------------------


def checked(payload, variable):
    form = Form(tuple(map(TensorMeta.of, payload)), variable=variable, checked=True)
    return form.frame(Header(COMPRESSED, step=7), payload, 1)


@pytest.mark.parametrize("variable", [False, True])
def test_each_bit_of_a_checked_message_counts(variable):
    payload = NonZeros().compress(torch.arange(1.0, 6.0))
    layout = NonZeros().layout(TensorMeta((8,)))
    if not variable:
        layout = (*layout[:1], TensorMeta.of(payload[1]))
    message, form = checked(payload, variable), Form(layout, variable=variable, checked=True)
    assert message.numel() == CHECKED_HEADER_BYTES + 8 + 5 == 45
    assert message[3] == 3 and Header.of(message) == Header(COMPRESSED, 1, step=7, checked=True)
    assert form.num_bytes == (48 if variable else 45)
    room = torch.cat([message, torch.full((50,), 77, dtype=torch.uint8)])
    for arrived in (message, room):  # the buffer may be larger than any message that is due
        found = form.payload(arrived)
        assert all(same_bits(a, b) for a, b in zip(found, payload, strict=True))
    for place in range(message.numel()):
        for bit in range(8):
            other = room.clone()
            other[place] ^= 1 << bit
            with pytest.raises(RuntimeError, match="bits do not add up|bytes where|its length"):
                form.payload(other)


@pytest.mark.parametrize("variable", [False, True])
def test_a_checked_message_that_was_cut_short_or_never_came(variable):
    payload = NonZeros().compress(torch.arange(1.0, 13.0))
    message = checked(payload, variable)
    form = Form(NonZeros().layout(TensorMeta((12,))), variable=variable, checked=True)
    for stale in (0, 255):
        for end in range(message.numel()):
            arrived = torch.full_like(message, stale)
            arrived[:end] = message[:end]
            if torch.equal(arrived, message):
                continue
            with pytest.raises(RuntimeError):
                form.payload(arrived)
            with pytest.raises(RuntimeError, match=f"message of {end} bytes"):
                form.payload(message[:end])


def test_a_checked_message_is_none_of_another_form():
    message, layout = checked((torch.ones(4),), False), (TensorMeta((4,)),)
    plain = Form((TensorMeta((8,)),)).frame(Header(COMPRESSED), (torch.ones(8),))
    assert message.numel() == plain.numel() == 48
    with pytest.raises(RuntimeError, match="48 bytes where 32 were expected"):
        Form(layout).payload(message)
    with pytest.raises(RuntimeError, match="does not say its length"):
        Form(layout, checked=True).payload(plain)


def test_layouts_of_one_length_have_different_checks():
    of_16_bytes = [
        (TensorMeta((4,)),),
        (TensorMeta((2, 2)),),
        (TensorMeta((4,), torch.int32),),
        (TensorMeta((2,)), TensorMeta((2,))),
        (TensorMeta((2,), torch.float64),),
    ]
    assert len({layout_check(layout) for layout in of_16_bytes}) == 5
    assert layout_check(of_16_bytes[0]) == layout_check((TensorMeta((4,)),))
