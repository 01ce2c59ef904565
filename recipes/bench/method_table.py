"""The table of all methods that specs can name, from the registry, as a page of Markdown.

    python -m recipes.bench.method_table > docs/methods/registry.md

A test compares the page with what this prints, so that it lacks no method.
"""

from __future__ import annotations

import dataclasses
import inspect

from mpcomp import Compressor, Feedback
from mpcomp.core.spec import SpecValue, registered

HEAD = """\
# All names of specs

Printed from the registry by `python -m recipes.bench.method_table`; do not edit.
A spec is read by `mpcomp.parse`; [Methods](index.md) says what each sends and keeps.
Settings are in the order in which values without a name are taken.
"""


def page() -> str:
    """The page, ending with a line break."""
    rows = sorted({cls.spec: cls for cls in registered(SpecValue)}.items())
    lines = [
        "| spec | class | kind | settings | at cuts | between replicas | in one line |",
        "|---|---|---|---|---|---|---|",
    ]
    for spec, cls in rows:
        assert dataclasses.is_dataclass(cls)
        names = ", ".join([f"`{spec}`", *(f"`{alias}`" for alias in cls.aliases)])
        settings = ", ".join(f"`{f.name}`" for f in dataclasses.fields(cls)) or "–"
        first = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        cells = (
            names,
            f"`{cls.__name__}`",
            _kind(cls),
            settings,
            _yes(cls.at_cuts),
            _yes(cls.between_replicas),
            first.replace("|", "\\|"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n" + "\n".join(lines) + "\n"


def _kind(cls: type[SpecValue]) -> str:
    if issubclass(cls, Compressor):
        return "compressor"
    return "feedback" if issubclass(cls, Feedback) else "other"


def _yes(value: object) -> str:
    """A capability of the class; one that hangs on the instance says so."""
    return ("yes" if value else "no") if isinstance(value, bool) else "by its settings"


if __name__ == "__main__":
    print(page(), end="")
