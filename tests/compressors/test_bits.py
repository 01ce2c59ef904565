"""Packing integers: sizes known beforehand, nothing lost, the same bytes on every path."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import run_anywhere
from methods import same_bits

from mpcomp.compressors import bits


def fields(width: int) -> list[int]:
    """Widths of the fields, low bits first: as many 8s as fit, then 4, 2, 1."""
    rest = width % 8
    return [8] * (width // 8) + [b for b in (4, 2, 1) if rest & b]


def packed_by_hand(values: list[int], width: int) -> list[int]:
    """The format written with Python's integers."""
    out, offset = [], 0
    for size in fields(width):
        codes = [(value >> offset) & ((1 << size) - 1) for value in values]
        stream = sum(code << (i * size) for i, code in enumerate(codes))
        out += stream.to_bytes(-(-len(values) * size // 8), "little")
        offset += size
    return out


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("width", [0, *range(1, 10), 13, 16, 21, 33, 40])
def test_packing_is_the_format_and_comes_back(width, accelerator, monkeypatch):
    """Bytes as in the module's text, for every width and a count that fills no byte."""
    if accelerator:
        run_anywhere(monkeypatch)
    for count in (0, 1, 3, 8, 19):
        values = torch.randint(0, 1 << width, (2, count)) if width else torch.zeros(2, count).long()
        packed = bits.pack(values, width)
        assert packed.dtype == torch.uint8
        assert packed.shape == (2, bits.packed_bytes(count, width))
        assert packed.tolist() == [packed_by_hand(row, width) for row in values.tolist()]
        again = bits.unpack(packed, width, count)
        assert again.dtype == (torch.uint8 if width <= 8 else torch.int64)
        assert torch.equal(again.long(), values)


@pytest.mark.parametrize("width", range(1, 9))
def test_bytes_can_be_packed_as_well_as_long_integers(width):
    values = torch.randint(0, 1 << width, (3, 21))
    before = values.clone()
    assert same_bits(bits.pack(values.to(torch.uint8), width), bits.pack(values, width))
    assert torch.equal(values, before)


@pytest.mark.parametrize("accelerator", [False, True])
def test_the_first_bool_is_the_lowest_bit(accelerator, monkeypatch):
    if accelerator:
        run_anywhere(monkeypatch)
    mask = torch.tensor([True, False, False, True, False, False, False, False, True])
    assert bits.pack_bools(mask).tolist() == [0b1001, 0b1]
    assert torch.equal(bits.unpack_bools(bits.pack_bools(mask), 9), mask)


@given(mask=st.lists(st.booleans(), max_size=70))
def test_bools_come_back(mask):
    x = torch.tensor(mask, dtype=torch.bool)
    packed = bits.pack_bools(x)
    assert packed.numel() == -(-len(mask) // 8)
    assert torch.equal(bits.unpack_bools(packed, len(mask)), x)
