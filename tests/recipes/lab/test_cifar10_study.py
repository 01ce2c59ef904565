"""The study on a tiny grid: it runs, it is stopped, it goes on, and it refuses to mix settings."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.lab import cifar10_study
from recipes.run_folder import append_json_line, read_json_lines

ROOT = Path(__file__).parents[3]
TINY = [
    *("--data", "digits", "--width", "4", "--epochs", "1", "--batch-size", "16", "--chunks", "2"),
    *("--train-limit", "32", "--test-limit", "20", "--precision", "fp32", "--device", "cpu"),
    *("--warmup-epochs", "0"),
]


def options(out: Path, *more: str) -> list[str]:
    return [*TINY, "--out", str(out), *more]


def test_finished_runs_are_skipped(tmp_path, capsys, monkeypatch):
    out = tmp_path / "study.jsonl"
    here = ["--workers", "0", "--rows", "bf16", "top 10 %"]
    cifar10_study.main(options(out, *here, "--seeds", "1"))
    first = read_json_lines(out)
    assert [(line["row"], line["seed"]) for line in first] == [("bf16", 0), ("top 10 %", 0)]
    assert first[0]["data"] == "digits" and first[1]["settings"]["width"] == 4
    assert first[1]["wire_bytes"] < 0.25 * first[0]["wire_bytes"]

    trained = []
    train = cifar10_study.train

    def counting(config, settings, ranks):
        trained.append((config.act, config.seed))
        return train(config, settings, ranks)

    monkeypatch.setattr(cifar10_study, "train", counting)
    cifar10_study.main(options(out, *here, "--seeds", "2"))
    assert trained == [(("bf16",), 1), (("topk:0.1",), 1)]
    assert read_json_lines(out)[:2] == first
    assert "| top 10 % |" in capsys.readouterr().out


def test_divergence_is_a_result(tmp_path, monkeypatch, capsys):
    def diverges(*args, **kwargs):
        raise FloatingPointError("NaN at boundary 0")

    monkeypatch.setattr(cifar10_study, "run", diverges)
    out = tmp_path / "study.jsonl"
    cifar10_study.main(options(out, "--workers", "0", "--rows", "bf16", "--seeds", "1"))
    assert read_json_lines(out)[0]["diverged"] == "NaN at boundary 0"
    assert "bf16 (1 diverged)" in capsys.readouterr().out


def test_other_settings_are_refused(tmp_path):
    out = tmp_path / "study.jsonl"
    here = ["--workers", "0", "--rows", "bf16", "--seeds", "1"]
    cifar10_study.main(options(out, *here))
    with pytest.raises(SystemExit, match="other settings: {'width': 4}.*another --out"):
        cifar10_study.main(options(out, *here, "--width", "8"))
    with pytest.raises(SystemExit, match="other settings: {'warmup_epochs': "):
        cifar10_study.main(options(out, *here, "--warmup-epochs", "3"))


def test_runs_of_a_time_before_an_option_had_its_default(tmp_path):
    out = tmp_path / "study.jsonl"
    here = ["--workers", "0", "--rows", "bf16", "--seeds", "1"]
    cifar10_study.main(options(out, *here))
    [line] = read_json_lines(out)
    assert "keep" not in line["settings"]  # the number of checkpoints changes no result
    del line["settings"]["nesterov"], line["settings"]["in_flight"]
    out.unlink()
    append_json_line(out, line)
    cifar10_study.main(options(out, *here))
    assert read_json_lines(out) == [line]

    line["settings"]["nesterov"] = True
    out.unlink()
    append_json_line(out, line)
    with pytest.raises(SystemExit, match="other settings: {'nesterov': True}"):
        cifar10_study.main(options(out, *here))


def test_every_row_trains(tmp_path):
    out = tmp_path / "study.jsonl"
    cifar10_study.main(options(out, "--workers", "0", "--seeds", "1", "--test-limit", "4"))
    lines = {line["row"]: line for line in read_json_lines(out)}
    assert list(lines) == list(cifar10_study.ROWS)
    assert not any("diverged" in line for line in lines.values())
    first_visits = {"top 10 %, AQ-SGD", "top 30 %, AQ-SGD"}  # their activations go raw once
    assert 0.5 < lines["bf16"]["wire_ratio"] < 0.52  # of fp32, and headers
    for row in lines.keys() - {"bf16"}:
        assert lines[row]["wire_ratio"] < (0.7 if row in first_visits else 0.6), row


def test_warm_up_is_for_the_rows_that_have_it():
    parsed = cifar10_study.parse_args(options(Path("x"), "--warmup-epochs", "2"))
    plain, warm = (
        cifar10_study.configuration(parsed, row, seed=0)
        for row in ("top 10 %", "top 10 %, after warm-up")
    )
    assert (plain.warmup_epochs, warm.warmup_epochs) == (0, 2)


def test_table_needs_results(tmp_path):
    with pytest.raises(SystemExit, match="has no results yet"):
        cifar10_study.main(["--table", "--out", str(tmp_path / "nothing.jsonl")])


def test_aqsgd_row_is_keyed_by_sample(tmp_path):
    out = tmp_path / "study.jsonl"
    rows = ["--rows", "top 10 %, AQ-SGD", "top 10 %"]
    cifar10_study.main(options(out, "--workers", "0", "--seeds", "1", *rows, "--epochs", "2"))
    aqsgd, plain = read_json_lines(out)
    assert aqsgd["row"] == "top 10 %, AQ-SGD"
    assert aqsgd["wire_bytes"] > 1.5 * plain["wire_bytes"]  # first visits go raw


def test_stopped_with_workers_and_continued(tmp_path):
    """A signal ends the study and its workers; the same command runs only what is missing."""
    out = tmp_path / "study.jsonl"
    more = options(out, "--rows", "bf16", "top 10 %", "--seeds", "3")
    command = [sys.executable, "-m", "recipes.lab.cifar10_study", *more, "--workers", "2"]
    study = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not read_json_lines(out) and study.poll() is None:
        time.sleep(0.02)
    study.send_signal(signal.SIGTERM)
    assert study.wait(timeout=60) != 0
    wait_until_gone(study.pid)
    before = read_json_lines(out)
    assert 0 < len(before) < 6

    cifar10_study.main([*more, "--workers", "0"])
    after = read_json_lines(out)
    assert after[: len(before)] == before
    assert len({(line["row"], line["seed"]) for line in after}) == len(after) == 6


def wait_until_gone(process_group: int, seconds: float = 30.0) -> None:
    """Fails if a process of the group outlives the study."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(process_group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"workers outlived the study by {seconds} s")
