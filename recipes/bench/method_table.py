"""The table of all methods that specs can name, from the registry, as a page of Markdown.

    python -m recipes.bench.method_table > docs/methods/registry.md

Names lead to the sections of docs/methods that render their docstrings. A test compares the page
with what this prints, so that it lacks no method.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from mpcomp import Compressor, Feedback
from mpcomp.core.spec import SpecValue, registered

PAGES = Path(__file__).parents[2] / "docs" / "methods"
HEAD = """\
# All names of specs

Printed from the registry by `python -m recipes.bench.method_table`; do not edit.
A spec is read by `mpcomp.parse`; [Methods](index.md) says what each sends and keeps.
Settings are in the order in which values without a name are taken.
"""

PROPERTIES_HEAD = """\
## What theory and transport ask

By these attributes the library knows what a method can do; it never asks for a class.

* *contractive*: the error is meant to be no larger than the tensor. So a memory may go round it.
* *unbiased*: the mean of what arrives is the tensor.
* *summable*: messages may be added on their way (all-reduce).
* *adaptable*: its ratio may change in a run (`Adaptive`, `GraVAC`).
* *length varies*: it is known only after coding.
* *goes*: at cuts, between replicas, or both.

A dash: the question is for compressors alone.
"""
#: Heading of a column -> the attribute.
PROPERTIES = {
    "contractive": "contractive",
    "unbiased": "is_unbiased",
    "summable": "summable",
    "adaptable": "adaptable",
    "length varies": "variable_length",
}


def page() -> str:
    """The page, ending with a line break."""
    rows = sorted({cls.spec: cls for cls in registered(SpecValue)}.items())
    sections = _sections()
    names: list[tuple[str, ...]] = []
    properties: list[tuple[str, ...]] = []
    for spec, cls in rows:
        assert dataclasses.is_dataclass(cls)
        path = f"{cls.__module__}.{cls.__qualname__}"
        link = f"[`{cls.__name__}`]({sections.get(path, '')}#{path})"
        specs = ", ".join([f"`{spec}`", *(f"`{alias}`" for alias in cls.aliases)])
        settings = ", ".join(f"`{f.name}`" for f in dataclasses.fields(cls)) or "–"
        first = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        names.append((specs, link, _kind(cls), settings, first.replace("|", "\\|")))
        properties.append(
            (f"`{spec}`", *(_said(cls, name) for name in PROPERTIES.values()), _goes(cls))
        )
    parts = (
        HEAD,
        _table(("spec", "class", "kind", "settings", "in one line"), names),
        PROPERTIES_HEAD,
        _table(("spec", *PROPERTIES, "goes"), properties),
    )
    return "\n".join(parts)


def _sections() -> dict[str, str]:
    """The page, a file of docs/methods, on which each docstring is rendered."""
    directive = re.compile(r"^::: (\S+)$", re.MULTILINE)
    return {
        path: file.name
        for file in sorted(PAGES.glob("*.md"))
        for path in directive.findall(file.read_text())
    }


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines) + "\n"


def _kind(cls: type[SpecValue]) -> str:
    if issubclass(cls, Compressor):
        return "compressor"
    return "feedback" if issubclass(cls, Feedback) else "other"


def _said(cls: type[SpecValue], name: str) -> str:
    """A capability of the class; one that hangs on the instance says so."""
    value = getattr(cls, name, None)
    if value is None:
        return "–"
    if name == "adaptable" and issubclass(cls, Compressor) and cls.with_cf is Compressor.with_cf:
        return "no"  # it has no ratio to set
    return ("yes" if value else "no") if isinstance(value, bool) else "by its settings"


def _goes(cls: type[SpecValue]) -> str:
    """Places that messages of a method go to."""
    at_cuts, between = _said(cls, "at_cuts"), _said(cls, "between_replicas")
    if at_cuts == between:
        return "both" if at_cuts == "yes" else at_cuts
    return "at cuts" if at_cuts == "yes" else "between replicas"


if __name__ == "__main__":
    print(page(), end="")
