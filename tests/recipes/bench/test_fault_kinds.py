"""Faults of all kinds on two hosts: how they are drawn and counted, and some of them in small."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from recipes.bench import fault_kinds, faults
from recipes.bench.fault_kinds import KINDS, parse_kinds
from recipes.lab import show


def options(*arguments):
    return faults._parse(["--steps", "200", *arguments])


def test_kinds_are_named_and_numbered():
    assert parse_kinds("stop, reset:50,away:3") == {"stop": 0, "reset": 50, "away": 3}
    assert list(parse_kinds("all")) == list(KINDS)


@pytest.mark.parametrize("text", ["stops", "reset:0", "reset:many", "reset:", "stop,,loop"])
def test_kinds_that_there_are_not(capsys, text):
    with pytest.raises(SystemExit):
        faults.main(["--kinds", text])
    assert "expected NAME or NAME:NUMBER of all, kill, " in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(3))
def test_as_many_are_drawn_as_are_asked_for_over_the_whole_run(seed):
    asked = options("--kinds", "stop,loop,reset:5,away:3", "--faults", "20", "--seed", str(seed))
    drawn = fault_kinds.drawn(asked, 2)
    kinds = [fault.kind for fault in drawn]
    assert len(kinds) == 28 and kinds.count("reset") == 5 and kinds.count("away") == 3
    assert {"stop", "loop"} <= set(kinds) and kinds != sorted(kinds)
    steps = [fault.step for fault in drawn]
    assert steps == sorted(steps) and steps[0] < 10 and 170 < steps[-1] < 190
    assert {fault.rank for fault in drawn} == {0, 1}
    assert fault_kinds.drawn(asked, 2) == drawn


def test_without_kinds_the_settings_are_those_of_before():
    assert set(faults._settings(options())) == {
        *("ranks", "steps", "kill_every", "save_every", "step_s", "seed", "cores")
    }
    assert faults._settings(options("--kinds", "kill"))["kinds"] == {"kill": 0}


def test_the_table_counts_what_faults_led_to(tmp_path, capsys):
    events = [
        {"kind": "stop", "outcome": "healed", "seconds": 2.0},
        {"kind": "kill", "outcome": "healed", "seconds": 1.0},
        {"kind": "kill", "outcome": "stuck", "seconds": 240.0},
        {"kind": "kill", "outcome": "started again", "seconds": 3.0},
    ]
    row = {"method": "none", "steps": 200, "faults": 4, "events": events}
    row |= {"differing_losses": 1, "differing_weights": 2, "lost_files": 3}
    path = tmp_path / "winds.json"
    path.write_text(json.dumps({"settings": {}, "winds": [row]}))
    show.main([str(path)])
    lines = capsys.readouterr().out.splitlines()
    kill, stop = (next(line for line in lines if f" {kind} " in line) for kind in ("kill", "stop"))
    assert kill.split() == ["none", "kill", "3", "1", "1", "1", "3.0", "240.0"]
    assert stop.split() == ["none", "stop", "1", "1", "2.0", "2.0"]
    assert "none: 4 faults in 200 steps, 1 differing losses, 2 differing weights, 3" in lines[-2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_kind_leaves_no_trace(tmp_path):
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("no network namespaces: they want Linux, iproute2 and root")
    out = tmp_path / "winds.json"
    kinds = ",".join(f"{kind}:1" for kind in KINDS)
    command = ["--kinds", kinds, "--steps", "160", "--save-every", "2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.bench.faults", *command],
        capture_output=True,
        text=True,
        timeout=1100,
        cwd=fault_kinds.__file__.rpartition("/recipes/")[0],
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["winds"]
    outcomes = {event["kind"]: event["outcome"] for event in row["events"]}
    assert outcomes.keys() == KINDS.keys()
    assert "stuck" not in outcomes.values()
    assert row["differing_losses"] == row["differing_weights"] == row["lost_files"] == 0
    expected = {"kill": "healed", "own-file": "went on", "launcher-kill": "started again"}
    for kind, outcome in (expected | dict.fromkeys(fault_kinds.REFUSED, "refused")).items():
        assert outcomes[kind] == outcome
