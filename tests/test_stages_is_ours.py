"""The package `stages` has a common name: another one in its place is said, with the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported(first: Path, code: str = "import mpcomp") -> subprocess.CompletedProcess[str]:
    """A new process with a folder before ours on its path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(first), str(ROOT)])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, cwd=first, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["stages.py", "stages/__init__.py"])
def test_a_foreign_stages_is_named(tmp_path, name):
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise RuntimeError('it must not be run')\n")
    done = imported(tmp_path)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode and said.startswith("ImportError: ")
    for words in (str(foreign), str(ROOT / "stages"), "rename"):
        assert words in said
    assert "it must not be run" not in done.stderr


def test_one_that_was_imported_before_is_named(tmp_path):
    (tmp_path / "stages.py").write_text("")
    done = imported(tmp_path, "import stages, mpcomp")
    assert str(tmp_path / "stages.py") in done.stderr and "rename" in done.stderr


def test_a_folder_of_data_is_no_package(tmp_path):
    (tmp_path / "stages").mkdir()
    done = imported(tmp_path, "import mpcomp, stages; print(stages.__file__)")
    assert done.stdout.strip() == str(ROOT / "stages" / "__init__.py"), done.stderr


def test_ours_through_a_link(tmp_path):
    (tmp_path / "linked").symlink_to(ROOT)
    done = imported(tmp_path / "linked", "import mpcomp, stages; print(stages.Stage.__name__)")
    assert done.stdout.strip() == "Stage", done.stderr


def test_without_any(tmp_path):
    hidden = "import importlib.util as u; u.find_spec = lambda name, package=None: None; "
    done = imported(tmp_path, hidden + "import mpcomp")
    assert "install mpcomp again" in done.stderr
