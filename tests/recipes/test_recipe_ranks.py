"""Each machine's user reads every reason once, whichever process has it."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

import mpcomp
from recipes import ranks
from recipes.ranks import Ranks, joined

MISTAKE = ValueError("bad")
LOST = mpcomp.PeerError("rank 0 is gone")


@pytest.fixture
def two_machines(monkeypatch):
    """Processes 0 to 2 on one machine, 3 on another."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    world = SimpleNamespace(store=dist.HashStore())
    return [Ranks(rank=i, size=4, local_rank=i % 3, machine=i // 3, world=world) for i in range(4)]


def said(capsys, rank: Ranks, error: Exception) -> str:
    with pytest.raises(SystemExit) as caught:
        rank.fail(error)
    assert caught.value.code == 1
    return capsys.readouterr().err


def test_what_one_has_said_the_others_do_not(two_machines, capsys):
    first, second, third, other = two_machines
    assert said(capsys, first, MISTAKE) == "error: bad\n"
    assert said(capsys, second, MISTAKE) == ""
    assert said(capsys, third, LOST) == ""
    assert said(capsys, other, MISTAKE) == "error: bad\n"


def test_another_reason_is_said(two_machines, capsys):
    first, second, *_ = two_machines
    assert said(capsys, first, LOST) == "error: rank 0 is gone\n"
    assert said(capsys, second, MISTAKE) == "error: bad\n"


def test_one_speaks_for_the_first_that_is_gone(two_machines, capsys):
    _, second, third, _ = two_machines
    assert said(capsys, second, LOST) == "error: rank 0 is gone\n"
    assert said(capsys, third, LOST) == ""


def test_torchrun_is_told(two_machines, capsys, monkeypatch, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    said(capsys, two_machines[0], MISTAKE)
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))
    assert failure.message["message"] == "error: bad"


def mistaken() -> None:
    raise MISTAKE


def test_alone():
    with joined() as alone:
        assert alone == Ranks() and alone.speaks and alone.writes
        assert alone.gather({"a": 1}) == [{"a": 1}]
        assert alone.together(lambda: 5) == 5
    with pytest.raises(SystemExit, match="^error: bad$"), joined() as alone:
        alone.together(mistaken)
