"""`recipes.lab.sorting_study`: its lines, its judgement, its runs and its table."""

import pytest
import torch

from recipes.lab import sorting_study
from recipes.lab.sorting_study import NUM_DIGITS, SortingTrainer, lines_to_sort
from recipes.run_folder import read_json_lines
from recipes.tokens import IGNORED

ASKED = NUM_DIGITS + 1  # with the separator


def config_of(*options: str, row: str = "bf16"):
    return sorting_study.configuration(sorting_study.parse_args(options), row, 0)


def test_lines_are_sorted_and_held_out_ones_are_not_trained_on():
    config = config_of()
    text = lines_to_sort(config, 300, 60)
    train, held_out = text.train.input_ids, text.held_out.input_ids
    assert train.shape == (300, 2 * NUM_DIGITS + 1) and held_out.shape[0] == 60
    for lines, labels in ((train, text.train.labels), (held_out, text.held_out.labels)):
        asked, answer = lines[:, :NUM_DIGITS], lines[:, ASKED:]
        assert torch.equal(asked.sort(dim=1).values, answer)
        assert (labels[:, :ASKED] == IGNORED).all() and torch.equal(labels[:, ASKED:], answer)
    rows = {tuple(row) for row in torch.cat([train, held_out]).tolist()}
    assert len(rows) == 360
    again = lines_to_sort(config, 300, 60)  # and every run has the same ones
    assert torch.equal(again.train.input_ids, train)


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_an_answer_is_right_as_a_whole_or_wrong(monkeypatch, wrong):
    config = config_of("--batch-size", "4")
    text = lines_to_sort(config, 8, 10)
    trainer = SortingTrainer(config, text)
    lines = text.held_out.input_ids.clone()
    lines[:wrong, -1] = (lines[:wrong, -1] + 1) % 10

    def generate(prompts, *, max_new_tokens):
        assert prompts.shape[1] == ASKED and max_new_tokens == NUM_DIGITS
        numbers = [int((lines[:, :ASKED] == prompt).all(1).nonzero()) for prompt in prompts]
        return lines[numbers]

    monkeypatch.setattr(trainer.pipe, "generate", generate)
    assert trainer.judge() == 1 - wrong / 10


def test_a_study_of_seconds(tmp_path, capsys):
    out = tmp_path / "sorting.jsonl"
    few = ["--train-lines", "64", "--eval-lines", "6", "--epochs", "2", "--batch-size", "16"]
    rows = ["--seeds", "1", "--rows", "bf16", "auto:memory", "--out", str(out)]
    sorting_study.main([*few, *rows])
    table = capsys.readouterr().out
    assert "exact on %" in table and "auto:memory" in table
    none, memory = read_json_lines(out)
    assert none["cut_ratio"] == pytest.approx(0.5, abs=0.01) and memory["cut_ratio"] < 0.2
    assert all(0 <= memory[key] <= 1 for key in ("exact_compressed", "exact_uncompressed"))
    assert none["losses"][0] > none["losses"][1]
