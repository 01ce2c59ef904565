"""The folder of a run: configuration, metrics, summary, checkpoint; a crash leaves no half file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpcomp.view.files import RunFiles
from mpcomp.view.json_files import (
    append_json_lines,
    read_json_lines,
    replace_text,
    write_json,
)

__all__ = ["RunFolder", "append_json_line", "read_json_lines", "write_json"]


@dataclass(frozen=True)
class RunFolder(RunFiles):
    """Paths of the parts of a recipe's run."""

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
        replace_text(self.metrics, "".join(json.dumps(row) + "\n" for row in history))


def append_json_line(path: Path, value: Mapping[str, Any]) -> None:
    """One more line, as `append_json_lines` writes several."""
    append_json_lines(path, [value])
