"""Cutting batches: tensors, tuples and mappings, evenly, in order, without copies."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpcomp.core.microbatch import (
    check_target,
    gather,
    map_tensors,
    num_rows,
    rows_of_chunks,
    scatter,
)


@given(rows=st.integers(1, 200), data=st.data())
def test_microbatches_differ_by_one_row_at_most_longer_ones_first(rows, data):
    chunks = data.draw(st.integers(1, rows))
    sizes = rows_of_chunks(rows, chunks)
    assert len(sizes) == chunks and sum(sizes) == rows
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_scatter_and_gather_come_back():
    x = torch.randn(7, 3)
    parts = scatter(x, [3, 2, 2])
    assert [len(part) for part in parts] == [3, 2, 2]
    assert torch.equal(gather(parts), x)
    assert parts[1].data_ptr() == x[3:].data_ptr()
    assert gather(parts[:1]) is parts[0]


def test_every_tensor_of_a_batch_is_cut_and_the_rest_goes_to_all():
    x, mask = torch.arange(10).reshape(5, 2), torch.arange(5)
    batch = {"x": x, "extra": (mask, [x]), "flag": True, "none": None}
    first, second = scatter(batch, [3, 2])
    assert torch.equal(first["x"], x[:3]) and torch.equal(second["extra"][0], mask[3:])
    assert torch.equal(second["extra"][1][0], x[3:])
    assert first["flag"] is second["flag"] is True and first["none"] is None
    assert num_rows(batch) == 5
    doubled = map_tensors(batch, lambda t: t * 2)
    assert torch.equal(doubled["extra"][0], mask * 2) and batch["x"] is x


def test_batches_that_have_no_rows_to_count():
    with pytest.raises(TypeError, match="batch of type str holds no tensor; expected a tensor"):
        num_rows("abc")
    with pytest.raises(TypeError, match="batch of type dict"):
        num_rows({"a": 1})
    with pytest.raises(ValueError, match=r"differ in dim 0: \[\[3, 2\], \[4\]\]"):
        num_rows((torch.zeros(3, 2), torch.zeros(4)))
    with pytest.raises(ValueError, match="one row per sample"):
        num_rows(torch.zeros(()))


ROWS = 4
WORDS, NUMBERS = ["a", "b", "c", "d"], [3, 1, 4, 1]
#: What stands in a batch of four rows beside its tensor, and its part of rows 1 and 2.
ENTRIES = {
    "list of words": (WORDS, ["b", "c"]),
    "tuple of words, as loaders give them": (tuple(WORDS), ("b", "c")),
    "list of numbers": (NUMBERS, [1, 4]),
    "list of lists, of any lengths": ([[1], [2, 3], [], [4]], [[2, 3], []]),
    "list of mappings": ([{"n": n} for n in NUMBERS], [{"n": 1}, {"n": 4}]),
    "tuple of lists": ((WORDS, NUMBERS), (["b", "c"], [1, 4])),
    "mapping of lists": ({"w": WORDS, "n": NUMBERS}, {"w": ["b", "c"], "n": [1, 4]}),
    "array": (np.arange(12).reshape(4, 3), np.arange(3, 9).reshape(2, 3)),
    "array of words": (np.array(WORDS), np.array(["b", "c"])),
    "tuple of an array and a list": ((np.arange(4), WORDS), (np.arange(1, 3), ["b", "c"])),
    "list beside a tensor": ((torch.arange(4), WORDS), (torch.arange(1, 3), ["b", "c"])),
}
#: What stands there and has no entry a row.
WHOLE = {
    "shorter list": ["a", "b", "c"],
    "longer list": [1, 2, 3, 4, 5],
    "pair of numbers": (224, 224),
    "word of as many letters": "four",
    "shape": torch.Size([1, 2, 3, 4]),
    "array of another length": np.arange(3),
    "array of one number": np.array(2.0),
    "no list": [],
    "number": 4,
    "mapping of settings": {"p": 0.5, "sizes": [1, 2]},
}


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = list(a.values()), list(b.values())
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        assert len(a) == len(b)
        for mine, other in zip(a, b, strict=True):
            assert_equal(mine, other)
    else:
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", ENTRIES)
def test_what_has_an_entry_a_row_is_cut_like_a_tensor(kind):
    value, expected = ENTRIES[kind]
    batch = {"x": torch.arange(8).reshape(4, 2), "value": value}
    parts = scatter(batch, [1, 2, 1])
    assert_equal(parts[1]["value"], expected)
    assert_equal(map_tensors(parts[1]["value"], lambda t: t), expected)
    assert_equal(scatter((batch["x"], value), [1, 2, 1])[1], (batch["x"][1:3], expected))
    assert num_rows(batch) == ROWS
    check_target(value, ROWS)
    with pytest.raises((TypeError, ValueError), match="target"):
        check_target(value, ROWS + 1)


@pytest.mark.parametrize("kind", WHOLE)
def test_what_has_no_entry_a_row_goes_whole_to_all(kind):
    value = WHOLE[kind]
    for part in scatter({"x": torch.zeros(ROWS, 2), "value": value}, [2, 2]):
        assert_equal(part["value"], value)
    with pytest.raises(TypeError, match=r"target of type \w+ holds no tensor"):
        check_target(value, ROWS)


@pytest.mark.parametrize("value", [(["a", "b"], [1, 2]), [[1, 2], [3, 4]], [np.ones(2)] * 2])
def test_a_list_that_may_be_read_in_two_ways_is_refused(value):
    with pytest.raises(ValueError, match="of 2 sequences with 2 entries.*a tensor or an array"):
        scatter({"x": torch.zeros(2, 3), "value": value}, [1, 1])
    scatter({"x": torch.zeros(3, 3), "value": value}, [2, 1])


def test_targets_of_other_rows_are_called_targets():
    with pytest.raises(ValueError, match="target has 3 rows, the batch 4"):
        check_target(torch.zeros(3), 4)
    with pytest.raises(ValueError, match="tensors of a target differ in dim 0"):
        check_target((torch.zeros(4), torch.zeros(3)), 4)
