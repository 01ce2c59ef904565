"""Fingerprints of what ranks are handed: equal for equal values, different for any other."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import images, rows

from mpcomp.comm.handshake import StepFingerprint, check_step, fingerprint
from mpcomp.core.context import Step

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
]
LARGE = 1 << 22


def values():
    """Something of each kind, made anew."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 7, generator=generator)
    return (
        {"ids": (x * 10).long(), "mask": x > 0, "half": x.to(torch.bfloat16)},
        [x, (torch.tensor(2.5), torch.tensor(True), torch.empty(0, 4))],
        ((1, 2), (3, 4), None, "word", 0.25, False, torch.float32),
    )


def test_equal_values_have_equal_fingerprints():
    assert fingerprint(*values()) == fingerprint(*values())


def test_it_is_the_same_in_every_process_and_fits_into_a_signed_integer():
    """Ranks compare it: nothing in it may come from Python's own, salted hash."""
    found = fingerprint("a", 1, torch.arange(3), {"b": (2.0, None)})
    assert found == 8409725673266810356
    assert all(0 <= fingerprint(i) < 1 << 63 for i in range(100))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_of_a_small_tensor_counts(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (3, 11), generator=generator)
    x = bits.to(torch.float32).to(dtype)
    original = fingerprint(x)
    found = {original}
    for i, j in itertools.product(range(3), range(11)):
        y = bits.clone()
        y[i, j] ^= 1
        found.add(fingerprint(y.to(torch.float32).to(dtype)))
    assert len(found) == 1 + 33
    assert fingerprint(x.clone()) == original


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)], ids=str)
def test_tensors_without_axes_or_elements(dtype, shape):
    x = torch.ones(shape).to(dtype)
    assert fingerprint(x) == fingerprint(x.clone())
    assert (fingerprint(x) == fingerprint(torch.zeros(shape).to(dtype))) == (x.numel() == 0)
    assert fingerprint(x) != fingerprint(x.unsqueeze(0))


def test_equal_bytes_of_another_dtype_or_shape_differ():
    x = torch.zeros(2, 6)
    others = [x.view(torch.int32), x.reshape(6, 2), x.reshape(12), x.double(), torch.zeros(2, 7)]
    assert len({fingerprint(y) for y in (x, *others)}) == 6


@pytest.mark.parametrize(
    "a, b",
    [
        ((1, 11), (11, 1)),
        ((1, 12), (11, 2)),
        (((1, 2), (3, 4)), ((1, 2, 3), (4,))),
        (((1,), (2,)), ((1, 2),)),
        (("ab", "c"), ("a", "bc")),
        ((1, None), (None, 1)),
        ({"x": 1}, {"x": 2}),
        ({"x": 1}, {"y": 1}),
        ({"x": 1, "y": 2}, {"x": 2, "y": 1}),
        (({"x": 1}, 2), ({"x": 1, 2: 2},)),
        ((0, True), (1, False)),
        ((0.1,), (0.1000000001,)),
        ((), ((),)),
        ("1", 1),
    ],
    ids=str,
)
def test_plain_values_that_differ(a, b):
    """Digits that run into each other must not hide a difference: (1, 11) and (11, 1)."""
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint(a) == fingerprint(a)


@given(st.lists(st.lists(st.integers(0, 30), max_size=3), max_size=4), st.randoms())
def test_sample_ids_that_differ(ids, random):
    other = [list(row) for row in ids]
    for row in other:
        random.shuffle(row)
    random.shuffle(other)
    assert (fingerprint(ids) == fingerprint(other)) == (ids == other)


def test_order_of_tensors_counts_but_not_that_of_names():
    x, y = torch.randn(2, 4, 3)
    assert fingerprint((x, y)) != fingerprint((y, x))
    assert fingerprint(x, y) != fingerprint((x, y))
    assert fingerprint({"a": x, "b": y}) == fingerprint({"b": y, "a": x})
    assert fingerprint({"a": x, "b": y}) != fingerprint({"a": y, "b": x})


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.clone().requires_grad_(),
        lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
        lambda x: torch.cat([x, x])[: len(x)],
        lambda x: torch.stack([x, x], dim=-1)[..., 0],
    ],
    ids=["channels last", "requires grad", "permuted", "slice", "strided"],
)
@pytest.mark.parametrize("side", [4, 64], ids=["small", "large"])
def test_memory_and_gradients_are_no_part_of_a_value(change, side):
    x, _ = images(6, side=side)
    assert fingerprint(change(x)) == fingerprint(x)


def test_signs_and_nan_are_bits():
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert fingerprint(zero) != fingerprint(-zero)
    assert fingerprint(nan) == fingerprint(nan.clone())


@pytest.mark.parametrize("numel", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, LARGE, LARGE + 12345])
def test_other_large_batches_differ(numel):
    x, y = torch.randn(2, numel)
    assert fingerprint(x) != fingerprint(y)
    assert fingerprint(x) == fingerprint(x.clone())


@pytest.mark.parametrize("numel", [1 << 15, 1 << 16, 1 << 20])
def test_each_element_of_a_large_tensor_counts(numel):
    x = torch.zeros(numel)
    original = fingerprint(x)
    for position in (0, 1, numel // 3, numel - 2, numel - 1):
        x[position] = 1
        assert fingerprint(x) != original
        x[position] = 0


def test_rows_in_another_order_differ():
    """A shuffle that is not seeded alike, the very mistake this is for."""
    x = torch.randn(64, 3, 112, 112)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert fingerprint(x) != fingerprint(x[order])
    x, y = rows(10)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    assert fingerprint(x, y) != fingerprint(x, y[order])


def step_fingerprint(*data):
    return StepFingerprint.of(Step(3, True), ("bf16",), data, terms=8.5, trained=0, tied=(0, 0))


def refused(*data, others):
    """Whether ranks with these batches are told apart; the second one is named then."""
    mine, theirs = step_fingerprint(*data), step_fingerprint(*others)
    both = [StepFingerprint.from_numbers(each.numbers) for each in (mine, theirs)]
    assert both == [mine, theirs]
    check_step([mine, mine, mine, mine], Step(3, True), 2)
    check_step([mine, mine, theirs, theirs], Step(3, True), 2)  # replicas have their own data
    try:
        check_step(both, Step(3, True), 2)
    except ValueError as error:
        assert "rank 1 and rank 0 were given different data in step 3" in str(error)
        return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [4, 200_000], ids=["small", "large"])
def test_a_rounding_apart_is_the_same_batch_and_other_pixels_are_not(dtype, count):
    """Unlike processors round otherwise; of a large batch every element counts."""
    generator = torch.Generator().manual_seed(count)
    x = torch.rand(count, 3, generator=generator).to(dtype)
    y = torch.arange(count)
    rounded = (x.double() * (1 + 1e-7 * torch.randn(x.shape, generator=generator))).to(dtype)
    assert not refused(x, y, others=(x.clone(), y))
    assert not refused(x, y, others=(rounded, y))
    third = x.clone()
    third[:, 2] = third[:, 2].flip(0)  # a third of all pixels
    assert refused(x, y, others=(third, y))
    assert refused(x, y, others=(x.flip(0), y))
    assert refused(x, y, others=(x, y + (y == count - 1)))  # of whole numbers each one counts
    assert refused(x, y, others=(2 * x, y))
    assert refused(x, y, others=(x.T.reshape(3, count), y))


def test_blocks_that_change_places_and_tensors_that_do():
    x, y = torch.randn(2, 5 << 14)
    assert refused(x, others=(x.reshape(5, -1).flip(0).reshape(-1),))
    assert refused(x, y, others=(y, x))
    assert refused({"a": x, "b": y}, others=({"a": y, "b": x},))
    assert not refused({"a": x, "b": y}, others=({"b": y, "a": x},))


def test_zeros_and_nan_are_values_too():
    x = torch.zeros(10)
    nan = torch.full((10,), torch.nan)
    assert not refused(x, others=(x,)) and not refused(nan, others=(nan,))
    assert refused(x, others=(nan,)) and refused(x, others=(x + 1e-3,))
    assert not refused(torch.empty(0), others=(torch.empty(0),))


@pytest.mark.gpu
def test_the_device_is_no_part_of_a_value():
    x = torch.randn(3, 100_000)
    assert fingerprint(x.cuda()) == fingerprint(x)
