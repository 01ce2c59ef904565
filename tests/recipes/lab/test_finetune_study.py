"""`recipes.lab.finetune_study`: its rows, its runs and its table."""

import math

import pytest

from mpcomp.links.auto import AUTO
from mpcomp.links.budget import scaled, spelt
from recipes.lab import finetune_study
from recipes.lab.account import account_of
from recipes.lab.cut_grid import shared_settings
from recipes.lab.finetune_study import ROWS
from recipes.metric import PERPLEXITY
from recipes.run_folder import RunFolder, read_json_lines
from recipes.wikitext import TextTrainer, load_data


def test_parts_of_a_memory_differ_from_it_in_what_their_names_say():
    now = ROWS["memory of activations"].act, ROWS["memory of gradients"].grad
    assert [AUTO["auto:memory"][name] for name in ("act_comp", "grad_comp")] == list(now)
    methods = [(row.act, row.grad) for row in ROWS.values()]
    assert len(set(methods)) == len(methods)
    assert [row for row, method in zip(ROWS, methods, strict=True) if method == now] == [
        "alike at all cuts"
    ]
    for row, parts in ROWS.items():
        assert ("dead_zone" in parts.act + parts.grad) == ("dead zone" in row)
        assert ("along" in parts.act) == (row in ("along", "dead zones"))


def test_the_row_of_a_budget_is_the_word_with_other_steps():
    row = ROWS["training steps times 1.6"]
    of_word = [spelt("auto:memory", None, before_head=head) for head in (False, False, True)]
    for argument, specs in (("act_comp", row.act), ("grad_comp", row.grad)):
        assert list(specs) == [scaled(methods[argument], 1.6) for methods in of_word]


def test_rows_differ_in_their_methods_alone():
    model = ["--model", "some.gguf", "--data", "python-docs", "--lora", "8"]
    options = finetune_study.parse_args(model)
    configs = {row: finetune_study.configuration(options, row, 1) for row in ROWS}
    assert len({str(shared_settings(config, options)) for config in configs.values()}) == 1
    config = configs["auto:memory"]
    assert (config.act, config.seed, config.optimizer) == (("auto:memory",), 1, "adamw")
    assert shared_settings(config, options)["lora"] == config.lora == 8


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


FEW = ["--train-limit", "3", "--eval-limit", "4", "--epochs", "2", "--seq-len", "64"]
SMALL = ["--model", "tiny", "--data", "python-docs", "--split", "2", "--precision", "fp32"]


def test_a_study_of_seconds(tmp_path, capsys):
    out = tmp_path / "fine.jsonl"
    rows = ["--seeds", "1", "--workers", "0", "--rows", "bf16", "auto:memory", "--out", str(out)]
    finetune_study.main([*FEW, *SMALL, *rows])
    said = capsys.readouterr().out
    assert "cuts alone, epoch 2" in said
    curve = [line.split("|")[1:-1] for line in said.splitlines() if "| auto:memory " in line][-2:]
    assert [cells[1].strip() for cells in curve] == ["1", "2"]
    none, memory = read_json_lines(out)
    assert none["cut_bytes_by_epoch"][0] == pytest.approx(none["bf16_bytes_an_epoch"], rel=0.01)
    of_none = account_of(none)
    assert of_none.cuts.below_bf16 == pytest.approx(1, rel=0.01)
    for one in (none, memory):
        parts = one["account"]
        assert sum(part["wire_bytes"] for part in parts.values()) == one["wire_bytes"]
        assert parts["ties"]["wire_bytes"] == 0  # both uses are on one rank
        whole = account_of(one)
        assert whole.below_bf16 == pytest.approx(one["below_bf16"], rel=1e-6)
    assert none["bf16_bytes_an_epoch"] == memory["bf16_bytes_an_epoch"]
    first, second = memory["cut_bytes_by_epoch"]
    assert second < first < none["bf16_bytes_an_epoch"] / 4
    assert none[PERPLEXITY.on] == pytest.approx(none[PERPLEXITY.off], rel=0.01)
    assert len(memory["losses"]) == len(memory["perplexity_compressed_by_epoch"]) == 2
    assert memory["perplexity_uncompressed_by_epoch"][-1] == memory[PERPLEXITY.off]
    gap = [math.log(one[PERPLEXITY.off]) - one["losses"][-1] for one in (none, memory)]
    assert curve[-1][6].strip() == f"{gap[1] - gap[0]:+.3f}"
    for figures in memory["memories"].values():
        assert 0 < figures["lag"] < figures["drift"] and 0 < figures["stayed"] < 1
    assert len(memory["memories"]) == 4 and none["memories"] == {}


def test_a_run_that_was_stopped_goes_on_from_its_last_epoch(tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    wanted = ["--seeds", "1", "--workers", "0", "--rows", "bf16", "auto:memory"]
    options = finetune_study.parse_args([*FEW, *SMALL, *wanted])
    config = finetune_study.configuration(options, "auto:memory", 0)
    trainer = TextTrainer(config, load_data(config))
    trainer.fit(RunFolder(folder / finetune_study.name_of(config)), stop_after=1, progress=False)
    steps = trainer.steps_per_epoch
    seen = []
    forward_backward = TextTrainer.forward_backward

    def counted(self, batch):
        seen.append(self.config.act)
        return forward_backward(self, batch)

    monkeypatch.setattr(TextTrainer, "forward_backward", counted)
    for name, more in (("on", ["--resume", str(folder)]), ("whole", [])):
        finetune_study.main([*FEW, *SMALL, *wanted, *more, "--out", str(tmp_path / name)])
    assert seen.count(("auto:memory",)) == (1 + 2) * steps
    assert seen.count(("bf16",)) == (2 + 2) * steps
    assert not any(folder.iterdir())  # of runs that have ended nothing is kept
    went_on, whole = (read_json_lines(tmp_path / name) for name in ("on", "whole"))
    for one, other in zip(went_on, whole, strict=True):
        assert one["row"] == other["row"]
        for name in ("losses", "cut_bytes_by_epoch", "perplexity_compressed_by_epoch"):
            assert one[name] == other[name], name
