"""`mpcomp report` and `mpcomp top`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows

import mpcomp
from mpcomp.command import main
from mpcomp.view.run import Run


def run_in(folder: Path, method: str, *, steps: int = 3, total: int | None = 8) -> None:
    pipe = mpcomp.pipeline(
        mlp(),
        chunks=2,
        split=MLP_SPLIT,
        act_comp=method,
        grad_comp=method,
        loss_fn=F.cross_entropy,
    )
    log = mpcomp.RunLog(pipe, folder, total_steps=total, samples="rows")
    for seed in range(steps):
        log.step(pipe.forward_backward(*rows(6, seed)), num_samples=6)
    log.close()


def test_top_prints_a_run_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path, "topk:0.25")
    main(["top", str(tmp_path), "--once"])
    shown = capsys.readouterr().out
    for words in ("training", "step 3 of 8", " left", "rows/s", "loss", "below bf16"):
        assert words in shown
    for words in ("compute", "coding", "wait", "Mbit/s", "below bf16", "error", "cosine"):
        assert words in shown
    assert shown.count("topk:0.25") >= 2 * len(MLP_SPLIT)  # a row for each link
    assert "finished" not in shown


def test_top_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path, "none", steps=3, total=3)
    main(["top", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "finished" in shown and "step 3 of 3" in shown and "left" not in shown


def test_top_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path, "none", steps=0)
    main(["top", str(tmp_path), "--once"])
    assert "no step has ended yet" in capsys.readouterr().out


def test_top_without_losses_or_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = mpcomp.pipeline(mlp(), chunks=2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    log = mpcomp.RunLog(pipe, tmp_path)
    log.step(torch.tensor(torch.inf))
    log.close()
    main(["top", str(tmp_path), "--once"])
    shown = capsys.readouterr().out
    assert "loss not finite" in shown and "step 1" in shown


def test_report_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path / "a", "topk:0.25")
    run_in(tmp_path / "b", "none")
    page = tmp_path / "page.html"
    main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(page)])
    shown = capsys.readouterr().out
    head, _, first, second, *_ = shown.splitlines()
    assert head.split()[:4] == ["run", "compression", "steps", "loss"]
    assert "topk:0.25" in first and "uncompressed" in second
    assert f"page: {page}" in shown
    text = page.read_text()
    for loader in ("http://", "https://", "url(", "@import", "import(", "fetch(", " src=", "<link"):
        assert loader not in text
    start = text.index('type="application/json">') + len('type="application/json">')
    data = json.JSONDecoder().raw_decode(text[start:])[0]
    assert [run["label"] for run in data["runs"]] == ["topk:0.25", "uncompressed"]


def test_logs_of_a_time_before_elements_were_counted_show_no_factor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(tmp_path, "topk:0.25")
    steps = tmp_path / "steps.jsonl"
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    for line in lines:
        assert line.pop("num_elements") > 0
        if "figures" in line:
            del line["figures"]["links"]["num_elements"]
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run.read(tmp_path)
    assert run.sent()[-1].below_bf16 is None and run.sent()[-1].wire_ratio < 1
    figures = run.link_figures([window for _, window in run.windows])
    assert all(one["below_bf16"] is None and one["ratio"] < 1 for one in figures)
    main(["top", str(tmp_path), "--once"])
    assert "times" not in capsys.readouterr().out
    main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert '"below_bf16": null' in (tmp_path / "page.html").read_text()


def test_curves_of_long_runs_are_thinned(tmp_path: Path) -> None:
    from mpcomp.view.report import POINTS, _thinned

    rows = [{"step": i, "time": 0.1 * i, "bytes": i, "loss": float(i % 2)} for i in range(10_000)]
    thin = _thinned(rows)
    assert len(thin) <= POINTS and thin[-1]["step"] == 9_999
    assert all(0.3 < row["loss"] < 0.7 for row in thin)


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no run\.json"):
        main(["report", str(tmp_path)])
    with pytest.raises(SystemExit, match="is no folder"):
        main(["top", str(tmp_path / "none")])
    run_in(tmp_path, "none")
    with pytest.raises(SystemExit, match="--every 0.0: pass more"):
        main(["top", str(tmp_path), "--every", "0"])
    with pytest.raises(SystemExit, match="there is no folder"):
        main(["report", str(tmp_path), "--html", str(tmp_path / "none" / "page.html")])
