"""Pages for developers: their Python is executed, from top to bottom of each."""

import re
import runpy
from pathlib import Path

import pytest

PAGES = Path(__file__).parent.parent / "docs" / "develop"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted(PAGES.glob("add-a-*.md")), ids=lambda page: page.stem)
def test_a_page_runs(ranks, page, tmp_path):
    """In a process of its own, as the methods that it defines stay registered."""
    blocks = BLOCK.findall(page.read_text())
    assert len(blocks) >= 3
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    ranks(executed, 1, str(script), init=False)


def executed(script):
    """A script as the interpreter is given it."""
    runpy.run_path(script, run_name="__main__")
