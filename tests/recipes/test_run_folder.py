"""A run folder is refused before any work, and its files survive a crash."""

import json
from pathlib import Path

import pytest

from recipes.run_folder import RunFolder, append_json_line, read_json_lines, write_json


def test_create_and_read_back(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.check()
    assert not folder.path.exists()  # checking makes nothing
    folder.create({"seed": 1})
    assert folder.read_config() == {"seed": 1}


def test_second_run_in_a_folder_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create({})
    with pytest.raises(ValueError, match=r"holds a run already; pass --resume .* or another --out"):
        folder.check()


def test_unwritable_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"cannot be written \(.* is not writable\); pass --out"):
        RunFolder(tmp_path / "runs" / "x").check()


def test_file_in_the_way(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(.*runs is not a folder\)"):
        RunFolder(tmp_path / "runs" / "x").check()


def test_folder_without_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"is no run folder \(it has no config.json\)"):
        RunFolder(tmp_path).read_config()


def test_broken_configuration(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": ')
    with pytest.raises(ValueError, match="is not JSON"):
        RunFolder(tmp_path).read_config()


def test_write_json_leaves_no_other_file(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})
    write_json(tmp_path / "x.json", {"a": 2})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_unfinished_line_is_dropped(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert read_json_lines(path) == []
    append_json_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2, "b')  # a crash in the middle of a line
    assert read_json_lines(path) == [{"a": 1}]
    append_json_line(path, {"a": 3})
    assert read_json_lines(path) == [{"a": 1}, {"a": 3}]


def test_broken_line_is_an_error(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(ValueError, match="has a line that is not JSON"):
        read_json_lines(path)


def test_a_file_system_that_refuses_is_an_error_in_words(tmp_path, monkeypatch):
    def refuses(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuses)
    with pytest.raises(
        ValueError, match=r"cannot be written \(Read-only file system\); pass --out"
    ):
        RunFolder(tmp_path / "run").create({})
