"""Docstrings begin with the noun that the thing is, not with a relative clause."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RIDDLES = {"What", "Where", "Which", "Who", "Whose", "That", "Those", "How"}


@pytest.mark.parametrize("room", ["mpcomp", "stages", "recipes"])
def test_no_docstring_begins_with_a_riddle(room):
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            docstring = ast.get_docstring(node) or ""
            if docstring.partition(" ")[0] in RIDDLES:
                name = getattr(node, "name", "the module")
                found.append(f"{path.relative_to(ROOT)}, {name}: {docstring.splitlines()[0]}")
    assert not found, "say what it is:\n" + "\n".join(found)
