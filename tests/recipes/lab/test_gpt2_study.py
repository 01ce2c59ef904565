"""`recipes.lab.gpt2_study`: its rows, its runs and its table."""

import pytest

from recipes.lab import gpt2_study
from recipes.lab.cut_grid import shared_settings
from recipes.lab.gpt2_study import ROWS


def test_rows_differ_in_their_methods_alone():
    options = gpt2_study.parse_args(["--warmup-epochs", "1"])
    configs = {row: gpt2_study.configuration(options, row, 1) for row in ROWS}
    shared = {str(shared_settings(config, options)) for config in configs.values()}
    assert len(shared) == 1
    config = configs["fw4-bw8, AQ-SGD"]
    assert (config.act, config.seed, config.warmup_epochs) == (("aqsgd+quant:4",), 1, 1)
    assert configs["bf16"].warmup_epochs == 0
    assert {config.tie for config in configs.values()} == {None}  # both uses are on one rank


def test_rows_without_the_uncompressed_one_are_refused(capsys):
    with pytest.raises(SystemExit):
        gpt2_study.parse_args(["--rows", "fw4-bw8"])
    assert "without bf16, which is what the others are held to" in capsys.readouterr().err


@pytest.mark.parametrize("reference", ["bf16", "none"])
def test_the_table(reference):
    """Of results of today, and from before bf16 was the reference."""
    lines = [
        {"row": row, "seed": seed, "perplexity_compressed": value, "wire_ratio": 1.0,
         "cut_ratio_overall": ratio}
        for row, ratio, values in ((reference, 1.0, (100, 104)), ("fw4-bw8", 0.1875, (102, 105.04)))
        for seed, value in enumerate(values)
    ]  # fmt: skip
    text = gpt2_study.render(lines)
    row = next(line for line in text.splitlines() if "fw4-bw8" in line)
    assert [cell.strip() for cell in row.split("|")[1:4]] == ["fw4-bw8", "6.00", "2.7"]
    assert "| +1.50" in row
    assert f"perplexity of `{reference}`: 102.0, 100.0 to 104.0 (n = 2)" in text
    assert (f"against `{reference}`" in text) == (reference == "none")
