"""The sum over raw bits: the same for the same bits, another for any others."""

import itertools

import pytest
import torch

from mpcomp.core.bit_sum import bit_sum

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.bool,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
]
BLOCK_BYTES = 8 << 14


def of(x):
    return int(bit_sum(x))


def test_it_is_the_same_on_every_machine():
    """Ranks compare it, so nothing in it may depend on versions or processors."""
    assert of(torch.arange(1000)) == -6291276022937679042
    assert of(torch.tensor([1, 2, 3], dtype=torch.uint8)) == 4784804314924096618


@pytest.mark.parametrize("length", [24, 7])
def test_each_bit_and_each_pair_of_bits_counts(length):
    """The highest bits too, of which a product of 64 bits keeps least."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
    places = [(i, 1 << bit) for i in range(length) for bit in (0, 3, 7)]
    found = {of(x)}
    for i, bit in places:
        x[i] ^= bit
        found.add(of(x))
        x[i] ^= bit
    assert len(found) == 1 + len(places)
    for (i, bit), (j, other) in itertools.combinations(places, 2):
        x[i] ^= bit
        x[j] ^= other
        found.add(of(x))
        x[i] ^= bit
        x[j] ^= other
    assert len(found) == 1 + len(places) + len(places) * (len(places) - 1) // 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_are_bits(dtype):
    x = torch.tensor([0, 1, 1, 0, 1, 1, 1]).to(dtype)
    assert of(x) == of(x.view(torch.uint8))
    assert of(x) != of(x.roll(1)) and of(x[0]) != of(x[1])


@pytest.mark.parametrize(
    "length", [0, 1, 7, 8, 9, BLOCK_BYTES - 3, BLOCK_BYTES, 3 * BLOCK_BYTES + 21]
)
def test_lengths_positions_and_zeros_count(length):
    generator = torch.Generator().manual_seed(length)
    x = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
    assert of(x) == of(x.clone())
    assert of(torch.cat([x, torch.zeros(1, dtype=torch.uint8)])) != of(x)
    if length > 1:
        turned = x.roll(1)
        assert torch.equal(turned, x) or of(turned) != of(x)
        assert of(x.flip(0)) != of(x)
    for place in {0, length // 2, length - 1} if length else set():
        other = x.clone()
        other[place] ^= 128
        assert of(other) != of(x)


def test_whole_blocks_that_change_places():
    x = torch.arange(4 * (1 << 14))
    y = x.reshape(4, -1).flip(0).reshape(-1)
    assert of(x) != of(y)


def test_memory_is_no_part_of_it():
    x = torch.randn(4, 6, 5, 3)
    padded = torch.zeros(1 + x.nbytes, dtype=torch.uint8)
    padded[1:] = x.reshape(-1).view(torch.uint8)
    for same in (x.contiguous(memory_format=torch.channels_last), torch.stack([x, x], -1)[..., 0]):
        assert of(same) == of(x)
    assert of(padded[1:]) == of(x)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 5, BLOCK_BYTES + 13, 2000 * BLOCK_BYTES + 1])
def test_the_device_is_no_part_of_it(length):
    x = torch.randint(0, 256, (length,), dtype=torch.uint8)
    assert of(x.cuda()) == of(x)
