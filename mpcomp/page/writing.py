"""A page from its template, the parts that all pages share, and its data.

A template (an HTML file of the room that it is about) has its texts, its pictures and their code.
Three places in it are filled: `head.html`, how a page begins, with the look of all, `style.css`;
`elements.js`, what pages draw with; and JSON of what it shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

__all__ = ["write_page"]

HEAD: Final = "<!-- the head of all pages -->"
STYLE: Final = "/* the style of all pages */"
ELEMENTS: Final = "/* the parts of all pages */"
DATA: Final = '"the data"'


def write_page(
    path: Path, room: str, data: Mapping[str, Any], *, template: str = "page.html"
) -> None:
    """Writes a page.

    Args:
        path: of the file.
        room: package that has the template.
        data: to be shown.
        template: name of its file.

    Raises:
        ValueError: numbers that JSON cannot hold.
        OSError: the file cannot be written.
    """
    text = _text(room, template)
    # The data last: they may hold anything, and the other places as well.
    for place, part in (
        (HEAD, _text(__package__, "head.html")),
        (STYLE, _text(__package__, "style.css")),
        (ELEMENTS, _text(__package__, "elements.js")),
        (DATA, _embedded(data)),
    ):
        before, after = text.split(place)
        text = before + part + after
    path.write_text(text, encoding="utf-8")


def _text(room: str | None, name: str) -> str:
    assert room is not None
    return resources.files(room).joinpath(name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element.

    A name with ``</script>`` or ``<!--`` in it would end the element, or hide its end: no ``<`` is
    left as such.
    """
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")
