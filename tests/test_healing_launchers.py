"""Launchers that are killed or told to end, on one machine or one of two: all ranks end."""

import json
import os
import signal
import sys

import pytest
import torch
from everyday import slow
from launchers import Launchers
from torch import nn

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel ends processes with their parents on Linux alone"
)

#: Trains until it is told to end. With "plain" nothing catches a signal.
TRAINS = """
    import sys
    from pathlib import Path
    import torch
    from torch import nn
    import mpcomp
    from mpcomp import healing

    folder, way = Path(sys.argv[1]), sys.argv[2]
    healing._PATIENCE_S = 3.0

    def train():
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=1, split=2,
            loss_fn=nn.functional.mse_loss, timeout=20,
        )
        signals = () if way == "plain" else (2, 15)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        with mpcomp.Checkpoints(pipe, folder / "run", signals=signals) as checkpoints:
            step = checkpoints.restore().get("step", 0)
            while True:
                pipe.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == 3:
                    (folder / str(pipe.rank)).touch()
                if checkpoints.step({"step": step}):
                    break
        (folder / f"ended-{pipe.rank}").write_text(str(step))

    mpcomp.heal(train)
    (folder / "went on").touch()
"""

ONE_OF_TWO = {"machines": 2, "ranks": 1}
ALONE = {"machines": 1, "ranks": 2}


def assert_saved_where_it_ended(folder):
    """Both ranks left the loop after the step of the checkpoint."""
    saved = json.loads((folder / "run" / "checkpoint.json").read_text())["num_steps"]
    assert [path.read_text() for path in folder.glob("ended-*")] == 2 * [str(saved)]


@pytest.mark.parametrize(
    "which, shape, says",
    [
        (0, ALONE, ""),
        slow(1, ONE_OF_TWO, "rank 1 did not begin again within 3 s: its torchrun or its machine"),
        slow(0, ONE_OF_TWO, ""),
    ],
    ids=["alone", "one of two", "that has the store"],
)
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path, which, shape, says):
    with Launchers(tmp_path, TRAINS, "saving", **shape) as launchers:
        launchers.wait_for("0", "1")
        launchers.kill(which, signal.SIGKILL)
        statuses = launchers.wait_for_all_to_end()
        assert statuses[which] == -signal.SIGKILL and 0 not in statuses
        assert says in launchers.printed()
        assert not (tmp_path / "went on").exists()


@pytest.mark.parametrize(
    "number, which, way",
    [
        (signal.SIGTERM, 1, "saving"),
        slow(signal.SIGINT, 1, "saving"),
        slow(signal.SIGTERM, 0, "plain"),
    ],
)
def test_a_signal_to_one_of_two_launchers_ends_all_ranks(tmp_path, number, which, way):
    with Launchers(tmp_path, TRAINS, way, **ONE_OF_TWO) as launchers:
        launchers.wait_for("0", "1")
        launchers.kill(which, number)
        assert 0 not in launchers.wait_for_all_to_end()
        assert not (tmp_path / "went on").exists()
        if way == "saving":
            assert_saved_where_it_ended(tmp_path)


#: Calls `heal` twice, as for pretraining and finetuning; the test says when a call may end.
CALLS = """
    import json, os, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    import mpcomp

    folder, rank = Path(sys.argv[1]), os.environ["RANK"]

    def may_go_on(pipe, call):
        with pipe.mesh.abort_all_on_error():
            there = (folder / f"go-{call}").exists()
            return pipe.mesh.broadcast_object(there, 0, "word of the test")

    def train(call):
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=1, split=2,
            loss_fn=nn.functional.mse_loss, timeout=20,
        )
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
        with mpcomp.Checkpoints(pipe, folder / "run", optimizer=optimizer) as checkpoints:
            begin = checkpoints.restore().get("step", 0)
            number = len(list(folder.glob(f"{call}-{rank}-*")))
            for step in range(begin, 6 * (call + 1)):
                while step == 6 * call + 3 and not may_go_on(pipe, call):
                    (folder / f"{call}-{rank}-{number}").touch()
                    time.sleep(0.1)
                loss = pipe.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
                optimizer.step()
                optimizer.zero_grad()
                with (folder / f"losses-{rank}").open("a") as file:
                    print(step, loss.item().hex(), file=file)
                checkpoints.save({"step": step + 1})

    for call in (0, 1):
        mpcomp.heal(lambda: train(call))
    (folder / f"done-{rank}").touch()
"""


def losses_of(folder):
    """Of each step, by any rank and in any attempt."""
    lines = [line for path in folder.glob("losses-*") for line in path.read_text().splitlines()]
    return sorted(set(lines), key=lambda line: int(line.split()[0]))


def the_quiet_losses():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    lines = []
    for step in range(12):
        loss = nn.functional.mse_loss(plain(torch.ones(2, 4)), torch.zeros(2, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lines.append(f"{step} {loss.item().hex()}")
    return lines


@pytest.mark.parametrize(
    "which, calls, times",
    [
        slow((1,), (0, 1), 2),
        slow((0, 1), (0,), 1),
        slow((0,), (1,), 1),
    ],
    ids=["often", "both", "that has the store"],
)
def test_a_launcher_that_is_started_again_joins_the_others(tmp_path, which, calls, times):
    """The losses are the plain model's; other launchers go on, unless the store was with it."""
    with Launchers(tmp_path, CALLS, **ONE_OF_TWO) as launchers:
        for call in (0, 1):
            launchers.wait_for(f"{call}-0-0", f"{call}-1-0")
            for number in range(times * (call in calls)):
                for machine in which:
                    launchers.kill(machine, signal.SIGKILL)
                for machine in {0, 1} if 0 in which else which:
                    launchers.start_again(machine)
                launchers.wait_for(f"{call}-0-{number + 1}", f"{call}-1-{number + 1}")
            (tmp_path / f"go-{call}").touch()
        assert launchers.wait_for_all_to_end() == [0, 0], launchers.printed()
        assert losses_of(tmp_path) == the_quiet_losses()
        started_anew = "start it anew here as well" in launchers.printed()
        assert started_anew == (which == (0,))


# -- the workers of loaders -----------------------------------------------------------------------


LOADS = """
    import os, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    import mpcomp

    folder, context = Path(sys.argv[1]), sys.argv[2]

    class Rows(Dataset):
        def __len__(self):
            return 1_000_000
        def __getitem__(self, i):
            return torch.ones(4), torch.ones(4)

    def train():
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=1, split=2,
            loss_fn=nn.functional.mse_loss, timeout=60,
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        with mpcomp.Checkpoints(pipe, folder / "run", optimizer=optimizer) as checkpoints:
            loader = DataLoader(
                Rows(), 2, num_workers=2, multiprocessing_context=context, prefetch_factor=1,
            )
            for step, (x, y) in enumerate(loader, 1):
                pipe.forward_backward(x, y)
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.05)
                if step == 3:
                    (folder / str(pipe.rank)).write_text(str(os.getpid()))
                if checkpoints.step({"step": step}):
                    break
        (folder / f"ended-{pipe.rank}").write_text(str(step))

    if __name__ == "__main__":
        if sys.argv[3] == "heal":
            mpcomp.heal(train)
        else:
            train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, to, context, way",
    [
        (signal.SIGTERM, "torchrun", "fork", "plain"),
        (signal.SIGINT, "group", "fork", "plain"),
        (signal.SIGTERM, "torchrun", "spawn", "plain"),
        (signal.SIGTERM, "group", "fork", "heal"),
    ],
)
def test_a_signal_to_ranks_and_their_workers_ends_with_a_checkpoint(
    tmp_path, number, to, context, way
):
    with Launchers(tmp_path, LOADS, context, way, ranks=2) as launchers:
        launchers.wait_for("0", "1")
        if to == "torchrun":
            launchers.kill(0, number)
        else:
            os.killpg(int((tmp_path / "1").read_text()), number)
        launchers.wait_for_all_to_end()
        assert "is killed by signal" not in launchers.printed()
        assert_saved_where_it_ended(tmp_path)


# -- several attempts and calls -------------------------------------------------------------------


TWICE = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    import mpcomp

    folder, where, way = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def train(call):
        pipe = mpcomp.pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=1, split=2,
            loss_fn=nn.functional.mse_loss,
        )
        for step in range(3):
            here = f"{restart} {call} {os.environ['MPCOMP_ATTEMPT']}"
            if (here, pipe.rank, step) == (where, 1, 1):
                if way == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(28, "No space left on device")
            pipe.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        (folder / f"{here} {pipe.rank}").touch()

    for call in range(2):
        mpcomp.heal(lambda: train(call))
"""


@pytest.mark.parametrize(
    "where, way, trained",
    [
        ("0 1 0", "dies", ["0 0 0", "0 1 1"]),
        slow("0 0 0", "dies", ["0 0 1", "0 1 0"]),
        slow("0 1 0", "fails", ["0 0 0", "1 0 0", "1 1 0"]),
    ],
)
def test_two_calls_and_restarts_of_torchrun_do_not_meet(tmp_path, where, way, trained):
    """Named are torchrun's attempt, the call of `heal`, and its attempt."""
    options = ("--max-restarts=1", "--monitor-interval=0.1")
    with Launchers(tmp_path, TWICE, where, way, ranks=2, options=options) as launchers:
        assert launchers.wait_for_all_to_end() == [0], launchers.printed()
    expected = {f"{name} {rank}" for name in trained for rank in range(2)}
    assert {path.name for path in tmp_path.glob("? ? ? ?")} == expected


def test_two_calls_of_ranks_that_were_started_by_hand(tmp_path):
    with Launchers(tmp_path, TWICE, "0 1 0", "dies", ranks=2, by_hand=True) as launchers:
        assert launchers.wait_for_all_to_end() == [0, 0], launchers.printed()
    assert len(list(tmp_path.glob("? ? ? ?"))) == 4


DIFFERS = """
    import os, sys
    from pathlib import Path
    import torch
    from torch import nn
    import mpcomp

    folder, what = Path(sys.argv[1]), sys.argv[2]

    def train():
        pipe = mpcomp.pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=1, split=2,
            loss_fn=nn.functional.mse_loss, timeout=5,
        )
        (folder / f"{os.environ['MPCOMP_ATTEMPT']} {pipe.rank}").touch()
        x = torch.ones(2, 4)
        for step in range(3):
            pipe.forward_backward(x, x)
            if step == 1 and pipe.rank == 1:
                if what == "return":
                    return
                exec(what)

    mpcomp.heal(train)
"""

RETURNED = "rank 1 (stage 1) ended without an error, and rank 0 (stage 0) waited for the "


DIFFERENT = "ranks waited for different things, rank 0 for the "


@pytest.mark.parametrize(
    "what, says, by_hand",
    [
        ("return", RETURNED, True),
        slow("return", RETURNED, False),
        slow("sys.exit(0)", RETURNED, True),
        slow("pipe.merge()", DIFFERENT, False),
        slow("pipe.save(folder / 'run')", DIFFERENT, False),
    ],
    ids=["return", "return, torchrun", "exit", "merge, torchrun", "save, torchrun"],
)
def test_ranks_that_make_different_calls_are_tried_once(tmp_path, what, says, by_hand):
    with Launchers(tmp_path, DIFFERS, what, ranks=2, by_hand=by_hand) as launchers:
        assert set(launchers.wait_for_all_to_end()) == {1}
    assert {path.name for path in tmp_path.glob("? ?")} == {"0 0", "0 1"}
    assert says in (said := launchers.printed())
    assert "every rank must make the same calls, in the same order" in said
