"""The code of ascending positions: it comes back, its size is known, and it is the cheapest."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import run_anywhere
from methods import same_bits

from mpcomp.compressors import bits
from mpcomp.compressors.bits import decode_indices, encode_indices, index_bytes


def assert_comes_back(positions: torch.Tensor, n: int) -> None:
    code = encode_indices(positions, n)
    assert code.dtype == torch.uint8 and code.shape == (index_bytes(n, positions.numel()),)
    again = decode_indices(code, n, positions.numel())
    assert again.dtype == torch.int64 and torch.equal(again, positions), (n, positions)


def test_every_subset_of_up_to_nine_positions_comes_back():
    for n in range(1, 10):
        for k in range(n + 1):
            for chosen in itertools.combinations(range(n), k):
                assert_comes_back(torch.tensor(chosen, dtype=torch.int64), n)


@given(n=st.integers(1, 3000), data=st.data())
def test_any_selection_comes_back_on_both_paths(n, data):
    k = data.draw(st.integers(0, n))
    cluster = data.draw(st.booleans())  # all at one end: the worst case for the high parts
    seed = data.draw(st.integers(0, 99))
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    chosen = torch.arange(n - k, n) if cluster else shuffled[:k].sort().values
    assert_comes_back(chosen, n)
    with pytest.MonkeyPatch.context() as patch:
        expected = encode_indices(chosen, n)
        run_anywhere(patch)
        assert same_bits(encode_indices(chosen, n), expected)
        assert torch.equal(decode_indices(expected, n, k), chosen)


@pytest.mark.parametrize("code", ["bitmask", "elias-fano", "integers"])
def test_each_code_is_cheapest_somewhere_and_works_alone(code, monkeypatch):
    """No code is there for nothing, and each works where another would be cheaper."""
    cheapest = {bits._cheapest(n, k) for n in (16, 1000, 1 << 20) for k in (1, 2, 5, 9, n // 2)}
    assert code in cheapest
    monkeypatch.setattr(bits, "_cheapest", lambda n, k: code)
    for n, k in [(7, 3), (64, 1), (1000, 37), (1000, 999)]:
        chosen = torch.randperm(n)[:k].sort().values
        encoded = encode_indices(chosen, n)
        assert encoded.numel() == bits._sizes(n, k)[code]
        assert torch.equal(decode_indices(encoded, n, k), chosen)


def test_size_is_never_above_a_mask_integers_or_the_elias_fano_bound():
    for n in (8, 100, 4096, 65536, 1 << 20):
        for k in {1, 2, 3, n // 100 or 1, n // 10 or 1, n // 2, n - 1}:
            size = index_bytes(n, k)
            assert size <= -(-n // 8)
            assert size <= sum(-(-k * b // 8) for b in _fields((n - 1).bit_length()))
            # Up to a byte of rounding for each field that the low bits are packed in.
            assert size <= k * (2 + math.log2(n / k)) / 8 + 8
            # No code of all subsets is below the logarithm of their number.
            bound = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
            assert 8 * size >= bound - 1


def test_nothing_is_sent_to_say_all_or_none():
    assert index_bytes(100, 0) == index_bytes(100, 100) == 0


def _fields(width: int) -> list[int]:
    return [8] * (width // 8) + [b for b in (4, 2, 1) if width % 8 & b]
