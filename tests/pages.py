"""The pages, and the commands that they give."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKILLS = sorted(ROOT.glob(".agents/skills/*/SKILL.md"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *SKILLS])
#: Those that say what to type.
GUIDES = [p for p in PAGES if p.name == "README.md" or p.parent.name in ("start", "guide")]
GUIDES += SKILLS
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands_of(page: Path) -> Iterator[str]:
    """The commands of a page, one a line, with the remarks behind them."""
    for block in BASH.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line
