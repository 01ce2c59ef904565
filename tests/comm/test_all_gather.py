"""Records of all ranks: everybody's, in order, whatever the number of ranks and rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpcomp.comm import all_gather
from mpcomp.comm.all_gather import LARGEST_RECORD, AllGather

#: Of pairs of numbers.
LENGTHS = (1, 3, 0, 2, LARGEST_RECORD // 16, 1)


def gather(radix: int) -> tuple[list[list[list[int]]], int]:
    """Records of several lengths in turn, one right after the other; rounds of each."""
    all_gather.RADIX = radix  # of this process, which ends with the test
    rank = dist.get_rank()
    records = AllGather(dist.new_group(backend="gloo"), timeout_s=20)
    found = [
        records(torch.tensor([rank, call] * length, dtype=torch.int64)).tolist()
        for call, length in enumerate(LENGTHS)
    ]
    records.close()
    return found, len(records._rounds)


@pytest.mark.parametrize(
    ("size", "radix", "rounds"), [(2, 16, 1), (3, 2, 2), (5, 2, 3), (5, 3, 2), (4, 16, 1)]
)
def test_every_rank_has_all_records(
    ranks: Callable[..., Any], size: int, radix: int, rounds: int
) -> None:
    expected = [
        [[rank, call] * length for rank in range(size)] for call, length in enumerate(LENGTHS)
    ]
    for found, num_rounds in ranks(gather, size, radix):
        assert found == expected
        assert num_rounds == rounds


def halves(timeout_s: float) -> str:
    """The words of the error on rank 0, which rank 1 never answers."""
    records = AllGather(dist.new_group(backend="gloo"), timeout_s=timeout_s)
    if dist.get_rank() == 1:
        dist.barrier()  # alive, and silent
        return ""
    try:
        records(torch.tensor([1]))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return "no error"


def test_a_silent_rank_is_an_error_in_time(ranks: Callable[..., Any]) -> None:
    said, _ = ranks(halves, 2, 0.5)
    assert "imed out" in said
