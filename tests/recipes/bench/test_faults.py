"""Kills and bad links: what the benches count, and both of them in small."""

import itertools
import json

import pytest

from recipes.bench import bad_links, faults, training_worker
from recipes.bench.training_worker import Job, Kill


def step(number, loss, began, *, saved=False):
    ended = began + 0.5 + 0.25 * saved
    return {"step": number, "loss": loss, "began": began, "trained": began + 0.5, "ended": ended}


def job_in(folder, **changes):
    fields = {"stages": 2, "replicas": 1, "steps": 3, "save_every": 2, "step_s": 0.0}
    fields |= {"watch_every": 0, "act": "none", "grad": "none", "dp": "none", "kills": ()}
    return Job(folder=str(folder), **{**fields, **changes})


def test_a_killed_run_is_counted_beside_the_quiet_one(tmp_path):
    kill = Kill(step=2, rank=1, after_s=0.1)
    job = job_in(tmp_path, kills=(kill,))
    (tmp_path / "kill-0.json").write_text(json.dumps({"step": 2, "time": 101.0}))
    quiet = [[step(0, "a", 0.0), step(1, "b", 1.0, saved=True), step(2, "c", 2.0)]]
    again = [step(1, "b", 104.0, saved=True), step(2, "x", 105.0)]
    first = [step(0, "a", 99.0), step(1, "b", 100.0, saved=True)]
    killed = [[*first, *again], [step(0, "a", 99.0)]]
    found = faults.compare(job, quiet, killed)
    assert found["kills"] == 1
    assert found["kills_in_saves"] == 0
    assert found["differing_losses"] == 1
    assert found["repeated_steps"] == 1
    assert found["recovery_s"] == pytest.approx(104.75 - 101.0 - 0.5)
    # In 50 steps of a second one that is repeated, the recovery, and 25 saves.
    assert found["save_s"] == pytest.approx(0.25)
    assert found["throughput"] == pytest.approx(50 / (50 + 1 + 3.25 + 25 * 0.25))


def test_kills_are_drawn_over_the_whole_run_and_some_for_saves():
    options = faults._parse(["--steps", "1000", "--kill-every", "50", "--save-every", "4"])
    kills = list(faults._kills(options, step_s=0.1, save_s=0.2))
    assert len(kills) == 20
    assert {kill.rank for kill in kills} == {0, 1, 2, 3}
    assert all(before.step < after.step + 4 for before, after in itertools.pairwise(kills))
    aimed = [kill for kill in kills if kill.after_s > 0.1]
    assert len(aimed) == 5
    assert all((kill.step + 1) % 4 == 0 for kill in aimed)


def test_a_line_that_a_kill_has_cut_off_is_no_step(tmp_path):
    path = tmp_path / "journal-0.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo')
    assert training_worker._read_journal(path) == [{"step": 0}]
    path.write_text('{"step": 0}\n{"step" 1}\n')
    with pytest.raises(json.JSONDecodeError):
        training_worker._read_journal(path)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--ranks", "3"], "an even number"), (["--ranks", "0"], "an even number")],
)
def test_bad_options_of_kills(capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        faults.main(arguments)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--hosts", "1"], ["--loopback"], ["--steps", "0"]])
def test_bad_options_of_links(capsys, arguments):
    with pytest.raises(SystemExit):
        bad_links.main(arguments)
    assert "pass at least 1" in (said := capsys.readouterr().err) or "two hosts" in said


@pytest.mark.parametrize(
    ("links", "losses", "error", "seconds", "right"),
    [
        ("5 % lost", ["a", "b"], None, 3.0, True),
        ("5 % lost", ["a", "x"], None, 3.0, False),
        ("5 % lost", ["a"], "rank 1 is gone", 3.0, False),
        (bad_links.CUT, ["a"], "rank 1 is gone", 60.0, True),
        (bad_links.CUT, ["a"], "rank 1 is gone", 67.0, False),
        (bad_links.CUT, ["a", "b"], None, 3.0, False),
    ],
)
def test_a_row_is_right_or_not(links, losses, error, seconds, right):
    quiet = {"losses": ["a", "b"], "seconds": 2.0}
    answers = [{"losses": losses, "seconds": seconds, "error": error}] * 2
    row = bad_links._row(links, answers, quiet, timeout_s=60.0)
    assert row["right"] is right
    calm = bad_links._row(bad_links.QUIET, [{**quiet, "error": None}] * 2, None, timeout_s=60.0)
    assert links in bad_links.table([calm, row])


def test_repeats_are_one_row():
    def row(links, seconds, error=None):
        answers = [{"losses": ["a", "b"], "seconds": seconds, "error": error}] * 2
        return bad_links._row(links, answers, None, timeout_s=60.0)

    lost, cut = "5 % lost", bad_links.CUT
    rows = [
        *(row(bad_links.QUIET, 2.0), row(lost, 3.0), row(cut, 61.0, "rank 1 is gone")),
        *(row(bad_links.QUIET, 1.0), row(lost, 2.0), row(cut, 63.0, "rank 1 is gone")),
    ]
    lines = bad_links.table(rows).splitlines()
    assert len(lines) == 2 + 3 + 2 and lines[-1] == "rank 1: rank 1 is gone"
    assert lines[3].split()[-8:] == ["2", "4", "0", "1.8", "(1.5", "to", "2.0)", "well"]
    assert "errors on 2 of 2, after 63.0 s at the latest" in lines[4]


@pytest.mark.slow
def test_kills_of_a_small_training(tmp_path, capsys):
    out = tmp_path / "faults.json"
    arguments = ["--ranks", "2", "--steps", "40", "--kill-every", "20", "--out", str(out)]
    faults.main([*arguments, "--methods", "aqsgd+quant:4"])
    (row,) = json.loads(out.read_text())["faults"]
    assert row["kills"] == 2
    assert row["differing_losses"] == row["differing_weights"] == 0
    assert "aqsgd+quant:4" in capsys.readouterr().out
