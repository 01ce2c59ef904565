"""The pages of promises and of laws: each row names tests that are there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
#: Rows that a page has at least: a table that is not found has none.
PAGES = {DOCS / "guide" / "promises.md": 20, DOCS / "develop" / "laws.md": 15}
TEST = re.compile(r"`(?P<file>[\w/]+\.py)::(?P<function>\w+)`")


def _rows(page: Path) -> list[str]:
    """The rows of the page's tables, without heads and rules."""
    tables = re.findall(r"^\|.*\n\|[|-]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_row_has_its_tests(page):
    """In its last cell, and nothing else there."""
    rows = _rows(page)
    assert len(rows) >= PAGES[page]
    for row in rows:
        cell = row.strip("| ").rpartition(" | ")[2]
        assert TEST.search(cell) and not TEST.sub("", cell).strip(", "), row


NAMED = sorted({found for page in PAGES for row in _rows(page) for found in TEST.findall(row)})


@pytest.mark.parametrize("file, function", NAMED, ids=str)
def test_the_test_is_there(file, function):
    path = TESTS / file
    assert path.exists(), path
    functions = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    assert function in functions
