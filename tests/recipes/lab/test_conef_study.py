"""The study of error feedback's memory: what is run, what is skipped, the tables; stability."""

import json

import pytest
from endings import end_of

import mpcomp
from recipes.lab import conef_stability, conef_study
from recipes.lab.conef_study import GROUPS, METHODS, configuration, render
from recipes.text_config import TextConfig


def study(command):
    return [end_of(conef_study.main, list(command))]


def options(*given):
    return conef_study._parse(list(given))


def line(group, row, seed, value, *, memory=0, wire=1000):
    name = GROUPS[group].metric.name
    sent = {"wire_bytes": wire, "dense_bytes": 8000}
    told = {"replicas": sent, "steps": 10, "step_s": 0.02}
    return {"row": f"{group}: {row}", "seed": seed, name: value, "memory_bytes": memory, **told}


# -- what is run ----------------------------------------------------------------------------------


def test_runs_differ_in_what_the_row_says():
    chosen = options("--images", "digits", "--text", "python-docs")
    for group, (_, rows, _) in GROUPS.items():
        configs = [configuration(chosen, group, row, 3, 4).to_json() for row in rows]
        for config, row in zip(configs, rows, strict=True):
            assert config.pop("dp_comp") == METHODS[row]
        assert all(config == configs[0] for config in configs)
        assert (configs[0]["seed"], configs[0]["replicas"], configs[0]["split"]) == (3, 4, "1")
        assert configs[0]["eval_every"] == configs[0]["epochs"]


def test_rows_are_the_papers():
    methods = {row: mpcomp.parse(spec) for row, spec in METHODS.items()}
    for row, fraction in (("ConEF 60 %", 0.4), ("ConEF 80 %", 0.2), ("ConEF 90 %", 0.1)):
        assert methods[row] == mpcomp.ConEF(mpcomp.RandomBlock(0.1), fraction, beta=0.9)
    assert methods["EF"] == mpcomp.ErrorFeedback(mpcomp.RandomBlock(0.1))
    assert methods["rbSGD"] == mpcomp.RandomBlock(0.1, unbiased=True)


def test_each_group_has_its_own_settings_and_the_command_has_the_last_word():
    lstm = configuration(options(), "lstm", "EF", 0, 4)
    assert isinstance(lstm, TextConfig)
    assert (lstm.optimizer, lstm.lr, lstm.clip, lstm.lr_factor) == ("sgd", 2.0, 0.25, 0.25)
    adam = configuration(options("--hidden", "8"), "adam", "EF", 0, 4)
    assert (adam.optimizer, adam.weight_decay, adam.hidden) == ("adamw", 0.0, None)
    given = ["--epochs", "60", "--lr-milestones", "15", "30", "45", "--hidden", "672"]
    authors = configuration(options(*given), "lstm", "ConEF 60 %", 0, 16)
    assert (authors.lr_milestones, authors.hidden, authors.epochs) == ((15, 30, 45), 672, 60)
    wide = configuration(options("--model", "wide_resnet"), "images", "EF", 0, 4)
    assert (wide.model, wide.width, wide.schedule_epochs) == ("wide_resnet", 16, wide.epochs)


TINY = [
    *("--images", "digits", "--width", "4", "--batch-size", "16", "--precision", "fp32"),
    *("--train-limit", "48", "--test-limit", "20", "--epochs", "2", "--device", "cpu"),
    *("--hidden", "8", "--seq-len", "8", "--vocab-size", "270", "--lr-milestones", "1"),
    *("--eval-limit", "16", "--groups", "images", "lstm"),
]


def test_the_study_skips_what_is_finished(ranks, tmp_path, sentences):
    out = tmp_path / "conef.jsonl"
    command = [*TINY, "--text", sentences(60), "--out", str(out), "--seeds", "1", "--rows"]
    for rows in (["dense"], ["dense", "EF", "ConEF 60 %"]):
        ended = ranks(study, 2, [*command, *rows])
        assert [ends[0].code for ends in ended] == [0, 0], ended
    assert "2 of 6 runs are finished" in ended[0][0].out
    lines = {one["row"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert len(lines) == 6
    for group in ("images", "lstm"):
        dense, whole, small = (lines[f"{group}: {r}"] for r in ("dense", "EF", "ConEF 60 %"))
        # A sketch has 40 % of the elements and their bytes, rounded up in each row.
        assert dense["memory_bytes"] == 0
        assert 0.4 <= small["memory_bytes"] / whole["memory_bytes"] < 0.65
        # The same messages.
        assert small["wire_bytes"] == whole["wire_bytes"] < 0.5 * dense["wire_bytes"]
        assert small["step_s"] > 0 and small["steps"] == whole["steps"] > 1
        assert GROUPS[group].metric.name in small
    assert "images\n" in ended[0][0].out and "ConEF 60 %" in ended[0][0].out


def test_a_process_alone_is_told_what_to_do():
    (alone,) = study(["--images", "digits"])
    assert "every process is a replica; start this with torchrun" in alone.code


# -- the tables -----------------------------------------------------------------------------------


def test_tables_of_paired_differences():
    lines = [line("images", "dense", seed, 0.8 + seed / 10, wire=8000) for seed in range(2)]
    lines += [line("images", "EF", s, 0.7 + s / 10, memory=10_000_000) for s in range(2)]
    lines += [line("images", "ConEF 60 %", 0, 0.71, memory=4_000_000)]
    lines += [line("images", "ConEF 60 %", 1, 0.79, memory=4_000_000)]
    lines += [line("adam", "EF", 0, 50.0, memory=3_000_000), line("adam", "dense", 0, 48.0)]
    lines += [{"row": "images: rbSGD", "seed": 0, "diverged": "NaN"}]
    table = render(lines)
    rows = {one.split("  ")[0]: one for one in table.splitlines()}
    # Differences of +1 and -1 point: deviation 1.414, t of one degree of freedom 12.706.
    assert "+0.00 +- 12.71" in rows["ConEF 60 %"]
    assert "-10.00 +- 12.71" in rows["ConEF 60 %"]
    images = table.split("\n\n")[0]
    assert " 0.5  none" in images and " 4.0  ef+randomblock:0.1" in images  # below bf16
    assert " 4.000 " in rows["ConEF 60 %"] and " 6.000 " in rows["ConEF 60 %"]
    assert " 20.0 " in rows["ConEF 60 %"] and " 0.1 " in rows["ConEF 60 %"]
    assert "rbSGD (1 diverged)" in table
    assert "+2.00" in table and "lstm" not in table  # a pair has no interval


def test_pairs_are_of_seeds_that_both_rows_have():
    lines = [line("images", "EF", 0, 0.5), line("images", "EF", 1, 0.6)]
    lines += [line("images", "ConEF 80 %", 1, 0.7), line("images", "ConEF 80 %", 2, 0.1)]
    assert "+10.00" in render(lines)


def test_rates_have_tables_of_their_own():
    lines = [
        {**line("images", row, 0, value), "settings": {"lr": lr}}
        for row, lr, value in (("EF", 0.1, 0.5), ("EF", 0.3, 0.6), ("ConEF 60 %", 0.1, 0.4))
    ]
    first, second = render(lines).split("\n\n")
    assert first.startswith("images, lr 0.1\n") and second.startswith("images, lr 0.3\n")
    assert "-10.00" in first and "ConEF" not in second


# -- stability ------------------------------------------------------------------------------------

SHORT = {"rows": 4, "columns": 16, "keep": 0.1, "lr": 0.1, "noise": 1.0, "steps": 40, "seeds": 2}


def test_a_small_sketch_needs_a_large_beta():
    least, *_, most = conef_stability.growth("balanced", 0.1, **SHORT)
    assert least > 20 and most < 2  # beta of 0.1 and 0.9
    assert conef_stability.growth("balanced", 1.0, **SHORT)[0] < 2  # a cell for each element


def test_smallest_fraction_is_that_from_which_all_are_stable():
    growths = {f"{fraction:g}": [1.0] * 9 for fraction in conef_stability.FRACTIONS}
    growths["0.3"][0] = float("inf")
    growths["1"][1] = 5.0
    found = conef_stability.smallest(growths, 2.0)
    assert found == [0.4, None, *[0.1] * 7]


def test_the_table_has_the_published_numbers(tmp_path, capsys):
    path = tmp_path / "figures" / "stability.json"
    small = ["--rows", "2", "--columns", "4", "--steps", "8", "--seeds", "1"]
    conef_stability.main([*small, "--json", str(path)])
    printed = capsys.readouterr().out
    assert "published" in printed and "balanced" in printed and "murmur" in printed
    result = json.loads(path.read_text())
    assert result["published"]["0.5"] == 0.4 and len(result["smallest"]["murmur"]) == 9
    with pytest.raises(SystemExit, match="keep is 2.0; pass more than 0"):
        conef_stability.main(["--keep", "2"])
