"""Files of JSON, and of JSON lines, that a crash leaves whole."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "JsonLinesTail",
    "append_json_lines",
    "read_json",
    "read_json_lines",
    "replace_text",
    "write_json",
]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Atomically: a reader finds the old file or the new one."""
    replace_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The value in a file; None where there is no file.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); repair or move it") from error
    return value


def append_json_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """More lines; a line that an earlier crash left unfinished is dropped first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.seek(0, 2)
        if size and not _ends_with_newline(path):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write("".join(json.dumps(value) + "\n" for value in values).encode())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every finished line; none where there is no file.

    Raises:
        ValueError: a finished line is not JSON.
    """
    if not path.exists():
        return []
    *finished, _ = path.read_text().split("\n")
    try:
        return [json.loads(line) for line in finished]
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} has a line that is not JSON ({error}); repair or move it"
        ) from error


class JsonLinesTail:
    """Finished lines of a file that grows, each read once; one that is replaced is read anew.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = (0, 0)  # its number, and the bytes of it that have been read
        self.values: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All values so far.

        Raises:
            ValueError: a finished line is not JSON.
        """
        if not self._path.exists():
            return self.values
        status = self._path.stat()
        number, begun = self._file
        if status.st_ino != number or status.st_size < begun:
            begun, self.values = 0, []
        with self._path.open("rb") as file:
            file.seek(begun)
            whole = file.read()
        finished = whole[: whole.rfind(b"\n") + 1]
        try:
            self.values += [json.loads(line) for line in finished.splitlines()]
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{self._path} has a line that is not JSON ({error}); repair or move it"
            ) from error
        self._file = status.st_ino, begun + len(finished)
        return self.values


def replace_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    # A name of its own, as machines may share a disk and write the same.
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    unfinished.write_text(text)
    unfinished.replace(path)
