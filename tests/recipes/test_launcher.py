"""Processes end with their launcher, find its store or say where it was to be, and begin again."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from endings import history, stopped_in_step, weights

import mpcomp
from recipes import cifar10, launcher
from recipes.command import _started as started
from recipes.config import RunConfig
from recipes.launcher import end_with_launcher, reach_store, within
from recipes.ranks import joined

TINY = [
    *("--data", "digits", "--width", "4", "--epochs", "2", "--batch-size", "16", "--chunks", "2"),
    *("--train-limit", "40", "--test-limit", "20", "--precision", "fp32", "--device", "cpu"),
]


@pytest.fixture
def nobody(monkeypatch):
    """A store's address at which nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        yield taken


def test_a_store_that_cannot_be_reached_is_named(nobody, monkeypatch, capsys):
    message = (
        rf"127.0.0.1, port {nobody.getsockname()[1]} cannot be reached within 0.2 s \(.*--rdzv-"
    )
    with pytest.raises(mpcomp.PeerError, match=message):
        reach_store(0.2)
    monkeypatch.setattr(launcher, "die_with_parent", lambda parent: None)  # not pytest's
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        cifar10.main([*TINY, "--timeout", "0.2"])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the rendezvous at 127.0.0.1") and said.count("\n") == 1
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit), joined(0.2):
        pass
    assert capsys.readouterr().err == ""
    nobody.listen()
    reach_store(5.0)


def test_a_store_that_never_answers_is_not_waited_for(nobody):
    assert within(5.0, lambda: 3) == 3
    with pytest.raises(KeyError, match="x"):
        within(5.0, lambda: {}["x"])
    with pytest.raises(mpcomp.PeerError, match="has not answered within 0.1 s: its machine or"):
        within(0.1, lambda: time.sleep(30))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has this alone")
def test_the_end_of_the_parent_ends_the_child():
    """Of a grandchild, which whoever collects the dead reports."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: it becomes ours
    told, tells = os.pipe()
    try:
        parent = os.fork()
        if not parent:
            child = os.fork()
            if not child:
                end_with_launcher()
                os.write(tells, b"x")
                time.sleep(600)
                os._exit(0)
            os.write(tells, f"{child} ".encode())
            time.sleep(600)
        said = b""
        while b"x" not in said or b" " not in said:
            said += os.read(told, 100)
        child = int(said.replace(b"x", b""))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    finally:
        libc.prctl(36, 0, 0, 0, 0)
        os.close(told)
        os.close(tells)


def test_elsewhere_processes_are_not_ended(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    end_with_launcher()  # which asks nothing of a kernel that has no such thing


def test_a_restarted_run_goes_on_in_its_folder(monkeypatch, tmp_path, tiny):
    """The same command again: refused by a user's hand, gone on with by torchrun's."""
    config = tiny()
    recipe = SimpleNamespace(config=type(config), configure=lambda chosen: tiny(**chosen))
    folder, *_ = started(recipe, {"out": tmp_path / "run"}, "now")
    folder.create(config.to_json())
    with pytest.raises(ValueError, match="holds a run already"):
        started(recipe, {"out": tmp_path / "run"}, "now")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ValueError, match="holds a run already"):
        started(recipe, {"out": tmp_path / "run", "lr": 0.5}, "now")
    assert started(recipe, {"out": tmp_path / "run"}, "now") == (folder, config, None)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(ValueError, match="pass --out a folder, in which a restarted run finds"):
        started(recipe, {}, "now")


# -- stopped in the middle of an epoch ------------------------------------------------------------


FEEDBACK = [
    *(*TINY, "--act", "ef21+topk:0.1", "--grad", "ef+randomk:0.2", "--train-limit", "48"),
    *("--test-limit", "8"),
]


def assert_same_run(one, other):
    assert history(one) == history(other)
    ours, theirs = weights(one), weights(other)
    assert all((ours[key] == theirs[key]).all() for key in theirs)
    assert (one / "summary.json").exists()


def test_a_run_that_was_stopped_within_an_epoch_goes_on_exactly(tmp_path, capsys):
    cifar10.main([*FEEDBACK, "--out", str(tmp_path / "straight")])
    stopped = [*FEEDBACK, "--out", str(tmp_path / "stopped")]
    stopped_in_step(cifar10.main, stopped, cifar10.ImageTrainer, lambda _: 5, signal.SIGINT)
    assert (
        "stopped by SIGINT after step 2 of epoch 2; go on with --resume" in capsys.readouterr().out
    )
    assert not (tmp_path / "stopped" / "summary.json").exists()
    cifar10.main(["--resume", str(tmp_path / "stopped")])
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(monkeypatch, tmp_path):
    cifar10.main([*FEEDBACK, "--out", str(tmp_path / "straight")])
    end_step, taken = cifar10.ImageTrainer.end_step, []

    def dies(self):
        end_step(self)
        taken.append(1)
        if len(taken) == 6:
            raise MemoryError

    options = ["--save-every-steps", "2", "--keep", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(cifar10.ImageTrainer, "end_step", dies)
        with pytest.raises(MemoryError):
            cifar10.main([*FEEDBACK, *options, "--out", str(tmp_path / "killed")])
    names = sorted(path.name for path in (tmp_path / "killed").glob("checkpoint*"))
    assert names == ["checkpoint", "checkpoint-step-00000003"]
    cifar10.main(["--resume", str(tmp_path / "killed")])
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.parametrize(
    "options", [{"save_every_steps": 0}, {"keep": 0}, {"save_every_minutes": 0}]
)
def test_numbers_of_checkpoints_that_cannot_be(options, tiny):
    assert issubclass(type(tiny()), RunConfig)
    with pytest.raises(ValueError, match=f"{next(iter(options))} is 0; pass"):
        tiny(**options)


DIES = """
import os, signal, sys
from recipes import cifar10
step = cifar10.ImageTrainer.end_step

def dies(self):
    step(self)
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ.get("MPCOMP_ATTEMPT", "0")
    if restarts == ("0", "0") and os.environ["RANK"] == "1" and len(self.history) == 1:
        os.kill(os.getpid(), signal.SIGKILL)

cifar10.ImageTrainer.end_step = dies
cifar10.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["torchrun", "heal"])
def test_a_run_whose_rank_was_killed_goes_on(tmp_path, by):
    """The second attempt takes nothing of the first's for its own, and goes on from its folder."""
    (tmp_path / "dies.py").write_text(DIES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--max-restarts", "1"] if by == "torchrun" else []
    command += ["--nproc-per-node", "2", str(tmp_path / "dies.py"), *TINY, "--split", "2"]
    command += ["--save-every-steps", "1", "--out", str(tmp_path / "run")]
    command += ["--heal"] if by == "heal" else []
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training with") == 2 and done.stdout.count("run folder: ") == 1
    cifar10.main([*TINY, "--split", "2", "--out", str(tmp_path / "alone")])
    assert_same_run(tmp_path / "run", tmp_path / "alone")
