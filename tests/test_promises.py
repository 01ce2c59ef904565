"""The page of promises: each names a test that is there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "guide" / "promises.md"
ROW = re.compile(r"^\| (?P<promise>[^|]+) \| `(?P<file>[^`:]+)::(?P<function>\w+)` \|$")
ROWS = [found for line in PAGE.read_text().splitlines() if (found := ROW.match(line))]


def test_every_promise_has_its_test():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    heads = [line for line in lines if line in ("| promise | test |", "|---|---|")]
    assert len(ROWS) == len(lines) - len(heads) >= 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["function"])
def test_the_test_of_a_promise_is_there(row):
    path = TESTS / row["file"]
    assert path.exists(), path
    functions = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    assert row["function"] in functions
