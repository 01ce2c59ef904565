"""Reading sample ids: what is accepted, cut with the batch, and what is refused."""

import numpy as np
import pytest
import torch

from mpcomp.core.sample_ids import split_sample_ids

IDS = [5, 3, 9, 1, 7]


@pytest.mark.parametrize(
    "ids",
    [IDS, tuple(IDS), torch.tensor(IDS), torch.tensor(IDS, dtype=torch.int32), np.array(IDS)],
    ids=["list", "tuple", "int64", "int32", "numpy"],
)
def test_ids_follow_their_rows(ids):
    assert split_sample_ids(ids, [3, 2]) == (((5,), (3,), (9,)), ((1,), (7,)))


def test_pairs_of_id_and_augmentation_seed():
    pairs = torch.tensor([[5, 0], [5, 1], [3, 0]])
    assert split_sample_ids(pairs, [2, 1]) == (((5, 0), (5, 1)), ((3, 0),))


def test_the_index_of_a_batch_goes_to_all_microbatches():
    assert split_sample_ids(4, [2, 2]) == (4, 4)
    assert split_sample_ids(torch.tensor(4), [2]) == (4,)


def test_none_is_none():
    assert split_sample_ids(None, [2, 2]) == ()


@pytest.mark.parametrize("count", [4, 6, 0])
def test_a_wrong_number_of_ids(count):
    ids = torch.arange(count)
    with pytest.raises(ValueError, match=rf"\[{count}\] for a batch of 5 rows: expected one id"):
        split_sample_ids(ids, [3, 2])


def test_a_repeated_id_is_named():
    with pytest.raises(ValueError, match="sample id 9 occurs twice in one batch.*replacement"):
        split_sample_ids([5, 9, 1, 9], [2, 2])
    with pytest.raises(ValueError, match=r"sample id \(1, 2\) occurs twice"):
        split_sample_ids([[1, 2], [1, 2]], [2])


@pytest.mark.parametrize("ids", [[0.0, 1.0], torch.tensor([True, False]), 1.5])
def test_ids_that_are_no_whole_numbers(ids):
    with pytest.raises(TypeError, match="sample_ids of dtype .*expected whole numbers"):
        split_sample_ids(ids, [2])


def test_too_many_dimensions():
    with pytest.raises(ValueError, match=r"shape \[2, 1, 1\]"):
        split_sample_ids(torch.zeros(2, 1, 1, dtype=torch.int64), [2])
