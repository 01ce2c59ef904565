"""Pages for developers: their Python is executed, from top to bottom of each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parent.parent / "docs" / "develop"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted(PAGES.glob("add-a-*.md")), ids=lambda page: page.stem)
def test_a_page_runs(page, tmp_path):
    """In a process of its own, as the methods that it defines stay registered."""
    blocks = BLOCK.findall(page.read_text())
    assert len(blocks) >= 3
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
