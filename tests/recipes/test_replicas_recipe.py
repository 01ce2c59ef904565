"""Recipes with compression between replicas: the run folder, a resumption, mistakes, the study."""

import json

import pytest
from endings import check_error, check_success, end_of

from recipes import cifar10, wikitext
from recipes.lab import replica_study
from recipes.lab.replica_study import ROWS, render
from recipes.replica_log import PARTS, append_steps, plot_steps, read_steps

TINY = [
    *("--data", "digits", "--width", "4", "--epochs", "2", "--batch-size", "16", "--chunks", "1"),
    *("--train-limit", "64", "--test-limit", "20", "--precision", "fp32", "--device", "cpu"),
    *("--split", "1", "--replicas", "2"),
]
# The modelled clock, so that a resumed run is the uninterrupted one.
GRAVAC = "gravac:cf=2-50:eps=0.3:window=3:smoothing=0.5:bandwidth_mbps=10+topk:0.1"


def recipe(*commands, main=cifar10.main):
    return [end_of(main, list(command)) for command in commands]


def text(command):
    return recipe(command, main=wikitext.main)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_run_folder_tells_what_replicas_exchanged(ranks, tmp_path):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    ended = ranks(
        recipe,
        2,
        [*TINY, "--dp-comp", GRAVAC, "--compare", "--out", str(whole)],
        [*TINY, "--dp-comp", GRAVAC, "--out", str(parts), "--stop-after", "1"],
        ["--resume", str(parts)],
    )
    for ends in zip(*ended, strict=True):
        check_success(ends)
    assert "1 stages x 2 replicas on 2 processes" in ended[0][0].out
    steps = read_steps(whole / "replicas.jsonl")
    assert [step["step"] for step in steps] == list(range(8))
    assert steps[0]["branch"] == "dense" and {s["branch"] for s in steps[1:]} & {"candidate"}
    assert (whole / "replicas.png").stat().st_size > 10_000
    last = lines_of(whole / "metrics.jsonl")[-1]
    told = last["replicas"]
    assert told["wire_bytes"] == sum(step["wire_bytes"] for step in steps)
    assert told["floats"] < told["dense_bytes"] / 4
    between = last["account"]["replicas"]
    assert between["wire_bytes"] == 2 * told["wire_bytes"] < last["dense_bytes"]
    agreed = last["account"]["agreements"]["wire_bytes"]
    assert last["wire_bytes"] == between["wire_bytes"] + agreed > between["wire_bytes"]
    assert 0 < told["scaling_efficiency"] < 1 and all(told[part] >= 0 for part in PARTS)
    dense = lines_of(whole / "uncompressed" / "metrics.jsonl")[-1]
    sent = dense["account"]["replicas"]["wire_bytes"]
    assert sent == dense["dense_bytes"] == last["dense_bytes"]

    def decided(folder):
        return [{k: v for k, v in s.items() if k != "seconds"} for s in read_steps(folder)]

    assert decided(parts / "replicas.jsonl") == decided(whole / "replicas.jsonl")
    losses = [[e["loss"] for e in lines_of(f / "metrics.jsonl")] for f in (parts, whole)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_language_model_on_replicas(ranks, tmp_path):
    (tmp_path / "text").mkdir()
    for split in ("train", "validation", "test"):
        words = " ".join(f"word{i % 17} and then" for i in range(900))
        (tmp_path / "text" / f"{split}.txt").write_text(words)
    command = [
        *("--data", str(tmp_path / "text"), "--model", "lstm", "--hidden", "32", "--epochs", "1"),
        *("--split", "1", "--replicas", "2", "--batch-size", "8", "--chunks", "1"),
        *("--dp-comp", "powersgd:1", "--out", str(tmp_path / "run")),
    ]
    ended = ranks(text, 2, command)
    check_success([ends[0] for ends in ended])
    told = lines_of(tmp_path / "run" / "metrics.jsonl")[-1]["replicas"]
    assert 0 < told["wire_bytes"] < told["dense_bytes"]


def mistakes(commands):
    return recipe(*commands)


@pytest.mark.slow
def test_mistakes_end_with_one_line(ranks):
    wrong = [
        ([*TINY, "--dp-comp", "dgc:0.01"], "pass --optimizer sgd --momentum 0"),
        ([*TINY, "--dp-comp", "gravac:cf=0.5-10+topk:0.1"], "1 or more"),
        ([*TINY, "--dp-comp", "gravak+topk:0.1"], "did you mean 'gravac'"),
        ([*TINY, "--dp-comp", "aqsgd+topk:0.1"], "belongs at a cut"),
        ([*TINY, "--dp-comp", "powersgd:5000"], "above that of every matrix"),
        ([*TINY, "--per-machine", "3"], "per_machine=3 with 2 replicas"),
        ([*TINY, "--act", "topk:0.1", "--dp-comp", "powersgd:1"], "no cut to compress at"),
        ([*TINY[:-2], "--replicas", "1", "--dp-comp", "powersgd:1"], "nobody to exchange"),
    ]
    ended = ranks(mistakes, 2, [command for command, _ in wrong])
    for ends, (_, says) in zip(zip(*ended, strict=True), wrong, strict=True):
        check_error(ends, says)


def study(command):
    return recipe(command, main=replica_study.main)


@pytest.mark.slow
def test_the_study_skips_what_is_finished(ranks, tmp_path):
    out = tmp_path / "replicas.jsonl"
    command = [
        *("--data", "digits", "--width", "4", "--epochs", "2", "--batch-size", "16"),
        *("--train-limit", "64", "--test-limit", "20", "--precision", "fp32", "--seeds", "2"),
        *("--rows", "dense", "PowerSGD rank 2", "--out", str(out)),
    ]
    for ended in (ranks(study, 2, command), ranks(study, 2, command)):
        assert [ends[0].code for ends in ended] == [0, 0], ended
    assert "4 of 4 runs are finished" in ended[0][0].out
    lines = lines_of(out)
    assert [(line["row"], line["seed"]) for line in lines] == [
        *(("dense", 0), ("PowerSGD rank 2", 0), ("dense", 1), ("PowerSGD rank 2", 1))
    ]
    table = render(lines)
    assert "PowerSGD rank 2" in table and "+-" in table and ROWS["dense"].dp_comp in table


def test_a_table_of_paired_differences():
    def line(row, seed, accuracy, saved=1.0):
        sent = {"dense_bytes": 400, "floats": 100 / saved}
        sent |= {"dense_traffic_bytes": 600.0, "traffic_bytes": 600.0 / saved}
        told = {"wire_bytes": 400 / saved, "dense_bytes": 400, "replicas": sent}
        return {"row": row, "seed": seed, "accuracy": accuracy, **told}

    lines = [line("dense", 0, 0.50), line("dense", 1, 0.60)]
    lines += [line("GraVAC", 0, 0.51, 20.0), line("GraVAC", 1, 0.59, 20.0)]
    lines.append({"row": "DGC 0.1 %", "seed": 0, "diverged": "NaN"})
    table = render(lines)
    # Differences +1 and -1 point: mean 0, deviation 1.414, t of one degree of freedom 12.7.
    assert "+0.00 +- 12.71" in table and "20.0" in table and "diverged" in table


def test_a_factor_that_moves_stands_beside_a_fixed_share():
    sent = {"dense_bytes": 400, "floats": 5, "dense_traffic_bytes": 600.0, "traffic_bytes": 60.0}
    told = {"wire_bytes": 20, "dense_bytes": 400, "replicas": sent}
    lines = [
        {**told, "row": row, "seed": 0, "accuracy": accuracy, "settings": {"dp_comp": "qsgd:4"}}
        for row, accuracy in (("dense", 0.9), ("DGC 0.1 %", 0.8), ("of last year", 0.7))
    ]
    moves = {**told, "row": "GraVAC, momentum on replicas", "seed": 0, "accuracy": 0.75}
    table = render([*lines, {**moves, "cfs": [1.0, 20.0, 80.0, 40.0]}])
    assert " 20.0 " in table and " 10.0 " in table  # below fp32, below bf16
    assert "20 to 80" in table and "less a fixed share, DGC 0.1 %: -5.00." in table
    # A row that the study no longer has, with what was sent.
    assert "other rows of these results" in table and "qsgd:4" in table


def test_steps_of_a_resumed_run_replace_those_that_were_lost(tmp_path):
    path = tmp_path / "replicas.jsonl"
    append_steps(path, [{"step": i, "n": "old"} for i in range(5)])
    append_steps(path, [{"step": i, "n": "new"} for i in range(3, 6)])
    assert [(s["step"], s["n"]) for s in read_steps(path)] == [
        *((i, "old") for i in range(3)),
        *((i, "new") for i in range(3, 6)),
    ]


@pytest.mark.parametrize("more", [{}, {"gain": 0.5}, {"quiet": 4}])
def test_a_picture_of_steps(tmp_path, more):
    """Also of a method that sends nothing in most of them."""
    steps = [
        {"step": i, "dense_bytes": 4000, "wire_bytes": 100 + i, "floats": 20.0, **more}
        for i in range(10)
    ]
    for step in steps[: more.get("quiet", 0)]:
        step |= {"wire_bytes": 0, "floats": 0.0}
    plot_steps(steps, tmp_path / "steps.png", "topk:0.1")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
