"""The rooms of mpcomp: what each may import, and what is loaded when.

The order itself stands in pyproject.toml, where import-linter reads it.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import mpcomp

ROOT = Path(__file__).parents[1]


def in_new_process(code: str) -> list[str]:
    """The lines that some code prints, in a process that has loaded nothing."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=env, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_imports_go_one_way(monkeypatch, capsys):
    """Those for types alone too; and within a room there is no cycle either."""
    cli = pytest.importorskip("importlinter.cli", reason="import-linter comes with mpcomp[test]")
    monkeypatch.chdir(ROOT)
    code = cli.lint_imports(no_cache=True)
    assert code == cli.EXIT_STATUS_SUCCESS, capsys.readouterr().out


@pytest.fixture(scope="module")
def loaded():
    """Modules after `import mpcomp`, and with the local engine; names that a `*` lacks then."""
    return in_new_process(
        "import sys, mpcomp\n"
        "print(*sys.modules)\n"
        "import mpcomp.engines.local\n"
        "print(*sys.modules)\n"
        "from mpcomp import *\n"
        "print(sorted(name for name in mpcomp.__all__ if name not in globals()))\n"
    )


@pytest.mark.parametrize("room", ["adaptive", "data_parallel", "checkpoint", "monitor", "api"])
def test_the_local_engine_loads_no_room_it_has_no_use_for(room, loaded):
    names = [name.split(".") for name in loaded[1].split() if name.startswith("mpcomp.")]
    assert ["mpcomp", "engines", "local"] in names
    assert room not in {name[1] for name in names}


def test_mpcomp_loads_nothing_until_it_is_asked(loaded):
    first, _, lacking = loaded
    assert not [name for name in first.split() if name.startswith(("mpcomp.", "torch"))]
    assert lacking == "[]"


def test_public_names_are_what_they_were():
    assert set(mpcomp.__all__) == set(dir(mpcomp)) >= {"TopK", "pipeline", "parse", "__version__"}
    assert all(getattr(mpcomp, name) is not None for name in mpcomp.__all__)
    assert callable(mpcomp.pipeline)  # a function: no room has its name
    with pytest.raises(AttributeError, match="TopJ"):
        mpcomp.TopJ  # noqa: B018


def test_values_can_be_pickled():
    value = mpcomp.EF21(mpcomp.TopK(0.1))
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.slow
def test_specs_are_read_by_whoever_asks_first():
    """No method is known until its module is imported, which `parse` sees to."""
    code = "from mpcomp.core.spec import parse; print(parse('gravac+topk:0.1'))"
    assert in_new_process(code) == ["gravac+topk:0.1"]
