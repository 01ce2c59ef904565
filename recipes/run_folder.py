"""The folder of a run: configuration, metrics, summary, checkpoint; a crash leaves no half file."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFolder:
    """Paths of the parts of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def replica_steps(self) -> Path:
        """The file of what replicas exchanged in each step."""
        return self.path / "replicas.jsonl"

    @property
    def replica_plot(self) -> Path:
        return self.path / "replicas.png"

    @property
    def adaptive_steps(self) -> Path:
        """The file of what adaptive cuts sent with in each step."""
        return self.path / "adaptive.jsonl"

    @property
    def adaptive_plot(self) -> Path:
        return self.path / "adaptive.png"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def model(self) -> Path:
        """The model for others to load, where a recipe leaves one."""
        return self.path / "model"

    @property
    def baseline(self) -> RunFolder:
        """The uncompressed run beside this one."""
        return RunFolder(self.path / "uncompressed")

    def check(self) -> None:
        """Refuses, before any work, a folder that `create` could not use.

        Raises:
            ValueError: it cannot be written, or it holds a run already.
        """
        if self.config.exists():
            raise ValueError(
                f"the run folder {self.path} holds a run already; pass --resume {self.path} to go "
                "on with it, or another --out"
            )
        existing = self.path.absolute()
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            what = "not writable" if existing.is_dir() else "not a folder"
            raise ValueError(
                f"the run folder {self.path} cannot be written ({existing} is {what}); pass "
                "--out a folder that can"
            )

    def create(self, config: Mapping[str, Any]) -> None:
        """Makes the folder and writes the configuration.

        Raises:
            ValueError: it cannot be written, although its permissions said so.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.config, config)
        except OSError as error:  # a read-only or virtual file system refuses even root
            raise ValueError(
                f"the run folder {self.path} cannot be written ({error.strerror}); pass --out a "
                "folder that can"
            ) from error

    def read_config(self) -> dict[str, Any]:
        """The configuration of the run to go on with.

        Raises:
            ValueError: there is none, or it is not JSON.
        """
        try:
            values: dict[str, Any] = json.loads(self.config.read_text())
        except FileNotFoundError as error:
            raise ValueError(
                f"{self.path} is no run folder (it has no {self.config.name}); pass --resume the "
                "folder that a run printed when it began"
            ) from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.config} is not JSON ({error}); start the run anew") from error
        return values

    def write_metrics(self, history: Iterable[Mapping[str, Any]]) -> None:
        """All epochs so far; a resumed run writes the history of its checkpoint anew."""
        _replace(self.metrics, "".join(json.dumps(row) + "\n" for row in history))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Atomically: a reader finds the old file or the new one."""
    _replace(path, json.dumps(value, indent=2) + "\n")


def append_json_line(path: Path, value: Mapping[str, Any]) -> None:
    """One more line; a line that an earlier crash left unfinished is dropped first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write((json.dumps(value) + "\n").encode())


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


def _replace(path: Path, text: str) -> None:
    # A name of its own, as machines may share a disk and write the same.
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    unfinished.write_text(text)
    unfinished.replace(path)
