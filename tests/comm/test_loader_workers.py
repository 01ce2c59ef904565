"""Workers of a loader end with their rank."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from everyday import slow

LIMIT_S = 120

LOADS = """
    import os, signal, sys
    from torch.utils.data import DataLoader, _utils
    from mpcomp.comm.loader_workers import attend_to_the_rank_alone

    # So torch's own workers would not look for their parent.
    _utils.worker.MP_STATUS_CHECK_INTERVAL = 1e6

    if __name__ == "__main__":
        attend_to_the_rank_alone()
        context, persistent, end = sys.argv[1], sys.argv[2] == "persistent", sys.argv[3]
        loader = DataLoader(
            range(8), num_workers=2, multiprocessing_context=context, persistent_workers=persistent,
        )
        batches = iter(loader)
        next(batches)
        print(*(worker.pid for worker in batches._workers), flush=True)
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif end == "exhausted":
            assert len(list(batches)) == 7
        elif end == "error":
            raise ValueError("of the script")
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="no list of processes")
@pytest.mark.parametrize(
    "context, persistent, end",
    [
        ("fork", "", "killed"),
        slow("fork", "persistent", "killed"),
        slow("spawn", "", "killed"),
        slow("forkserver", "", "killed"),
        slow("fork", "", "exhausted"),
        slow("fork", "persistent", "exhausted"),
        slow("fork", "", "in the middle"),
        slow("fork", "", "error"),
    ],
)
def test_workers_end_with_their_rank(tmp_path, context, persistent, end):
    script = tmp_path / "script.py"
    script.write_text("\n".join(line[4:] for line in LOADS.splitlines()))
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), context, persistent, end],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    workers = [int(number) for number in done.stdout.split()]
    try:
        assert len(workers) == 2
        assert done.returncode == {"killed": -signal.SIGKILL, "error": 1}.get(end, 0)
        deadline = time.monotonic() + LIMIT_S
        while any(_runs(number) for number in workers):
            assert time.monotonic() < deadline, "workers are left"
            time.sleep(0.05)
    finally:
        for number in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def _runs(number):
    """Whether there is such a process, but for one that nobody has collected."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
