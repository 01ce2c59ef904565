"""A hook of mkdocs: Markdown twins of all pages, and `llms.txt`, which lists them (llmstxt.org).

A twin stands in the site where its source stands under docs/, so links between twins hold. What
mkdocstrings renders stands there as signature and docstring.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: A place where mkdocstrings renders a name, with the options under it.
DIRECTIVE = re.compile(r"^::: (\S+)\n(?:[ ]{4}.*\n|\n(?=[ ]{4}))*", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_post_build(config: Mapping[str, Any], **_: Any) -> None:
    """Writes the twins and the list of them into the site."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section, pages in sections(config["nav"]):
        lines += ["", f"## {section}", ""]
        for page in pages:
            text = twin((docs / page).read_text())
            (site / page).parent.mkdir(parents=True, exist_ok=True)
            (site / page).write_text(text)
            lines.append(f"- [{title(text)}]({page}): {first_sentence(text)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def sections(nav: Sequence[Any]) -> Iterator[tuple[str, list[str]]]:
    """The sections of a navigation by name, with their pages; a single page is a section too."""
    for entry in nav:
        for name, pages in entry.items():
            yield name, [pages] if isinstance(pages, str) else list(pages)


def twin(markdown: str) -> str:
    """A page with docstrings in place of directives."""
    return DIRECTIVE.sub(lambda found: _documented(found[1]) + "\n\n", markdown)


def _documented(path: str) -> str:
    """The signature and docstring of what a dotted path names."""
    value = pkgutil.resolve_name(path)
    has_one = callable(value) and not (isinstance(value, type) and issubclass(value, BaseException))
    signature = str(inspect.signature(value)) if has_one else ""
    doc = inspect.getdoc(value) if callable(value) or inspect.ismodule(value) else repr(value)
    return f"### `{path.rpartition('.')[2]}{signature}`\n\n{doc or ''}"


def title(markdown: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    assert found, f"a page without a heading: {markdown[:60]!r}"
    return found[1]


def first_sentence(markdown: str) -> str:
    """The first sentence of a page, without links; no heading, table, list or figure.

    Raises:
        ValueError: there is none.
    """
    for paragraph in FENCE.sub("", markdown).split("\n\n"):
        plain = LINK.sub(r"\1", " ".join(paragraph.split()))
        plain = re.sub(r"^\*\*\w+\.\*\* ", "", plain).replace("**", "")  # "Question."
        sentence = re.split(r"(?<=[.!?])\s", plain, maxsplit=1)[0]
        if re.match(r"[\w`]", plain) and sentence[-1] in ".!?:":
            return sentence
    raise ValueError(f"no sentence in {markdown[:60]!r}")
