"""Rows of a bench in a file, each written as it is finished: the same command continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["RowFile"]


class RowFile:
    """Rows of a bench, one of each method, and the settings that they share.

    Args:
        path: a JSON file that may be there already; None keeps the rows in memory alone.
        kind: its name of the rows.
        settings: of every row.

    Raises:
        ValueError: the file there has other settings.
    """

    def __init__(self, path: Path | None, kind: str, settings: Mapping[str, Any]) -> None:
        self._path, self._kind = path, kind
        self._settings = dict(settings)
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            there = json.loads(path.read_text())
            if there.get("settings") != self._settings:
                raise ValueError(
                    f"{path} has rows of other settings ({there.get('settings')}; these are "
                    f"{self._settings}): choose another file"
                )
            self.rows = there[kind]

    def missing(self, methods: Sequence[str]) -> list[str]:
        """The methods that have no row yet, in their order."""
        done = {row["method"] for row in self.rows}
        return [method for method in methods if method not in done]

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row, and writes all of them."""
        self.rows.append(dict(row))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"settings": self._settings, self._kind: self.rows}, indent=1)
            beside = self._path.with_suffix(".tmp")
            beside.write_text(text + "\n")
            beside.replace(self._path)
