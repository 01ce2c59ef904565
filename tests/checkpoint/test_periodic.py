"""A loop's checkpoints: when they are due, at a signal, and what goes on from them."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, assert_same_state, links_state, mlp, rows, sgd

import mpcomp
from mpcomp import Checkpoints
from mpcomp.checkpoint import periodic

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


def loop(folder, last, *, signal_at=None, seed=0, split=MLP_SPLIT, **choices):
    """A user's loop, of which this is all that has to do with checkpoints; gives its losses."""
    torch.manual_seed(seed)
    pipe = mpcomp.pipeline(mlp(), 2, split=split, act_comp="ef21+topk:0.3", loss_fn=F.cross_entropy)
    optimizer = sgd(pipe)
    losses, step = [], 0
    with Checkpoints(pipe, folder, optimizer=optimizer, **choices) as checkpoints:
        first = checkpoints.restore().get("step", 0)
        for step in range(first, last):
            losses.append(pipe.forward_backward(*rows(6, step)))
            optimizer.step()
            optimizer.zero_grad()
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoints.step({"step": step + 1}):
                break
    return first, torch.stack(losses), pipe, checkpoints.stopped


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_few_steps_and_as_if_never_stopped(tmp_path):
    first, expected, straight, stopped = loop(tmp_path / "straight", 7)
    assert (first, stopped, names(tmp_path)) == (0, 0, [])
    _, losses, _, _ = loop(tmp_path / "a", 5, every_steps=2, keep=2)
    assert names(tmp_path) == ["a", "a-step-00000002"]
    first, rest, resumed, _ = loop(tmp_path / "a", 7, every_steps=2, keep=2, seed=9)
    assert first == 4  # that of the 5th step was not due
    assert torch.equal(torch.cat([losses[:4], rest]), expected)
    assert_same_state(links_state(resumed), links_state(straight))
    assert names(tmp_path) == ["a", "a-step-00000004"]


def test_a_signal_ends_the_loop_with_a_checkpoint_of_its_step(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    _, expected, _, _ = loop(tmp_path / "straight", 6)
    _, losses, _, stopped = loop(tmp_path / "a", 6, signal_at=2)
    assert (len(losses), stopped) == (3, signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    first, rest, _, stopped = loop(tmp_path / "a", 6, seed=9)
    assert (first, stopped) == (3, 0)
    assert torch.equal(torch.cat([losses, rest]), expected)


def test_a_second_signal_does_not_wait(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("former"))
    try:
        pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT)
        with Checkpoints(pipe, tmp_path / "a"):
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == ["former"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT])
def ending(request):
    """A signal that ends Python; a shell has processes in the background ignore SIGINT."""
    python = signal.SIG_DFL if request.param == signal.SIGTERM else signal.default_int_handler
    before = signal.signal(request.param, python)
    yield request.param
    signal.signal(request.param, before)


def test_forks_end_at_a_signal_as_ever(ending, tmp_path):
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT)
    with Checkpoints(pipe, tmp_path / "a") as checkpoints:
        begun, begins = multiprocessing.Pipe(duplex=False)
        fork = multiprocessing.get_context("fork").Process(target=sleep, args=(begins,))
        fork.start()
        try:
            begun.recv()
            os.kill(fork.pid, ending)
            fork.join(60.0)
            assert fork.exitcode == (-ending if ending == signal.SIGTERM else 1)
        finally:
            fork.kill()
            fork.join()
        assert not checkpoints.step()
        checkpoints.save()


def sleep(begins):
    begins.send(None)
    time.sleep(600.0)


def test_every_few_minutes(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(periodic.time, "monotonic", lambda: now[0])
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT)
    saved = []
    with Checkpoints(pipe, tmp_path / "a", every_minutes=2) as checkpoints:
        for minute in range(6):
            now[0] = 60.0 * minute
            checkpoints.step(lambda minute=minute: saved.append(minute) or {})
    assert saved == [2, 4]


@pytest.mark.parametrize("name, value", [
    ("every_steps", 0), ("every_steps", 2.0), ("keep", 0), ("keep", None), ("every_minutes", -1),
    ("every_minutes", "1"),
])  # fmt: skip
def test_numbers_that_cannot_be(name, value, tmp_path):
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT)
    with pytest.raises(ValueError, match=f"{name}={value!r}: pass a"):
        Checkpoints(pipe, tmp_path / "a", **{name: value})
    assert names(tmp_path) == []


def in_ranks(root):
    """One of two ranks catches a signal; both end after the same step, and go on from it."""
    rank = int(os.environ["TEST_RANK"])
    monotonic = Checkpoints.AGREE_S
    Checkpoints.AGREE_S = 0.0  # after every step
    split = ["tanh"]
    expected = loop(f"{root}/straight", 6, split=split)[1]
    first = loop(f"{root}/a", 6, signal_at=2 if rank == 1 else None, split=split)
    second = loop(f"{root}/a", 6, seed=9, split=split)
    assert torch.equal(torch.cat([first[1], second[1]]), expected)
    Checkpoints.AGREE_S = monotonic
    third = loop(f"{root}/b", 20, signal_at=2 if rank == 0 else None, split=split)
    with pytest.raises(ValueError, match="rank 1 has every_steps=3, rank 0 has 2. Pass the same"):
        loop(f"{root}/c", 1, every_steps=2 + rank, split=split)
    return first[3], len(first[1]), second[0], len(third[1])


def test_all_ranks_end_after_the_same_step(ranks, tmp_path):
    one, other = ranks(in_ranks, 2, str(tmp_path))
    assert one == other
    assert one[:3] == (signal.SIGTERM, 3, 3)
    assert 3 <= one[3] <= 20
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
