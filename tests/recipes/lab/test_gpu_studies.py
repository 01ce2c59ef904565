"""`recipes.lab.gpu_studies`: runs that end, are cut off, go on; and its tables."""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.lab import estimate, gpu_studies, studies_report
from recipes.lab.account import account_of
from recipes.lab.full_size import STUDIES
from recipes.lab.timed import train
from recipes.run_folder import append_json_line, read_json_lines

ROOT = Path(__file__).parents[3]
ALL = [(name, row) for name, study in STUDIES.items() for row in study.rows]


def command(tmp_path, *words):
    return [
        *(sys.executable, "-m", "recipes.lab.gpu_studies", "--dry-run", "--workers", "2"),
        *("--out", str(tmp_path / "rows.jsonl"), "--resume", str(tmp_path / "left"), *words),
    ]


def begun(tmp_path, *words):
    return subprocess.Popen(
        command(tmp_path, *words),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def rows_of(tmp_path):
    return [gpu_studies.key_of(line) for line in read_json_lines(tmp_path / "rows.jsonl")]


WANTED = {(name, row, 0) for name, study in STUDIES.items() for row in study.toy_rows}


@pytest.mark.timeout(240)
def test_a_killed_command_keeps_its_rows_and_goes_on(tmp_path):
    """The whole command at toy sizes: every study that has a toy row."""
    killed = begun(tmp_path)
    while killed.stdout.readline().rpartition(": ")[2] != "finished\n":
        assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    kept = rows_of(tmp_path)
    assert kept and set(kept) < WANTED
    again = begun(tmp_path)
    printed, _ = again.communicate()
    assert again.returncode == 0, printed
    assert f"{len(kept)} runs are finished" in printed
    assert rows_of(tmp_path)[: len(kept)] == kept
    assert sorted(rows_of(tmp_path)) == sorted(WANTED)
    assert not any((tmp_path / "left").glob("*"))
    for line in read_json_lines(tmp_path / "rows.jsonl"):
        assert line[STUDIES[line["study"]].metric.on] > 0 and line["from"]["code"]
        assert line["counted"] == ("auto" in line["row"])
        if line["study"] == "gpt2-tied":
            account = account_of(line)
            assert not account.ties.wire_bytes and account.cuts.wire_bytes > 0
            assert account.whole.wire_bytes == line["wire_bytes"]
    assert "gpt2-tied: GPT-2 124M from scratch" in printed


@pytest.mark.gpu
@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(("name", "row"), [each[:2] for each in sorted(WANTED)])
def test_toy_rows_train_on_a_gpu(name, row, tmp_path):
    reporter = Reporter(1000)
    train(reporter, name, row, 0, options(tmp_path, device="cuda:0"))
    (said,) = reporter.rows
    assert said[STUDIES[name].metric.on] > 0 and said["from"]["gpu"]


class Reporter:
    """A job's reporter whose time is over after so many looks at it."""

    def __init__(self, looks):
        self.rows, self.looks = [], looks

    def say(self, row):
        self.rows.append(json.loads(json.dumps(row)))

    @property
    def left_s(self):
        self.looks -= 1
        return float(self.looks)


def options(tmp_path, **chosen):
    made = gpu_studies.parse_args(command(tmp_path)[3:])
    return argparse.Namespace(**{**vars(made), **chosen})


@pytest.fixture
def _signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(
    ("name", "row"),
    [("gpt2-tied", "auto:scratch"), ("replicas-lstm", "ConEF 90 %"), ("cifar10", "bf16")],
)
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(name, row, tmp_path):
    def run(folder, looks):
        reporter = Reporter(looks)
        train(reporter, name, row, 0, options(folder))
        (said,) = reporter.rows
        return said

    cut_off = run(tmp_path / "cut", 2)
    assert cut_off["stopped"].startswith("at its limit, with a checkpoint of")
    went_on, whole = run(tmp_path / "cut", 1000), run(tmp_path / "whole", 1000)
    metric = STUDIES[name].metric
    assert went_on[metric.on] == whole[metric.on]
    assert went_on["wire_bytes"] == whole["wire_bytes"]
    assert went_on["history"][-1]["account"] == whole["history"][-1]["account"]
    assert not list((tmp_path / "cut" / "left").iterdir())


@pytest.mark.usefixtures("_signals")
def test_what_is_too_large_to_be_carried_begins_anew(tmp_path):
    reporter = Reporter(2)
    train(reporter, "gpt2-tied", "bf16", 0, options(tmp_path, carry_mb=0.0))
    (said,) = reporter.rows
    assert "its time was over after" in said["stopped"] and said["history"] == []
    assert not (tmp_path / "left").exists()


@pytest.mark.parametrize(
    ("name", "row"),
    [each for each in ALL if (*each, 0) not in WANTED],  # which the whole command trains
    ids=lambda each: str(each).replace(" ", "-"),
)
def test_every_row_trains_at_its_toy_size(name, row, tmp_path):
    reporter = Reporter(1000)
    train(reporter, name, row, 0, options(tmp_path))
    (said,) = reporter.rows
    assert said[STUDIES[name].metric.on] > 0


@pytest.mark.parametrize(("name", "row"), ALL, ids=lambda each: str(each).replace(" ", "-"))
def test_every_row_is_a_configuration_at_full_size(name, row, tmp_path):
    given = options(tmp_path, dry_run=False, images="x", smollm2="x", tokenizer="x", device="cpu")
    config = STUDIES[name].configuration(given, row, 2)
    assert config.seed == 2 and config.precision == ("fp32" if "lstm" in name else "bf16")
    assert (config.replicas == 4) == STUDIES[name].on_replicas
    assert config.replicas > 1 or (config.act, config.grad) != (("none",), ("none",))


def line(row, seed, value, **more):
    return {
        **{"study": "gpt2-tied", "row": row, "seed": seed, "counted": row == "auto:scratch"},
        **{"perplexity_compressed": value, "perplexity_uncompressed": value, "seconds": 60.0},
        **{"below_bf16": 2.0, "from": {"gpu": "X1", "torch": "2.11", "commit": "abc", "code": "d"}},
        **{"history": [{"loss": 4.0, "traffic": {"cut_bytes": 10, "cut_elements": 50}}]},
        **more,
    }


def test_the_table():
    lines = [
        *(line("bf16", seed, 100.0 + seed) for seed in range(3)),
        *(line("auto:scratch", seed, 102.0 + seed) for seed in range(3)),
        {"study": "gpt2-tied", "row": "top 10 %", "seed": 0, "stopped": "killed after 9 s"},
        line("tiles of 64, 4 bits", 0, 1.0, stopped="it needs 70 s more, and has 20"),
    ]
    text = studies_report.render(lines)
    assert "auto:scratch    3" in text and "+1.96 +- 0.05" in text and "counted" in text
    assert "10.0" in text and "Made by X1, torch 2.11, commit abc." in text
    assert "top 10 %, seed 0: not finished; killed after 9 s." in text
    assert "tiles of 64, 4 bits, seed 0: not finished after 1 epochs, loss 4.000; it needs" in text
    assert studies_report.render([]) == studies_report.NOTHING


def test_the_course_of_a_training():
    history = [
        {"epoch": epoch, "loss": 4.0, "perplexity_compressed": 900.0 / epoch, "traffic": {}}
        for epoch in (1, 2)
    ]
    settings = {"batch_size": 16, "seq_len": 1024}
    runs = [line("bf16", 0, 450.0, history=history, settings=settings, steps=294, epochs=2)]
    text = studies_report.render(runs)
    assert "2.4 M tokens    4.8 M tokens" in text and "900.00" in text


def test_a_run_that_has_ended_after_all_is_not_called_unfinished():
    text = studies_report.render([line("bf16", 0, 1.0, stopped="x"), line("bf16", 0, 100.0)])
    assert "not finished" not in text and "100.00" in text


def test_the_plan(tmp_path):
    given = options(tmp_path, studies=["replicas-lstm"], rows=["dense", "EF"], dry_run=False)
    given.tokenizer = "bpe"
    figures = estimate.measure_plan(given, [{"study": "gpt2", "row": "bf16"}])
    assert figures.pop(0)["study"] == "gpt2", "what was measured before is kept"
    dense, ef = (one["operations"] for one in figures)
    assert 0 < dense < ef, "operations of the replicas' threads count"
    assert "replicas-lstm" in estimate.render_plan(figures)


def test_committed_rows_are_of_studies():
    for path in (gpu_studies.RESULTS, gpu_studies.PLAN):
        if not (ROOT / path).exists():
            continue
        lines = (
            read_json_lines(ROOT / path)
            if path.suffix == ".jsonl"
            else (json.loads((ROOT / path).read_text())["rows"])
        )
        for one in lines:
            assert one["row"] in STUDIES[one["study"]].rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0"], "seconds is 0.0; pass at least 1"),
        (["--rows", "nothing"], "no row nothing; pass some of"),
        (["--studies", "nothing"], "invalid choice"),
    ],
)
def test_wrong_arguments(words, message, capsys):
    with pytest.raises(SystemExit):
        gpu_studies.parse_args(words)
    assert message in capsys.readouterr().err


def test_a_study_without_data_is_left_out(tmp_path, capsys):
    given = options(tmp_path, dry_run=False, images=None, smollm2=None, seeds=1)
    names = {job.arguments[0] for job in gpu_studies._jobs(given)}
    assert names == {name for name, study in STUDIES.items() if study.data == "text"}
    assert "cifar10: left out, as --images is missing" in capsys.readouterr().out


def test_finished_runs_are_not_run_again(tmp_path, monkeypatch):
    given = options(tmp_path)
    append_json_line(given.out, {"study": "gpt2-tied", "row": "auto:scratch", "seed": 0})
    append_json_line(
        given.out, {"study": "smollm2", "row": "auto:memory", "seed": 0, "stopped": ""}
    )
    seen = []

    def none_ends(jobs, **_):
        seen.extend(jobs)
        yield from ()

    monkeypatch.setattr(gpu_studies, "run_jobs", none_ends)
    gpu_studies.run_missing(given)
    names = [job.name for job in seen]
    assert "gpt2-tied, auto:scratch, seed 0" not in names
    assert "smollm2, auto:memory, seed 0" in names
