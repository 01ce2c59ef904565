"""The fixture of several processes itself, and that pipelines leave nothing behind either."""

import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import slow
from models import MLP_SPLIT, mlp, rows
from ranks import RankFailed, run_ranks

import mpcomp


def alive(folder):
    """Processes that wrote their number there and are still running."""
    found = []
    for path in Path(folder).iterdir():
        try:
            state = Path(f"/proc/{path.name}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":  # ended, and only not yet collected
            found.append((path.name, state))
    return found


def misbehave(folder, what):
    Path(folder, str(os.getpid())).touch()
    if dist.get_rank() == 1:
        while len(list(Path(folder).iterdir())) < dist.get_world_size():
            time.sleep(0.01)  # the others are on their way
        if what == "raise":
            raise KeyError("what")
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exits":
            os._exit(7)
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    if what == "ends":
        return dist.get_rank()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.1)


def nothing():
    """A process that only begins."""


@pytest.mark.parametrize(
    "what, message",
    [
        slow("raise", "rank 1: KeyError: 'what'"),
        ("killed", "rank 1: died: -9"),
        slow("exits", "rank 1: died: 7"),
        ("stopped", r"ranks \[0, 1, 2\] had not ended when the time was up"),
    ],
)
def test_no_process_is_left_behind(tmp_path, what, message):
    run_ranks(nothing, 1)  # the server is there, so that processes begin at once
    with pytest.raises(RankFailed, match=message):
        run_ranks(misbehave, 3, str(tmp_path), what, timeout_s=10.0 if what == "stopped" else 240.0)
    assert len(list(tmp_path.iterdir())) == 3, "a process had not begun"
    assert alive(tmp_path) == []


def test_results_come_by_rank_and_no_process_is_left_behind(tmp_path):
    assert run_ranks(misbehave, 3, str(tmp_path), "ends") == [0, 1, 2]
    assert alive(tmp_path) == []


def test_a_rank_that_is_not_waited_for_is_ended_too(tmp_path):
    results = run_ranks(misbehave, 2, str(tmp_path), "killed", may_fail=True, without=[0])
    assert results == [None, ("died", "-9")]
    assert alive(tmp_path) == []


def make_many(count):
    """Open files and threads after each of so many pipelines, one at a time."""
    found = []
    for _ in range(count):
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(
            mlp(), 2, split=MLP_SPLIT[:1], act_comp="ef21+topk:0.3", loss_fn=F.cross_entropy
        )
        loss = float(pipe.forward_backward(*rows(6)))
        del pipe
        gc.collect()
        time.sleep(0.2)  # threads end by themselves
        files, threads = (len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task"))
        found.append((files, threads, loss))
    return found


def test_a_pipeline_that_is_dropped_closes_its_connections():
    """A notebook or a sweep makes many in one process."""
    for found in run_ranks(make_many, 2, 4):
        files, threads, losses = zip(*found, strict=True)
        assert max(files[1:]) <= files[0] + 3 and max(threads[1:]) <= threads[0] + 3, found
        assert len(set(losses)) == 1


def imported_anew():
    """Modules that a rank imports to train: the server that it is forked from lacks them."""
    before = {name for name in sys.modules if name != __name__}
    pipe = mpcomp.pipeline(
        mlp(), chunks=2, split=MLP_SPLIT[:1], act_comp="topk:0.2", loss_fn=F.cross_entropy
    )
    pipe.forward_backward(*rows(8))
    return before, [name for name in sys.modules if name not in before], gc.get_freeze_count()


def test_a_rank_finds_imported_what_it_trains_with():
    """Importing it anew would cost every rank of every test a second of the processor."""
    for before, names, frozen in run_ranks(imported_anew, 2):
        assert {"methods", "models", "everyday", "pytest"} < before and frozen > 100_000
        assert [name for name in names if name.startswith(("mpcomp", "torch.distributed"))] == []
