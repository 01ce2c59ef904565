"""Records of all ranks: everybody's, in order, whatever the number of ranks and rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpcomp.comm import all_gather
from mpcomp.comm.all_gather import LARGEST_RECORD, AllGather

#: Seconds; for what hangs, as a busy machine takes minutes.
TIMEOUT_S = 180
#: Of pairs of numbers.
LENGTHS = (1, 3, 0, 2, LARGEST_RECORD // 16, 1)


def gather(radix: int) -> tuple[list[list[list[int]]], int]:
    """Records of several lengths in turn, one right after the other; rounds of each."""
    all_gather.RADIX = radix  # of this process, which ends with the test
    rank = dist.get_rank()
    records = AllGather(dist.new_group(backend="gloo"), timeout_s=TIMEOUT_S)
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


class _Unending:
    """A send whose receiver has died as it was taken up: a wait for it does not end."""

    def __init__(self, work: Any) -> None:
        self._work = work  # its memory must live

    def wait(self, timeout: Any) -> None:
        raise AssertionError("a wait that nothing ends but its timeout")


def with_sends_that_do_not_end() -> list[list[int]]:
    """Records of the last call before a rank's death, which all that are left have."""
    records = AllGather(dist.new_group(backend="gloo"), timeout_s=TIMEOUT_S)
    own = torch.tensor([dist.get_rank()])
    records(own)
    isend = dist.isend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", lambda *args, **kwargs: _Unending(isend(*args, **kwargs)))
        found: list[list[int]] = records(own).tolist()
    dist.barrier()
    return found


def test_nobody_waits_for_a_send_to_a_rank_whose_record_has_come(
    ranks: Callable[..., Any],
) -> None:
    assert ranks(with_sends_that_do_not_end, 3) == [[[0], [1], [2]]] * 3


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


def left_behind() -> list[Any]:
    """The last records on rank 1, which is not through with them when rank 0 has gone."""
    group = dist.new_group(backend="gloo")
    records = AllGather(group, timeout_s=TIMEOUT_S)
    rank = dist.get_rank()
    records(torch.tensor([rank]))  # before it, too, receives are posted
    if rank == 1:
        post = records._post

        def late() -> Any:
            with pytest.raises(RuntimeError, match="by peer"):
                dist.recv(torch.empty(1), src=0, group=group)
            return post()

        records._post = late  # type: ignore[method-assign]
    found = records(torch.tensor([rank])).tolist()
    if rank == 1:
        with pytest.raises(RuntimeError, match="by peer"):
            records(torch.tensor([rank]))
    return found


def test_a_rank_that_leaves_with_its_last_records_fails_no_other(ranks: Callable[..., Any]) -> None:
    assert ranks(left_behind, 2) == [[[0], [1]]] * 2
