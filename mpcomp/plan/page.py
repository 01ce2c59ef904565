"""A page of a plan: one file with all figures, that a browser opens without a network.

The template (`page.html`) has the texts, the pictures and their code; what it shows comes from the
JSON that is put in here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

__all__ = ["write_page"]

#: Where the template has its data.
PLACE: Final = '"the plan"'


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the page of a plan.

    Args:
        path: of the file.
        data: what `Outcome.to_dict` returns, with ``about``, a sentence on the model and the links,
            and ``mbps``, the rates for which it was made: one for all links, or one for each; None
            for no limit.

    Raises:
        ValueError: numbers that JSON cannot hold.
        OSError: the file cannot be written.
    """
    template = resources.files("mpcomp.plan").joinpath("page.html").read_text(encoding="utf-8")
    before, after = template.split(PLACE)
    path.write_text(before + _embedded(data) + after, encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element.

    A name with ``</script>`` or ``<!--`` in it would end the element, or hide its end: no ``<`` is
    left as such.
    """
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")
