"""The page of messages: the code says each of them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"
MESSAGES = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE)
#: Where a value is put in: no text of the page reaches over it.
HOLE = "\0"


@cache
def _said() -> frozenset[str]:
    """All texts of the packages but for docstrings, joined as the compiler joins them."""
    return frozenset(
        text
        for room in ("mpcomp", "stages")
        for path in (ROOT / room).rglob("*.py")
        for text in _texts(ast.parse(path.read_text()))
    )


def _texts(tree: ast.Module) -> Iterator[str]:
    # A docstring, like any other text that stands alone, is said to nobody.
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in alone:
            yield _text(node)


def _text(node: ast.AST) -> str:
    """The text of a node; a hole where it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return HOLE


def _says(text: str, message: str) -> bool:
    """Whether the parts of a message stand in a text, in this order."""
    at = 0
    for part in message.split("…"):
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def test_the_page_has_messages():
    assert len(MESSAGES) == len(set(MESSAGES)) >= 80


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_says_it(message):
    assert max(map(len, message.split("…"))) >= 8, "too little to be searched for"
    assert any(_says(text, message) for text in _said())


@pytest.mark.parametrize(
    "source, message, says",
    [
        ("f'split={x}: ' 'two or more'", "split=…: two or more", True),
        ("f'{x} of ' + f'{y} rows'", "… of … rows", True),
        ("f'{x} rows of {y}'", "… of … rows", False),
        ("f'rows {x} of'", "rows of", False),
    ],
)
def test_the_search_finds_what_is_said(source, message, says):
    tree = ast.parse(f"error({source})")
    assert any(_says(text, message) for text in _texts(tree)) == says
    assert not list(_texts(ast.parse("def f():\n    'a docstring of one line'\n")))
