"""`recipes.lab.memory_length`: its ground, its runs and its table, at a toy size."""

import random

import pytest
import torch

from recipes.lab import memory_length
from recipes.lab.memory_length import LengthConfig, load
from recipes.lab.study_table import interval
from recipes.run_folder import read_json_lines


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two text files of other words each."""
    folder = tmp_path_factory.mktemp("texts")
    for name, letters in (("first", "abcde "), ("second", "defgh ")):
        draw = random.Random(name)
        lines = ("".join(draw.choices(letters, k=60)) for _ in range(40))
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return str(folder / "first.txt"), str(folder / "second.txt")


SMALL = {"seq_len": 12, "first_steps": 4, "tuned_blocks": 16, "eval_limit": 5}


def config_of(texts, **more):
    return LengthConfig(data=texts[0], tuned_on=texts[1], **{**SMALL, **more})


def test_runs_begin_with_the_same_model_and_blocks(texts):
    one, other = (load(config_of(texts, seed=seed)) for seed in (0, 1))
    assert one.train.shape == (16, 13) and one.unseen.shape == (5, 13)
    assert torch.equal(one.train, other.train) and torch.equal(one.unseen, other.unseen)
    weights = other.model.state_dict()
    assert all(torch.equal(w, weights[name]) for name, w in one.model.state_dict().items())
    more = load(config_of(texts, first_steps=5)).model.state_dict()
    assert any(not torch.equal(w, more[name]) for name, w in weights.items())
    rows = {tuple(row) for row in one.train.tolist()}
    assert len(rows) == 16 and not rows & {tuple(row) for row in one.unseen.tolist()}
    assert (one.train == 0).any()  # letters that the first text has not


def test_too_few_blocks_are_refused(texts):
    with pytest.raises(ValueError, match=r"has \d+ blocks of 13 characters, 9999 are needed"):
        load(config_of(texts, tuned_blocks=9999))


def test_a_study_of_seconds(texts, tmp_path, capsys):
    out = tmp_path / "length.jsonl"
    few = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    where = ["--data", texts[0], "--tuned-on", texts[1], "--epochs", "2", "--out", str(out)]
    rows = ["--seeds", "2", "--rows", "none", "auto:memory", "memory of activations"]
    memory_length.main([*few, *where, *rows])
    said = capsys.readouterr().out
    lines = read_json_lines(out)
    by_row = {row: [line for line in lines if line["row"] == row] for row in rows[3:]}
    assert [len(runs) for runs in by_row.values()] == [2, 2, 2]
    for line in by_row["none"]:
        assert line["act_bits_by_epoch"] == pytest.approx([32, 32], rel=0.01)
        assert line["unseen_compressed_by_epoch"] == line["unseen_uncompressed_by_epoch"]
        assert line["losses"][1] < line["losses"][0]
        assert line["memories"] == {} and line["settings"]["python"]
    for line in by_row["auto:memory"]:
        assert line["wire_bytes"] < line["dense_bytes"] / 3
        assert line["unseen_compressed_by_epoch"] != line["unseen_uncompressed_by_epoch"]
        assert len(line["memories"]) == 4
    assert all(len(line["memories"]) == 2 for line in by_row["memory of activations"])
    assert "bits of both, epoch 2" in said and "bits of both, epoch 3" not in said
    memory = next(line for line in said.splitlines() if line.startswith("| auto:memory"))
    pairs = zip(by_row["auto:memory"], by_row["none"], strict=True)
    assert interval([a["losses"][1] - b["losses"][1] for a, b in pairs], digits=4) in memory

    memory_length.main([*few, *where, *rows])  # nothing is missing
    assert "6 of 6 runs are finished" in capsys.readouterr().out
    assert len(read_json_lines(out)) == 6


def test_the_row_that_others_are_held_to_is_needed(capsys):
    with pytest.raises(SystemExit):
        memory_length.parse_args(["--rows", "auto:memory"])
    assert "--rows without none" in capsys.readouterr().err
