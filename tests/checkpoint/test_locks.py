"""One run at a time writes a folder, and whoever comes second is told who it is."""

import contextlib
import gc
import json
import os
import signal

import pytest
import torch
from models import names_in

import mpcomp
from mpcomp.checkpoint.locking import FolderLock


@pytest.fixture
def holder(tmp_path):
    """The number of another process, which holds the right to write a folder."""
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        try:
            lock = FolderLock(tmp_path / "a", "other")
            lock.take()
            lock.check()
            os.write(tells, b"held")
            while True:
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(told, 4) == b"held"
    yield child
    kill(child)
    os.close(told)
    os.close(tells)


def kill(child):
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def pipe():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    return mpcomp.pipeline(model, 1, split=2)


def test_a_save_is_refused_while_another_run_writes_until_that_is_killed(holder, tmp_path):
    one = pipe()
    message = rf"a is being written by process {holder} on {os.uname().nodename}: wait for that"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            one.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    one.save(tmp_path / "b")
    kill(holder)
    assert (tmp_path / ".a.lock").exists()  # but nobody holds it
    one.save(tmp_path / "a")
    assert names_in(tmp_path) == ["a", "b"]


def test_a_folder_is_its_pipelines_as_long_as_it_lives(tmp_path):
    told, tells = os.pipe()
    goes, go = os.pipe()
    child = os.fork()
    if not child:
        try:
            other = pipe()
            other.save(tmp_path / "a")
            os.write(tells, b"saved")
            os.read(goes, 1)
            del other
            gc.collect()
            os.write(tells, b"freed")
            signal.pause()
        finally:
            os._exit(1)
    try:
        one = pipe()
        assert os.read(told, 5) == b"saved"
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"a is being written by process {child} on"):
                one.save(tmp_path / "a")
        os.write(go, b"1")
        assert os.read(told, 5) == b"freed"
        one.save(tmp_path / "a")
        assert (tmp_path / ".a.lock").exists()
    finally:
        kill(child)
        for end in (told, tells, goes, go):
            os.close(end)
    del one
    gc.collect()
    assert not (tmp_path / ".a.lock").exists()


def test_ranks_of_one_run_share_the_right(holder, tmp_path):
    """The other process may be a rank of this run: it says so in the file."""
    lock = FolderLock(tmp_path / "a", "other")
    lock.take()
    lock.check()
    lock.release()
    assert json.loads((tmp_path / ".a.lock").read_text())["pid"] == holder


def test_a_process_that_has_the_right_has_it_for_all_it_does(tmp_path):
    outer, inner = FolderLock(tmp_path / "a", "run"), FolderLock(tmp_path / "a", "save")
    for lock in (outer, inner):
        lock.take()
        lock.check()
    inner.release()
    inner.release()  # of no effect
    assert (tmp_path / ".a.lock").exists()
    outer.release()
    assert not (tmp_path / ".a.lock").exists()


def test_processes_that_are_forked_do_not_have_it(tmp_path):
    """A loader's workers may outlive the run that they were forked from."""
    lock = FolderLock(tmp_path / "a", "run")
    lock.take()
    if not (child := os.fork()):
        other = FolderLock(tmp_path / "a", "run of the child")
        other.take()
        try:
            other.check()
        except ValueError:
            os._exit(5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    lock.check()
    lock.release()
