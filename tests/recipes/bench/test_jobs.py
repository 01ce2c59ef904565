"""`recipes.bench.jobs`: what a job has said is kept, however it ends; nothing of it stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.bench import jobs
from recipes.bench.jobs import DONE, FAILED, STOPPED, Ended, Job, Said, run_jobs

pytestmark = pytest.mark.timeout(120)


def speaks(reporter, *rows):
    for row in rows:
        reporter.say({"row": row})


def hangs(reporter, folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(folder) / "pids").write_text(f"{os.getpid()} {child.pid}")
    reporter.say({"row": 1})
    time.sleep(600)


def raises(reporter):
    reporter.say({"row": 1})
    raise ValueError("pass another")


def dies(reporter):
    reporter.say({"row": 1})
    os.kill(os.getpid(), signal.SIGKILL)


def ends_by_itself(reporter):
    while reporter.left_s > 0:
        time.sleep(0.01)
    reporter.say({"row": "checkpoint"})


def outcome(given, *, workers=1, seconds=60.0):
    said, ended = {}, {}
    for event in run_jobs(given, until=time.monotonic() + seconds, workers=workers):
        if isinstance(event, Said):
            said.setdefault(event.job.name, []).append(event.row["row"])
        else:
            assert isinstance(event, Ended)
            ended[event.job.name] = event.state, event.why
    return said, ended


def is_alive(pid):
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(folder):
    """Waits until the processes that `hangs` has noted have ended."""
    pids = (folder / "pids").read_text().split()
    for _ in range(200):
        if not any(map(is_alive, pids)):
            return True
        time.sleep(0.05)
    return False


def test_jobs_follow_each_other_and_their_rows_come_as_they_are_said():
    said, ended = outcome([Job("a", speaks, 30, (1, 2)), Job("b", speaks, 30, (3,))])
    assert said == {"a": [1, 2], "b": [3]}
    assert ended == {"a": (DONE, ""), "b": (DONE, "")}


def test_errors_and_deaths_end_one_job_alone():
    given = [Job("raises", raises, 30), Job("dies", dies, 30), Job("last", speaks, 30, (1,))]
    said, ended = outcome(given, workers=2)
    assert said == {"raises": [1], "dies": [1], "last": [1]}
    assert ended["raises"] == (FAILED, "ValueError: pass another")
    assert ended["dies"] == (FAILED, "died with exit code -9")
    assert ended["last"] == (DONE, "")


def test_a_job_that_hangs_is_killed_with_all_that_it_has_started(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "GRACE_S", 0.5)
    said, ended = outcome([Job("hangs", hangs, 4, (str(tmp_path),))])
    state, why = ended["hangs"]
    assert said == {"hangs": [1]} and state == STOPPED and "killed after" in why
    assert gone(tmp_path)


def test_a_job_may_end_by_itself_at_its_limit():
    said, ended = outcome([Job("a", ends_by_itself, 0.5)])
    assert said == {"a": ["checkpoint"]} and ended["a"][0] == STOPPED


def test_what_would_not_fit_is_not_begun():
    said, ended = outcome([Job("a", speaks, 30, (1,))], seconds=0.0)
    assert said == {} and ended == {}


def test_a_reader_that_stops_ends_the_jobs(tmp_path):
    events = run_jobs([Job("hangs", hangs, 60, (str(tmp_path),))], until=time.monotonic() + 60)
    assert next(events).row == {"row": 1}
    events.close()
    assert gone(tmp_path)


def test_jobs_end_with_whoever_runs_them(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2]); import test_jobs as t\n"
        "job = t.Job('hangs', t.hangs, 60, (sys.argv[1],))\n"
        "for event in t.run_jobs([job], until=time.monotonic() + 60): print('said', flush=True)"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert runner.stdout.readline() == b"said\n"
    runner.kill()
    runner.wait()
    runner.stdout.close()
    assert gone(tmp_path)


def says_what_is_loaded(reporter):
    reporter.say({"row": "frozen" in sys.modules})


@pytest.mark.usefixtures("ranks")
def test_jobs_are_forked_from_the_server_of_ranks():
    """A process has one: theirs, with nothing loaded, would cost each rank seconds of imports."""
    said, _ = outcome([Job("a", says_what_is_loaded, 30.0)])
    assert said == {"a": [True]}
