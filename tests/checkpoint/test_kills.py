"""A save that is killed at any moment leaves the former checkpoint or the new one, whole.

The death of a process is told by Python's audit events, which come before every call that opens,
makes, renames or deletes a file: from one of them on each raises, so that nothing tidies up either.
"""

import shutil
import sys

import pytest
import torch
import torch.nn.functional as F
from models import names_in, rows, sgd

import mpcomp
from mpcomp import checkpoint
from mpcomp.checkpoint import exchanging, files, replacing

pytestmark = pytest.mark.filterwarnings("ignore:a save of .* was interrupted")
CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


class Killed(BaseException):
    pass


class Death:
    """The end of a process at its n-th call; one audit hook, as none can be removed."""

    def __init__(self):
        self.left = None
        self.calls = 0

    def __call__(self, event, args):
        if self.left is None or event not in CALLS:
            return
        self.calls += 1
        self.left -= 1
        if self.left < 0:
            raise Killed(event)

    def after(self, calls, work):
        """Does the work until so many calls; whether it came to its end."""
        self.left, self.calls = calls, 0
        try:
            work()
        except Killed:
            return False
        finally:
            self.left = None
        return True


class Meeting:
    """Work of another process before the n-th call of one; one audit hook likewise."""

    def __init__(self):
        self.left = None
        self.other = None

    def __call__(self, event, args):
        if self.left is None or event not in CALLS:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            self.other()

    def after(self, calls, work, other):
        """Does the work, after so many calls the other's; whether there were so many."""
        self.left, self.other = calls, other
        work()
        met, self.left = self.left is None, None
        return met


@pytest.fixture(scope="module")
def meeting():
    hook = Meeting()
    sys.addaudithook(hook)
    return hook


@pytest.fixture(scope="module")
def death():
    hook = Death()
    sys.addaudithook(hook)
    return hook


@pytest.fixture(params=["exchange", "two renames"])
def renames(request, monkeypatch):
    """The way to put a folder in another's place."""
    if request.param == "two renames":
        monkeypatch.setattr(exchanging, "_exchange", lambda one, other: False)
    return request.param


def small(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(13, 3), torch.nn.Linear(3, 5))
    pipe = mpcomp.pipeline(model, 1, split=2, act_comp="ef21+topk:0.3", loss_fn=F.cross_entropy)
    return pipe, sgd(pipe)


def saved_at(folder, steps):
    pipe, optimizer = small()
    for step in range(steps):
        pipe.forward_backward(*rows(4, step))
        optimizer.step()
        optimizer.zero_grad()
    pipe.save(folder, optimizer=optimizer, extra={"steps": steps})
    return pipe, optimizer


def weights(pipe):
    return {name: value.clone() for name, value in pipe.state_dict().items()}


def test_a_save_killed_anywhere_leaves_a_whole_checkpoint(death, renames, tmp_path):
    pipe, optimizer = saved_at(tmp_path / "before" / "a", 1)
    old = weights(pipe)
    pipe.forward_backward(*rows(4, 1))
    optimizer.step()
    new = weights(pipe)
    found = []
    ended = False
    for calls in range(1000):
        disk = tmp_path / f"{calls}"
        shutil.copytree(tmp_path / "before", disk)
        ended = death.after(calls, lambda disk=disk: pipe.save(disk / "a", extra={"steps": 2}))
        if ended:
            break
        assert checkpoint.exists(disk / "a")
        again, _ = small(seed=calls)
        steps = again.load(disk / "a")["steps"]
        assert steps == again.num_steps
        expected = {1: old, 2: new}[steps]
        assert all(torch.equal(value, expected[k]) for k, value in again.state_dict().items())
        found.append(steps)
        pipe.save(disk / "a")  # the lock is free, and what was left goes
        left = [disk / name for name in names_in(disk) if name != "a"]
        assert all(not [*path.iterdir()] for path in left)  # killed before there was a marker
        shutil.rmtree(disk)
    assert ended and 20 < len(found) < 200
    assert {*found} == {1, 2}


def test_a_first_save_killed_anywhere_leaves_none_or_a_whole_one(death, tmp_path):
    pipe, _ = saved_at(tmp_path / "before" / "a", 1)
    found = []
    for calls in range(1000):
        folder = tmp_path / f"{calls}" / "a"
        if death.after(calls, lambda folder=folder: pipe.save(folder)):
            break
        again, _ = small(seed=calls)
        before = weights(again)
        if checkpoint.exists(folder):
            again.load(folder)
            assert again.num_steps == 1
        else:
            with pytest.raises(ValueError, match="no complete checkpoint"):
                again.load(folder)
            assert all(torch.equal(v, before[k]) for k, v in again.state_dict().items())
        found.append(again.num_steps)
    assert {*found} == {0, 1}


@pytest.mark.parametrize("name", [files.WEIGHTS, files.STATE, files.META])
def test_half_a_file_is_no_checkpoint(name, tmp_path):
    """What is hidden and damaged is no save to go on from."""
    saved_at(tmp_path / "a", 1)
    workspace = tmp_path / ".a-0123abcd"
    workspace.mkdir()
    (workspace / ".made-by-mpcomp-.a-0123abcd").touch()
    (tmp_path / "a").rename(workspace / "new")
    assert checkpoint.exists(tmp_path / "a")
    content = (workspace / "new" / name).read_bytes()
    (workspace / "new" / name).write_bytes(content[: len(content) // 2])
    assert not checkpoint.exists(tmp_path / "a")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        small()[0].load(tmp_path / "a")


def test_what_is_found_gets_its_name_back_and_says_so(monkeypatch, death, tmp_path):
    """Between two renames there is none of the name, and two complete ones without."""
    pipe, _ = saved_at(tmp_path / "a", 1)
    monkeypatch.setattr(exchanging, "_exchange", lambda one, other: False)
    rename = replacing.Path.rename

    def dies(path, target):
        rename(path, target)
        if target.name == "old":
            raise Killed

    monkeypatch.setattr(replacing.Path, "rename", dies)
    monkeypatch.setattr(replacing.Replacement, "undo", lambda self: None)
    pipe.forward_backward(*rows(4, 1))
    with pytest.raises(Killed):
        pipe.save(tmp_path / "a", extra={"steps": 2})
    assert not (tmp_path / "a").exists()
    again, _ = small(seed=1)
    with pytest.warns(UserWarning, match="a was interrupted; the checkpoint of step 2, which is"):
        assert again.load(tmp_path / "a") == {"steps": 2}
    assert (tmp_path / "a").exists()
    assert small(seed=2)[0].load(tmp_path / "a") == {"steps": 2}


def test_a_save_that_cannot_be_moved_puts_the_old_one_back(renames, monkeypatch, tmp_path):
    pipe, _ = saved_at(tmp_path / "a", 1)
    rename = replacing.Path.rename
    for target_fails in ("a", "old"):
        failed = []

        def fails(path, target, name=target_fails, failed=failed):
            if target.name == name and not failed:
                failed.append(target)
                raise OSError("disk failed")
            return rename(path, target)

        monkeypatch.setattr(replacing.Path, "rename", fails)
        if target_fails == "a" and renames == "exchange":
            continue  # one call does both
        with pytest.raises(OSError, match="disk failed"):
            pipe.save(tmp_path / "a", extra={"steps": 2})
        assert names_in(tmp_path) == ["a"]
        assert pipe.load(tmp_path / "a") == {"steps": 1}


def test_ranks_that_undo_at_once_do_not_meet(meeting, renames, tmp_path):
    """One rank's whole undo at any call of the other's; either may have moved the folder."""
    pipe, _ = saved_at(tmp_path / "a", 1)
    pipe.save(tmp_path / "b")
    token = files.Saved.of(tmp_path / "b").token
    old = [path.read_bytes() for path in sorted((tmp_path / "a").iterdir())]
    for moves_first in (True, False):
        for calls in range(200):
            one, other = (replacing.Replacement(tmp_path / "a", token) for _ in range(2))
            shutil.copytree(tmp_path / "b", one.make(), dirs_exist_ok=True)
            (one if moves_first else other).move()
            met = meeting.after(calls, one.undo, other.undo)
            if not met:
                other.undo()
            assert names_in(tmp_path) == ["a", "b"], calls
            assert [path.read_bytes() for path in sorted((tmp_path / "a").iterdir())] == old
            if not met:
                break
        else:
            pytest.fail("an undo has no end")


# -- what may be deleted --------------------------------------------------------------------------


def test_a_save_deletes_nothing_that_is_not_its_own(tmp_path):
    """Neither what is called like a workspace, nor a copy of one or of a kept checkpoint."""
    pipe, _ = saved_at(tmp_path / "a", 1)
    for name in (
        ".a-20261122",
        ".a-20261122-old",
        ".a-0123abcd-claim",
        ".a-notes",
        "a-step-00000007",
    ):
        (tmp_path / name / "inside").mkdir(parents=True)
    ours = tmp_path / ".a-89abcdef"
    (ours / "old").mkdir(parents=True)
    (ours / ".made-by-mpcomp-.a-89abcdef").touch()
    shutil.copytree(ours, tmp_path / ".a-11111111")
    (tmp_path / ".a-22222222").symlink_to(ours)
    expected = {path.name for path in tmp_path.iterdir()} - {ours.name}
    (tmp_path / ".a-22222222").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".a-22222222").symlink_to(tmp_path / "elsewhere")
    pipe.save(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == expected | {"elsewhere"}
    assert all((tmp_path / name / "inside").exists() for name in (".a-20261122", "a-step-00000007"))


def test_former_checkpoints_are_kept_by_their_steps(tmp_path):
    pipe, optimizer = small()
    for step in range(5):
        pipe.forward_backward(*rows(4, step))
        optimizer.step()
        optimizer.zero_grad()
        pipe.save(tmp_path / "a", extra={"steps": step + 1}, keep=3)
    names = names_in(tmp_path)
    assert names == ["a", "a-step-00000003", "a-step-00000004"]
    again, _ = small(seed=1)
    assert again.load(tmp_path / "a-step-00000003") == {"steps": 3} and again.num_steps == 3
    shutil.copytree(tmp_path / "a-step-00000003", tmp_path / "a-step-00000001")  # somebody's
    again.forward_backward(*rows(4, 3))
    again.save(tmp_path / "a", keep=1)
    names = names_in(tmp_path)
    assert names == ["a", "a-step-00000001"]
    pipe.save(tmp_path / "a")  # who keeps none deletes none of others either
    assert names_in(tmp_path) == names
