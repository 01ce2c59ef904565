"""`recipes.finetune_study`: its rows, its runs and its table."""

import pytest

from mpcomp.links.build import method_of
from recipes import finetune_study
from recipes.account import account_of
from recipes.cut_grid import shared_settings
from recipes.finetune_study import ROWS
from recipes.metric import PERPLEXITY
from recipes.run_folder import read_json_lines


@pytest.mark.parametrize("row", ROWS)
def test_rows_are_methods_of_cuts(row):
    method_of("act_comp", ROWS[row].act)
    method_of("grad_comp", ROWS[row].grad)


def test_rows_differ_in_their_methods_alone():
    options = finetune_study.parse_args(["--model", "some.gguf", "--data", "python-docs"])
    configs = {row: finetune_study.configuration(options, row, 1) for row in ROWS}
    assert len({str(shared_settings(config, options)) for config in configs.values()}) == 1
    config = configs["auto:memory"]
    assert (config.act, config.seed, config.optimizer) == (("auto:memory",), 1, "adamw")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--model", "a", "--rows", "auto"], "without bf16, which is what the others are held to"),
        ([], "--model is missing: pass the file or folder of a released model"),
    ],
)
def test_what_cannot_be_run_is_refused(wrong, said, capsys):
    with pytest.raises(SystemExit):
        finetune_study.parse_args(wrong)
    assert said in capsys.readouterr().err


def test_a_study_of_seconds(tmp_path, capsys):
    out = tmp_path / "fine.jsonl"
    few = ["--train-limit", "3", "--eval-limit", "4", "--epochs", "2", "--seq-len", "64"]
    small = ["--model", "tiny", "--data", "python-docs", "--split", "2", "--precision", "fp32"]
    rows = ["--seeds", "1", "--workers", "0", "--rows", "bf16", "auto:memory", "--out", str(out)]
    finetune_study.main([*few, *small, *rows])
    assert "cuts alone, epoch 2" in capsys.readouterr().out
    none, memory = read_json_lines(out)
    assert none["cut_bytes_by_epoch"][0] == pytest.approx(none["bf16_bytes_an_epoch"], rel=0.01)
    of_none = account_of(none)
    assert of_none.cuts.below_bf16 == pytest.approx(1, rel=0.01)
    assert 1.2 < of_none.ties.below_bf16 < 2  # all rows of the head, a few of the embedding
    for one in (none, memory):
        parts = one["account"]
        assert sum(part["wire_bytes"] for part in parts.values()) == one["wire_bytes"]
        assert parts["ties"]["wire_bytes"] > parts["cuts"]["wire_bytes"] * (one is memory)
        whole = account_of(one)
        assert whole.below_bf16 == pytest.approx(one["below_bf16"], rel=1e-6)
    assert none["bf16_bytes_an_epoch"] == memory["bf16_bytes_an_epoch"]
    first, second = memory["cut_bytes_by_epoch"]
    assert second < first < none["bf16_bytes_an_epoch"] / 4
    assert none[PERPLEXITY.on] == pytest.approx(none[PERPLEXITY.off], rel=0.01)
    assert len(memory["losses"]) == 2
