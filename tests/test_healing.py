"""Runs that go on after a process has died: attempts, errors, signals; the quiet run's bits."""

import signal
import textwrap
import time
from pathlib import Path

import pytest
import torch
from everyday import slow
from ranks import preload, start_python

preload("mpcomp.healing", "torch.distributed.run")
LIMIT_S = 120

ATTEMPTS = """
    import os, signal, sys
    from pathlib import Path
    import mpcomp

    log = Path(sys.argv[1])

    def train():
        attempt = len(log.read_text()) if log.exists() else 0
        log.write_text("x" * (attempt + 1))
        exec(sys.argv[2])

    mpcomp.heal(train, restarts=2)
    print("went on")
"""

PIPELINE = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    import mpcomp

    folder = Path(sys.argv[1])
    # Attempt -> the rank that dies in it, and before which step.
    deaths = {0: (1, 3), 1: (0, 6)} if sys.argv[2] == "deaths" else {}

    def train():
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
        pipe = mpcomp.pipeline(
            nn.Sequential(*layers), chunks=2, split=2, act_comp="aqsgd+quant:4",
            grad_comp="ef+topk:0.2", loss_fn=nn.functional.mse_loss,
        )
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        begin = 0
        if (folder / "checkpoint").exists():
            begin = pipe.load(folder / "checkpoint", optimizer=optimizer)["step"]
        dies = deaths.get(int(os.environ["MPCOMP_ATTEMPT"]))
        for step in range(begin, 8):
            if dies == (pipe.rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
            data = torch.Generator().manual_seed(step)
            x, y = torch.randn(6, 8, generator=data), torch.randn(6, 8, generator=data)
            loss = pipe.forward_backward(x, y, sample_ids=torch.arange(6))
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                pipe.save(folder / "checkpoint", optimizer=optimizer, extra={"step": step + 1})
        merged = pipe.merge()
        if pipe.rank == 0:
            torch.save({"loss": loss, **merged.state_dict()}, folder / "trained.pt")

    mpcomp.heal(train)
"""


def started(script, folder, *arguments, ranks=1):
    """The process of a script, or of the torchrun that starts it; and what that prints into."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*(launcher if ranks > 1 else []), str(path), *map(str, arguments)]
    printed = folder / "printed"
    return start_python(*command, printed=printed), printed


def run(*arguments, **options):
    """Exit status and words."""
    process, printed = started(*arguments, **options)
    process.join(LIMIT_S)
    process.kill()
    process.join()
    return process.exitcode, printed.read_text()


@pytest.mark.parametrize(
    ("what", "status", "attempts", "said"),
    [
        ("attempt < 2 and os.kill(os.getpid(), signal.SIGKILL)", 0, 3, "went on"),
        slow("os.kill(os.getpid(), signal.SIGSEGV)", 1, 3, "SIGSEGV; no attempt is left"),
        slow("if attempt < 1: raise mpcomp.PeerError('rank 7 is gone')", 0, 2, "rank 7 is gone"),
        ("raise ValueError('the batch is empty')", 1, 1, "ValueError: the batch is empty"),
        slow("sys.exit(3)", 3, 1, ""),
    ],
    ids=["killed", "always killed", "another rank", "error", "exit"],
)
def test_what_is_tried_again(tmp_path, what, status, attempts, said):
    ended, words = run(ATTEMPTS, tmp_path, tmp_path / "log", what)
    assert ended == status, words
    assert len((tmp_path / "log").read_text()) == attempts
    assert said in words


def test_a_signal_to_end_reaches_the_fork_and_ends_both(tmp_path):
    log = tmp_path / "log"
    waits = (
        f"import time; Path({str(log)!r} + '.pid').write_text(str(os.getpid())); time.sleep(600)"
    )
    process, _ = started(ATTEMPTS, tmp_path, log, waits)
    try:
        pid = Path(f"{log}.pid")
        deadline = time.monotonic() + LIMIT_S
        while not pid.exists() or not pid.read_text():
            assert time.monotonic() < deadline, "the fork has not begun"
            time.sleep(0.05)
        process.terminate()
        process.join(LIMIT_S)
        assert process.exitcode == 128 + signal.SIGTERM
        assert not Path(f"/proc/{pid.read_text()}").exists()
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_kills_leave_no_trace_in_the_weights(tmp_path):
    found = {}
    for name in ("quiet", "deaths"):
        folder = tmp_path / name
        folder.mkdir()
        status, words = run(PIPELINE, folder, folder, name, ranks=2)
        assert status == 0, words
        assert words.count("was ended by SIGKILL; all ranks begin again") == (
            2 if name == "deaths" else 0
        )
        found[name] = torch.load(folder / "trained.pt")
    assert found["quiet"].keys() == found["deaths"].keys()
    for name, value in found["quiet"].items():
        assert torch.equal(value, found["deaths"][name]), name


@pytest.mark.slow
def test_a_process_that_cannot_be_forked_is_refused(tmp_path):
    threads = """
        import torch
        import mpcomp
        torch.set_num_threads(2)
        torch.randn(4096, 4096).exp()
        mpcomp.heal(print)
    """
    status, words = run(threads, tmp_path)
    assert status == 1
    assert "heal: torch's threads have begun" in words
