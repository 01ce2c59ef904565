"""The time of small messages: a short run of two checkouts, which here are the same one."""

import json

import pytest

from recipes.bench import small_messages


def test_two_checkouts_take_turns(tmp_path, capsys):
    out = tmp_path / "small.json"
    tiny = ["--shape", "2", "8", "16", "--chunks", "2", "--steps", "1", "--repeats", "2"]
    here = str(small_messages.HERE.parents[2])
    small_messages.main(
        [*tiny, "--methods", "none", "quant:4", "--against", here, "--out", f"{out}"]
    )
    rows = json.loads(out.read_text())["figures"]
    assert [row["method"] for row in rows] == ["none", "quant:4"]
    for row in rows:
        assert row["here_us"] > 0 and row["before_us"] > 0
        low, high = row["quartiles"]
        assert low <= row["ratio"] <= high
    assert "ratio" in capsys.readouterr().out


def test_numbers_below_one_are_refused():
    with pytest.raises(SystemExit, match="repeats is 0"):
        small_messages.main(["--repeats", "0"])
