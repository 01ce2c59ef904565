"""Files of a recipe's run that are looked at: steps, a trace, a page; and a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpcomp.command import main
from mpcomp.view.run import Run
from recipes import cifar10

TINY = [
    *("--data", "digits", "--width", "4", "--epochs", "2", "--batch-size", "16", "--chunks", "2"),
    *("--train-limit", "40", "--test-limit", "20", "--precision", "fp32", "--device", "cpu"),
]
STEPS = 2  # of an epoch


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_keeps_steps_a_trace_and_a_page(tmp_path: Path) -> None:
    cifar10.main([*TINY, "--trace", "2", "--out", str(tmp_path / "run")])
    run = Run.read(tmp_path / "run")
    assert [row["step"] for row in run.steps] == list(range(2 * STEPS))
    assert run.finished and run.about["samples"] == "images"
    epochs = rows(run.files.metrics)
    for epoch, row in enumerate(epochs):
        own = run.steps[epoch * STEPS : (epoch + 1) * STEPS]
        assert sum(step["loss"] for step in own) / STEPS == pytest.approx(row["loss"])
        assert {step["samples"] for step in own} == {16}
        assert {step["lr"] for step in own} == {row["lr"]}
    assert run.sent()[-1].to_dict().items() <= epochs[-1].items()
    events = json.loads(run.files.trace.read_text())["traceEvents"]
    steps = {event["args"]["step"] for event in events if event["ph"] == "X"}
    assert steps == {2, 3}  # the first two take longer than others
    assert "forward" in run.files.page.read_text()
    assert run.files.page.read_text().count("</html>") == 1


def test_a_run_goes_on_for_longer(tmp_path: Path) -> None:
    """Its schedule is that of the longer run from there on; what was done stays."""
    short, longer = tmp_path / "short", tmp_path / "long"
    cifar10.main([*TINY, "--out", str(short)])
    before = rows(short / "metrics.jsonl")
    cifar10.main(["--resume", str(short), "--epochs", "4"])
    cifar10.main([*TINY, "--epochs", "4", "--out", str(longer)])
    extended, whole = rows(short / "metrics.jsonl"), rows(longer / "metrics.jsonl")
    assert extended[:2] == before
    assert [row["epoch"] for row in extended] == [1, 2, 3, 4]
    assert before[-1]["lr"] != whole[1]["lr"]
    assert [row["lr"] for row in extended[2:]] == pytest.approx([row["lr"] for row in whole[2:]])
    run = Run.read(short)
    assert [row["step"] for row in run.steps] == list(range(4 * STEPS))
    times = [row["time"] for row in run.steps]
    assert times == sorted(times)
    assert json.loads((short / "config.json").read_text())["epochs"] == 4
    assert json.loads((short / "summary.json").read_text())["epochs"] == 4


def test_a_run_cannot_go_on_for_less(tmp_path: Path) -> None:
    cifar10.main([*TINY, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="epochs is 1, and the run is of 2; pass more"):
        cifar10.main(["--resume", str(tmp_path), "--epochs", "1"])
    assert (tmp_path / "summary.json").exists()


def test_steps_of_a_run_that_broke_off_are_done_once(tmp_path: Path) -> None:
    cifar10.main([*TINY, "--out", str(tmp_path), "--stop-after", "1"])
    steps = tmp_path / "steps.jsonl"
    first = rows(steps)
    lost = [{**first[-1], "step": STEPS}, {**first[-1], "step": STEPS + 1}]
    with steps.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in lost) + '{"step": ')
    cifar10.main(["--resume", str(tmp_path)])
    found = rows(steps)
    assert [row["step"] for row in found] == list(range(2 * STEPS))
    assert found[:STEPS] == first


def test_no_steps_to_trace(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="trace is 0; pass at least 1"):
        cifar10.main([*TINY, "--trace", "0", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_recipes_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cifar10.main([*TINY, "--epochs", "1", "--compare", "--out", str(tmp_path / "run")])
    capsys.readouterr()
    main(["report", str(tmp_path / "run"), str(tmp_path / "run" / "uncompressed")])
    table = capsys.readouterr().out
    assert "accuracy on" in table and "uncompressed" in table and "topk:0.1" in table
