"""Names of modules, functions and files in backticks exist: in docstrings, comments and pages."""

import importlib
import re

import pytest
from pages import PAGES, ROOT, name_of

FOLDERS = ("mpcomp", "stages", "recipes", "tests")
TEXTS = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS} | {
    # The changelog names what is gone, too.
    "pages": [page for page in PAGES if page.name != "CHANGELOG.md"]
}

NAME = re.compile(r"`((?:mpcomp|stages|recipes)(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`")
FILE = re.compile(r"`((?:mpcomp|stages|recipes|tests|docs)/[\w/.-]+\.\w+)`")


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or what is found in one by attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            fields = getattr(value, "__annotations__", {})
            if not hasattr(value, part) and part not in fields:
                return False
            value = getattr(value, part, None)
        return True
    return False


def gone_from(text: str) -> set[str]:
    """What a text names and is not there."""
    names = {name for name in NAME.findall(text) if not exists(name)}
    return names | {file for file in FILE.findall(text) if not (ROOT / file).exists()}


@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)
def test_what_is_named_exists(texts):
    gone = {name_of(path): gone_from(path.read_text()) for path in texts}
    assert not {path: names for path, names in gone.items() if names}


def test_a_name_that_is_gone_is_found():
    assert not gone_from(
        "`mpcomp.links.link.Link.encode`, `mpcomp.pipeline()`, `mpcomp/api/build.py`"
    )
    for name in ("mpcomp.links.link.Link.whisper", "mpcomp.nowhere", "mpcomp/nowhere.py"):
        assert gone_from(f"`{name}`") == {name}
