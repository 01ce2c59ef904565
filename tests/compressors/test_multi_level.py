"""Two levels: equal to one for exact top-k, drawn alike by both ends, never rounded twice."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import FLOATS, drawn, round_trip, same_bits

from mpcomp import (
    Cast,
    MultiLevel,
    Quantize,
    RandomBlock,
    RandomK,
    RedSyncTopK,
    SampledTopK,
    TensorMeta,
    TopK,
    parse,
)
from mpcomp.compressors.multi_level import levels

EXACT = [TopK(0.1), SampledTopK(0.1), RedSyncTopK(0.1), RedSyncTopK(0.1, search="binary")]


def tensors(n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    normal = torch.randn(1, n, dtype=torch.float64)
    found = {
        "normal": normal,
        "heavy tails": normal / torch.randn(1, n, dtype=torch.float64).abs().clamp(min=1e-3),
        "ties": normal.round(),
        "constant": torch.full_like(normal, -0.3),
        "zeros": torch.zeros_like(normal),
    }
    return {name: x.to(dtype) for name, x in found.items()}


@pytest.mark.each_once
@pytest.mark.parametrize("first", EXACT, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 9, 37, 1003, 20_011])
def test_equals_direct_top_k_bit_for_bit(first, dtype, n):
    """Every ratio, so that k2 = ceil(keep2 n) has no second rounding to go wrong by."""
    for name, x in tensors(n, dtype).items():
        for keep in (0.1, 0.05, 0.01, 0.001):
            two = MultiLevel(first, keep).compress(x, drawn())
            direct = TopK(keep, scope="tensor").compress(x)
            assert all(same_bits(a, b) for a, b in zip(two, direct, strict=True)), (name, keep)


@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=60),
    first=st.floats(0.01, 1.0),
    ratio=st.floats(0.01, 1.0),
)
def test_equals_direct_top_k_for_any_ratios_and_ties(values, first, ratio):
    x = torch.tensor(values, dtype=torch.float32).reshape(1, -1)
    keep = first * ratio
    got = round_trip(MultiLevel(TopK(first), keep), x)
    assert same_bits(got, round_trip(TopK(keep, scope="tensor"), x))


def test_the_second_number_follows_from_the_tensor_not_from_the_first_number():
    """k2 = ceil(keep2 n); ceil(k1 keep2 / keep1) would be one too many in each of these."""
    for n, keep, second_keep, numbers in [
        (1001, 0.01, 0.0099, (11, 10)),  # 9.9, not 11 * 0.99 = 10.9
        (9, 0.7, 0.65, (7, 6)),  # 5.85, not 7 * 0.65 / 0.7 = 6.5
        (21, 0.1, 0.095, (3, 2)),  # 1.995, not 3 * 0.95 = 2.85
    ]:
        assert math.ceil(numbers[0] * second_keep / keep) == numbers[1] + 1
        first, second = levels(TopK(keep), second_keep, torch.randn(n))
        assert (first.numel(), second.numel()) == numbers
        x = torch.randn(1, n)
        (sent,) = MultiLevel(TopK(keep), second_keep).compress(x)[:1]
        assert sent.numel() == numbers[1]


@pytest.mark.parametrize("method", [*EXACT, RandomK(0.1), RandomBlock(0.1)], ids=str)
def test_levels_gives_both_choices(method):
    flat = torch.randn(5000)
    first, second = levels(method, 0.01, flat, drawn(5))
    assert torch.equal(first, method.choose(flat, 500, drawn(5)))
    assert torch.equal(second, MultiLevel(method, 0.01).choose(flat, 50, drawn(5)))
    assert torch.isin(second, first).all() and (second[1:] > second[:-1]).all()


@pytest.mark.parametrize("method", [RandomK, RandomBlock])
def test_a_shared_choice_is_drawn_twice_by_both_ends(method):
    """Only values travel, and equal generators find their places; other generators do not."""
    x = torch.randn(4, 100)
    compressor = MultiLevel(method(0.5), 0.1)
    assert compressor.shares_choice and compressor.summable
    meta = TensorMeta.of(x)
    assert compressor.wire_bytes(meta) == 40 * 4
    payload = compressor.compress(x, drawn(1))
    positions = compressor.indices(payload, meta, drawn(1))
    assert torch.equal(payload[0].reshape(-1), x.reshape(-1)[positions])
    other = compressor.decompress(payload, meta, drawn(2))
    assert not torch.equal(other, compressor.decompress(payload, meta, drawn(1)))


def test_two_random_levels_choose_every_element_with_the_same_chance():
    draws, n = 3000, 20
    counts = torch.zeros(n)
    for seed in range(draws):
        counts += round_trip(MultiLevel(RandomK(0.5), 0.25), torch.ones(n), seed) != 0
    deviation = (0.25 * 0.75 / draws) ** 0.5
    assert ((counts / draws - 0.25).abs() < 5 * deviation).all()


def test_values_and_scaling_are_those_of_the_method():
    x = torch.randn(1, 400)
    coded = MultiLevel(TopK(0.5, values=Quantize(8)), 0.1)
    assert same_bits(round_trip(coded, x), round_trip(TopK(0.1, "tensor", Quantize(8)), x))
    scaled = round_trip(MultiLevel(RandomK(0.5, unbiased=True), 0.1), x)
    plain = round_trip(MultiLevel(RandomK(0.5), 0.1), x)
    assert torch.equal(scaled, plain * 10)
    assert MultiLevel(RandomK(0.5, unbiased=True), 0.1).unbiased
    assert not MultiLevel(TopK(0.5), 0.1).unbiased


def test_a_scope_does_not_matter_as_the_whole_tensor_is_chosen_from():
    x = torch.randn(8, 50)
    for scope in ("sample", "row", "tensor"):
        got = round_trip(MultiLevel(TopK(0.3, scope=scope), 0.1), x)
        assert same_bits(got, round_trip(TopK(0.1, scope="tensor"), x))


def test_with_cf_moves_the_second_level_and_widens_the_first_where_it_must():
    two = MultiLevel(TopK(0.1), 0.01)
    assert two.with_cf(1000) == MultiLevel(TopK(0.1), 0.001)
    assert two.with_cf(4) == MultiLevel(TopK(0.25), 0.25)


def test_specs():
    value = MultiLevel(TopK(0.1, values=Cast("fp16")), 0.001)
    assert parse("multilevel:0.001+topk:0.1+fp16") == value == parse(str(value))


def test_bad_settings():
    with pytest.raises(ValueError, match=r"keep=0.2 above the first level's 0.1"):
        MultiLevel(TopK(0.1), 0.2)
    with pytest.raises(ValueError, match=r"keep=0: .*\(0, 1\]"):
        MultiLevel(TopK(0.1), 0)
    for first in (Quantize(4), MultiLevel(TopK(0.1), 0.01), "topk:0.1"):
        with pytest.raises(TypeError, match=r"first=.*two levels of a selecting compressor"):
            MultiLevel(first, 0.001)
