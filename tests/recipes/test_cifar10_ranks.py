"""The main recipe in several processes: the run of one process, told once, with one end for all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from endings import End, check_error, check_success, end_of, history, weights

from recipes import cifar10
from recipes import ranks as recipe_ranks
from recipes.lab import cifar10_study
from recipes.training import Trainer

TINY = [
    *("--data", "digits", "--width", "4", "--epochs", "2", "--batch-size", "16", "--chunks", "2"),
    *("--train-limit", "40", "--test-limit", "20", "--precision", "fp32", "--device", "cpu"),
]
FEEDBACK = ["--act", "ef21+topk:0.1", "--grad", "ef+randomk:0.2", "--clip", "1.0"]


def recipe(*commands: list[str], main=cifar10.main) -> list[End]:
    """In each process: runs the recipe with each of the commands, one after another."""
    return [end_of(main, command) for command in commands]


def different(*commands: list[list[str]]) -> list[End]:
    """In each process: runs the recipe with commands of its own."""
    return recipe(*(of_rank[dist.get_rank()] for of_rank in commands))


def all_mistakes(commands: list[list[str]]) -> list[End]:
    """In each process: runs the recipe with each, and the study before the last."""
    *ends, last = recipe(*commands)
    return [*ends, *recipe([], main=cifar10_study.main), last]


def failing(command: list[str]) -> End:
    """In each process: one of them finds a mistake that the others do not, while they wait."""
    if dist.get_rank() == 1:

        def refuse(*args: object, **kwargs: object) -> None:
            raise ValueError("only here")

        Trainer.train_epoch = refuse  # type: ignore[method-assign]
        recipe_ranks.GRACE_S = 1.0  # type: ignore[misc]
    return recipe(command)[0]


def check_same_run(one: Path, other: Path) -> None:
    """Bitwise, all but the seconds."""
    assert history(one) == history(other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys() and len(ours) == 122
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_two_processes_train_the_run_of_one(ranks, tmp_path):
    """Also where it is stopped and resumed, with the uncompressed run to compare it with."""
    command = [*TINY, *FEEDBACK, "--split", "2", "--compare"]
    parts = str(tmp_path / "parts")
    ended = ranks(recipe, 2, [*command, "--out", parts, "--stop-after", "1"], ["--resume", parts])
    for ends in zip(*ended, strict=True):
        check_success(ends)
    shown = ended[0][1].out
    assert "40 training images, 20 test images; 2 stages on 2 processes" in shown
    assert "at the measured" in shown and "accuracy on %" in shown
    assert ended[0][1].err.count("epoch 2/2") >= 1

    cifar10.main([*command, "--out", str(tmp_path / "alone")])
    check_same_run(tmp_path / "alone", tmp_path / "parts")
    check_same_run(tmp_path / "alone" / "uncompressed", tmp_path / "parts" / "uncompressed")
    for name in ("curves.png", "summary.json", "config.json"):
        assert (tmp_path / "parts" / name).exists()
    summary = json.loads((tmp_path / "parts" / "summary.json").read_text())
    assert 0 < summary["wire_ratio"] < 0.3 < summary["uncompressed_run"]["wire_ratio"]


@pytest.mark.slow
def test_orders_of_microbatches(ranks, tmp_path):
    """Another schedule, and a depth that is measured, train the run of one process too."""
    one_epoch = [*TINY, *FEEDBACK, "--epochs", "1"]
    two = [*one_epoch, "--split", "2"]
    ended = ranks(
        recipe,
        2,
        [*two, "--in-flight", "auto", "--out", str(tmp_path / "auto")],
        [*one_epoch, "--schedule", "ZBVZeroBubble", "--out", str(tmp_path / "v")],
    )
    for ends in zip(*ended, strict=True):
        check_success(ends)
    cifar10.main([*two, "--out", str(tmp_path / "alone")])
    check_same_run(tmp_path / "alone", tmp_path / "auto")
    cifar10.main([*one_epoch, "--out", str(tmp_path / "four")])
    # One cut of a V lies within a process.
    local = ("seconds", "wire_bytes", "dense_bytes", "num_elements", "account")
    assert history(tmp_path / "four", local) == history(tmp_path / "v", local)


@pytest.mark.slow
def test_replicas_share_the_batches(ranks, tmp_path):
    command = [*TINY, "--split", "2", "--replicas", "2", "--act", "aqsgd+quant:4"]
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    ended = ranks(
        recipe,
        4,
        [*command, "--out", whole],
        [*command, "--out", parts, "--stop-after", "1"],
        ["--resume", parts],
    )
    for ends in zip(*ended, strict=True):
        check_success(ends)
    assert "2 stages x 2 replicas on 4 processes" in ended[0][0].out
    check_same_run(tmp_path / "whole", tmp_path / "parts")
    rows = history(tmp_path / "whole")
    # Every test image is counted once, and 32 of the 40 training images: two batches of 16.
    assert [float(row["accuracy_compressed"] * 20).is_integer() for row in rows] == [True, True]
    assert [float(row["train_accuracy"] * 32).is_integer() for row in rows] == [True, True]


def test_mistakes_end_every_process_and_one_says_so(ranks, tmp_path):
    out = ["--out", str(tmp_path / "run")]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    commands = {
        "pass --split 2, or start 4 processes": [*TINY, *out],
        "pass --split 1, or start 8 processes": [*TINY, *out, "--replicas", "2"],
        "batch_size is 16, replicas is 3": [*TINY, *out, "--replicas", "3"],
        "schedule='GPie'": [*TINY, *out, "--schedule", "GPie"],
        "invalid int value: 'x'": [*TINY, *out, "--epochs", "x"],
        "leave one of the two out": [
            *(*TINY, *out, "--split", "2", "--in-flight", "2", "--schedule", "GPipe"),
        ],
        "no folder ./nowhere": [*TINY, *out, "--data", "./nowhere"],
        "is no run folder": ["--resume", str(tmp_path)],
        "holds a run already": [*TINY, "--out", str(tmp_path / "taken")],
    }
    diverging = [*TINY, "--split", "2", "--lr", "1e30", "--out", str(tmp_path / "diverged")]
    *ended, (first, second) = zip(
        *ranks(all_mistakes, 2, [*commands.values(), diverging]), strict=True
    )
    commands["start it with python, not with torchrun"] = []  # the study
    for message, ends in zip(commands, ended, strict=True):
        check_error(ends, message)
    assert not (tmp_path / "run").exists()
    assert first.code == second.code == 1
    assert first.err.splitlines()[-1].startswith("error: NaN or Inf at boundary 0")
    assert (second.out, second.err) == ("", "")


@pytest.mark.slow
def test_mistakes_of_one_process(ranks, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    mine = [*TINY, "--split", "2", "--out", str(tmp_path / "run")]
    others = [*mine, "--out", str(tmp_path)], [*mine, "--lr", "0.5"]
    folder, rate = zip(*ranks(different, 2, *([mine, other] for other in others)), strict=True)
    check_error(folder, f"error: rank 1: the run folder {tmp_path} holds a run already")
    check_error(rate, "lr is 0.5 on rank 1, 0.05 on rank 0")
    assert not (tmp_path / "run").exists()
    first, second = ranks(failing, 2, mine)
    assert first.code == second.code == 1
    assert second.err == "error: only here\n"  # as the first knew nothing of it
    assert "is gone" in first.err.splitlines()[-1]


@pytest.mark.slow
def test_under_torchrun_itself(tmp_path):
    """All ends cleanly: no warning about process groups, nobody left behind."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "recipes.cifar10", *TINY, "--epochs", "1"]
    command += ["--split", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder: ") == 1
    assert "arning" not in done.stderr and "destroy" not in done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
