"""The log of a user's own run: its files in one process and in two, and what is read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows
from ranks import preload

import mpcomp
from mpcomp.monitor import run_log
from mpcomp.view.json_files import JsonLinesTail, append_json_lines
from mpcomp.view.run import PARTS, Run

preload("test_run_log")

STEPS = 6


def train(folder: str, steps: int = STEPS, begin: int = 0) -> dict[str, Any]:
    """A short run, whose report it returns."""
    torch.manual_seed(1)
    pipe = mpcomp.pipeline(
        mlp(),
        chunks=2,
        split=MLP_SPLIT[:1],
        act_comp="topk:0.2",
        grad_comp="ef+quant:4",
        loss_fn=F.cross_entropy,
    )
    pipe.num_steps = begin
    log = mpcomp.RunLog(pipe, folder, total_steps=STEPS, samples="rows")
    for seed in range(begin, steps):
        log.step(pipe.forward_backward(*rows(6, seed)), num_samples=6, lr=0.1)
    log.close()
    return pipe.report(show=False)


def check(run: Run, report: dict[str, Any]) -> None:
    """The log says what the report does."""
    assert [row["step"] for row in run.steps] == list(range(STEPS))
    assert run.sent()[-1].to_dict() == {
        name: report[name] for name in ("wire_bytes", "dense_bytes", "num_elements")
    }
    windows = [window for _, window in run.windows]
    assert sum(window["steps"] for window in windows) == STEPS
    for figures, entry in zip(run.link_figures(windows), report["boundaries"], strict=True):
        assert figures["wire_bytes"] == pytest.approx(entry["train"]["wire_bytes"] / STEPS)
        assert figures["ratio"] == pytest.approx(entry["train"]["ratio"])
        assert figures["below_bf16"] == pytest.approx(entry["train"]["below_bf16"])
        assert 0 < figures["relative_error"] < 1
    for times in run.rank_times(windows):
        assert set(times) == set(PARTS)
        assert all(seconds >= 0 for seconds in times.values()) and times["compute"] > 0
    assert run.label == "topk:0.2 / ef+quant:4"
    assert run.finished


def test_one_process(tmp_path: Path) -> None:
    report = train(str(tmp_path))
    check(Run.read(tmp_path), report)


def test_two_ranks_log_what_one_process_does(tmp_path: Path, ranks: Any) -> None:
    train(str(tmp_path / "one"))
    reports = ranks(train, 2, str(tmp_path / "two"))
    one, two = Run.read(tmp_path / "one"), Run.read(tmp_path / "two")
    check(two, reports[0])
    assert [row["loss"] for row in one.steps] == [row["loss"] for row in two.steps]
    assert two.about["ranks"] == 2 and len(two.rank_times([w for _, w in two.windows])) == 2
    # Rank 1 can only begin once rank 0 has sent something.
    assert two.rank_times([w for _, w in two.windows])[1]["wait"] > 0


def test_windows_are_of_the_same_figures_as_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathering less often changes where figures stand, and not what they add up to."""
    monkeypatch.setattr(run_log, "EVERY_S", 0.0)
    train(str(tmp_path / "often"))
    monkeypatch.setattr(run_log, "EVERY_S", 3600.0)
    train(str(tmp_path / "seldom"))
    often, seldom = Run.read(tmp_path / "often"), Run.read(tmp_path / "seldom")
    assert len(seldom.windows) == 2  # the first step, then the end
    assert often.sent() == seldom.sent()
    assert [row["loss"] for row in often.steps] == [row["loss"] for row in seldom.steps]
    both = [run.link_figures([w for _, w in run.windows]) for run in (often, seldom)]
    for one, other in zip(*both, strict=True):
        assert one["wire_bytes"] == pytest.approx(other["wire_bytes"])


def test_a_run_that_goes_on_replaces_what_it_does_again(tmp_path: Path) -> None:
    train(str(tmp_path))
    before = Run.read(tmp_path).steps
    train(str(tmp_path), begin=2)
    after = Run.read(tmp_path).steps
    assert [row["step"] for row in after] == list(range(STEPS))
    assert after[:2] == before[:2]
    assert after[2]["time"] > after[1]["time"]


def test_a_log_changes_no_number(tmp_path: Path) -> None:
    """Weights after some steps, with a log of every step and without one."""

    def weights(folder: Path | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(2)
        pipe = mpcomp.pipeline(
            mlp(),
            chunks=2,
            split=MLP_SPLIT,
            act_comp="ef21+topk:0.2",
            grad_comp="ef+quant:4:rounding=stochastic",
            loss_fn=F.cross_entropy,
        )
        log = None if folder is None else mpcomp.RunLog(pipe, folder)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for seed in range(STEPS):
            loss = pipe.forward_backward(*rows(6, seed))
            optimizer.step()
            optimizer.zero_grad()
            if log is not None:
                log.step(loss)
        return pipe.merge().state_dict()

    logged, plain = weights(tmp_path), weights(None)
    assert all(value.equal(plain[name]) for name, value in logged.items())


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    pipe = mpcomp.pipeline(mlp(), chunks=2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    log = mpcomp.RunLog(pipe, tmp_path)
    log.step(torch.tensor(torch.nan))
    log.step(2.5)
    log.close()
    assert [row["loss"] for row in Run.read(tmp_path).steps] == [None, 2.5]


def test_a_tail_reads_lines_once_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = JsonLinesTail(path)
    assert tail.read() == []
    append_json_lines(path, [{"step": 0}, {"step": 1}])
    with path.open("a") as file:
        file.write('{"step": ')
    assert [row["step"] for row in tail.read()] == [0, 1]
    append_json_lines(path, [{"step": 2}])  # in place of the line that was left unfinished
    assert [row["step"] for row in tail.read()] == [0, 1, 2]
    path.with_name("new").write_text(json.dumps({"step": 7}) + "\n")
    path.with_name("new").replace(path)
    assert [row["step"] for row in tail.read()] == [7]


def test_folders_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no run\.json: pass the folder"):
        Run.read(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        Run.read(tmp_path / "none")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Run.read(tmp_path)
