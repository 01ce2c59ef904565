"""Long trainings: growth is found in journals, and a short one has none."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.bench import soak


def journal(memory, *, open_files=lambda look: 20):
    """A rank's steps; it looked at every other one."""
    return [
        {
            **{"step": i, "loss": (1.0 / (1 + i)).hex(), "began": float(i), "trained": i + 0.25},
            **({"held": held(memory(i), open_files(i))} if i % 2 == 0 else {}),
        }
        for i in range(200)
    ]


def held(memory, open_files):
    return {"memory": memory, "threads": 7, "open_files": open_files, "files": 4}


def test_who_grows_is_found():
    flat, leaks = journal(lambda look: 1000), journal(lambda look: 1000 + look)
    found = soak.figures([flat, leaks])
    # From the 10 looks of steps 20 to 38 to those of steps 180 to 198.
    assert (found["memory"], found["memory_at_end"]) == (1029, 1189)
    assert found["growth"] == pytest.approx(160 / 1029)
    assert found["step_s"] == pytest.approx(0.25)
    assert found["first_loss"] > found["last_loss"]
    assert soak.has_grown(found) and not soak.has_grown(soak.figures([flat, flat]))
    opens = journal(lambda look: 1000, open_files=lambda look: 20 + look // 100)
    found = soak.figures([flat, opens])
    assert found["open_files"] == 1 and found["threads"] == found["files"] == 0
    assert soak.has_grown(found)
    assert "+1" in soak.table([{"method": "x", "steps": 200, **found}])


def test_too_few_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        soak.main(["--steps", "100"])
    assert "pass at least 400" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_soak(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(soak, "GROWTH", 0.1)  # a heap takes longer to come to rest
    monkeypatch.setattr(soak, "LOOKS", 100)
    out = tmp_path / "soak.json"
    methods = ["aqsgd:location={slots}+quant:4", "dp: dgc:0.1"]
    soak.main(["--steps", "200", "--methods", *methods, "--out", str(out)])
    rows = json.loads(out.read_text())["soak"]
    assert [row["method"] for row in rows] == methods
    assert all(row["last_loss"] < row["first_loss"] for row in rows)
    assert "dgc" in capsys.readouterr().out


@pytest.mark.slow
def test_a_soak_that_is_asked_to_end_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "recipes.bench.soak", "--methods", "none", "--steps", "100000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    soaks = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    journals = wait_for(lambda: sorted(tmp_path.glob("mpcomp-soak-*/run/journal-*.jsonl")))
    wait_for(lambda: all(path.stat().st_size for path in journals))
    soaks.send_signal(signal.SIGTERM)
    assert soaks.wait(timeout=60) == 128 + signal.SIGTERM
    wait_for(lambda: not of_its_folder(tmp_path))
    assert list(tmp_path.glob("mpcomp-soak-*")) == []


def wait_for(found, timeout_s=60.0):
    """The first thing found that is anything."""
    until = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < until, "nothing came"
        time.sleep(0.1)
    return value


def of_its_folder(folder):
    """Processes whose command line names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if str(folder).encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
