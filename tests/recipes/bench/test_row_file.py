"""Rows of a bench: what is finished is kept, and only under the same settings."""

import json

import pytest

from recipes.bench.row_file import RowFile


def test_a_bench_that_was_stopped_continues(tmp_path):
    path = tmp_path / "new" / "rows.json"
    first = RowFile(path, "soak", {"steps": 3})
    assert first.missing(["a", "b"]) == ["a", "b"]
    first.add({"method": "a", "x": 1})
    again = RowFile(path, "soak", {"steps": 3})
    assert again.missing(["a", "b"]) == ["b"]
    again.add({"method": "b", "x": 2})
    there = json.loads(path.read_text())
    assert there == {"settings": {"steps": 3}, "soak": again.rows}
    assert [row["x"] for row in again.rows] == [1, 2]
    assert [found.name for found in path.parent.iterdir()] == ["rows.json"]


def test_other_settings_need_another_file(tmp_path):
    path = tmp_path / "rows.json"
    RowFile(path, "soak", {"steps": 3}).add({"method": "a"})
    with pytest.raises(ValueError, match=r"rows of other settings .*'steps': 3.*choose another"):
        RowFile(path, "soak", {"steps": 4})


def test_rows_need_no_file():
    file = RowFile(None, "soak", {})
    file.add({"method": "a"})
    assert file.missing(["a", "b"]) == ["b"]
