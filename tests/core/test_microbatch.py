"""Cutting batches: tensors, tuples and mappings, evenly, in order, without copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpcomp.core.microbatch import gather, map_tensors, num_rows, rows_of_chunks, scatter


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
