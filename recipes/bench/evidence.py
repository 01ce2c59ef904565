"""The origin of a result: the code and the machine that made it."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from pathlib import Path
from typing import Any

import torch

__all__ = ["code_id", "commit_id", "stamp"]

_ROOT = Path(__file__).parents[2]
_ROOMS = ("mpcomp", "stages", "recipes")


@functools.cache
def code_id() -> str:
    """A number of the code of this checkout, 12 digits; it needs no repository."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            digest.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit_id() -> str | None:
    """The commit of this checkout, with ``+`` if files differ from it; None without a repository.

    A copy of the files alone, as a machine for an hour may have, knows no commit: its command is
    told by ``--commit``.
    """
    git = ["git", "-C", str(_ROOT)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", *_ROOMS],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def stamp(commit: str | None = None) -> dict[str, Any]:
    """The origin of a row: commit, code, GPU and torch.

    Args:
        commit: as the command was told; by default the repository's, if there is one.
    """
    return {
        "commit": commit or commit_id(),
        "code": code_id(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }
