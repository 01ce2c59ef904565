"""A folder that is written beside its name and moved there when it is complete.

    name/                 the checkpoint
    .name-token/          workspace of one replacement
        .made-by-mpcomp-.name-token   marker, made first and deleted last
        new/              grows, while name/ is still what it was
        claim/            made by the one rank, of those that share the disk, that moves or deletes
        old/              what name/ was, until all ranks have theirs in place
    name-step-00000120/   a former checkpoint that is kept, with such a marker too

Ranks may share a disk or have one each, and need not know: making a folder succeeds for one alone.
If a machine fails meanwhile a workspace stays, and goes when a folder of that name is next
replaced. Only what has a marker with its own name in it is ever deleted: neither a folder of
somebody else's that happens to be called like one of these, nor a copy of one. In it only what a
save writes is deleted: a user's own files in a checkpoint's folder go on to the next one.

At every moment there is a save that is complete on all disks: under its name, or in a workspace
(`complete_saves`), from where `put_back` brings it back to its name.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpcomp.checkpoint.exchanging import put_in_place
from mpcomp.checkpoint.files import (
    MARK,
    Saved,
    delete_own,
    foreign,
    has_remains,
    is_checkpoint,
    sync,
    write_meta,
)

__all__ = ["Replacement", "complete_saves", "new_token", "put_back"]


def new_token() -> str:
    """Never used before; not from torch's generators, which a checkpoint keeps."""
    return secrets.token_hex(4)


class Replacement:
    """A folder that will take the place of another, or of nothing.

    Args:
        folder: to be replaced.
        token: a `new_token`, the same on all ranks.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self._folder = folder.resolve()
        self._workspace = self._folder.with_name(f".{self._folder.name}-{token}")
        self._new, self._old, self._claim = (
            self._workspace / name for name in ("new", "old", "claim")
        )
        self._token = token
        self._claimed = False

    def make(self, part: str = "") -> Path:
        """The folder to write to, or a part of it."""
        self._workspace.mkdir(parents=True, exist_ok=True)
        _mark(self._workspace)
        path = self._new / part
        path.mkdir(parents=True, exist_ok=True)
        return path

    def move(self, meta: Mapping[str, Any] | None = None) -> None:
        """Moves the folder into place, unless another rank does; all have written by now.

        Args:
            meta: what ``checkpoint.json`` says beside several parts.

        Raises:
            OSError: it cannot be moved; `undo` knows how far it came.
        """
        if not self._claims():
            return
        if meta is not None:
            write_meta(self._new, meta)
        put_in_place(self._new, self._folder, self._old)

    def finish(self, keep: int | None = None) -> None:
        """Deletes what has been replaced; all ranks have theirs in place by now.

        Args:
            keep: number of checkpoints to be left, the new one counted: what was replaced is
                called by its step, and the oldest of those go. None keeps none, and deletes none
                that were kept.
        """
        if not self._claimed:
            return
        for path in _checkpoints_in(_workspaces(self._folder)):
            _hand_on(path, self._folder)
        if keep is not None:
            if keep > 1 and is_checkpoint(self._old):
                self._keep_old()
            for path in _kept(self._folder)[keep - 1 :]:
                _discard(path)
        for path in _workspaces(self._folder):
            _discard(path)

    def undo(self) -> None:
        """Leaves everything as it was before `make`, unless another rank is moving the folder."""
        try:
            if not self._claims():
                return
        except OSError:  # nothing can be written there, so nothing was
            return
        if self._is_in_place():
            undone = self._workspace / "undone"
            # Swapped, but not renamed yet, what was replaced is where the new one was.
            former = next((path for path in (self._old, self._new) if path.exists()), None)
            if former is None:
                self._folder.rename(undone)
            else:
                put_in_place(former, self._folder, undone)
        elif self._old.exists() and not self._folder.exists():  # between two renames
            self._old.rename(self._folder)
        self._discard_workspace()

    def leave(self) -> None:
        """Gives up where nobody can tell whether the other ranks have moved theirs.

        Both are kept if this rank has moved its own, else nothing has changed.
        """
        if self._claimed and self._is_in_place():
            self._claim.rmdir()
        else:
            self.undo()

    def _is_in_place(self) -> bool:
        return is_checkpoint(self._folder) and Saved.of(self._folder).token == self._token

    def _keep_old(self) -> None:
        num_steps = Saved.of(self._old).num_steps
        kept = self._folder.with_name(f"{self._folder.name}-step-{num_steps:08d}")
        if kept.exists() and not _is_marked(kept):
            return  # somebody else's, and in the way
        _mark(self._old, kept.name)  # replaces one of an earlier run through the same steps
        put_in_place(self._old, kept, self._workspace / "kept")

    def _discard_workspace(self) -> None:
        """Deletes the workspace, first its name: nothing is left in it to be claimed meanwhile."""
        doomed = self._workspace.with_name(f".{self._folder.name}-{new_token()}")
        _mark(self._workspace, doomed.name)
        _discard(self._workspace.rename(doomed))

    def _claims(self) -> bool:
        if not self._claimed:
            self._claimed = _is_first(self._claim)
        return self._claimed


# -- what an interrupted save has left ------------------------------------------------------------


def complete_saves(folder: Path) -> list[Path]:
    """Complete checkpoints in workspaces beside ``folder``: as saves left that were interrupted."""
    return [path for path in _checkpoints_in(_workspaces(folder.resolve())) if is_checkpoint(path)]


def put_back(found: Path, folder: Path, token: str) -> None:
    """Gives one of `complete_saves` its name, unless another rank on this disk does.

    What has that name meanwhile stays, as one of `complete_saves`.

    Args:
        found: the checkpoint; its workspace stays.
        folder: its name.
        token: a `new_token`, the same on all ranks.
    """
    if _is_first(found.with_name(f"put-back-{token}")):
        put_in_place(found, folder.resolve(), found.with_name(f"aside-{token}"))


def _workspaces(folder: Path) -> list[Path]:
    """Folders beside ``folder`` that a `Replacement` of it has made."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}-[0-9a-f]{{8}}")
    if not folder.parent.is_dir():
        return []
    named = sorted(path for path in folder.parent.iterdir() if pattern.fullmatch(path.name))
    return [path for path in named if _is_marked(path)]


def _checkpoints_in(workspaces: list[Path]) -> list[Path]:
    return [
        path
        for workspace in workspaces
        for path in sorted(workspace.iterdir())
        if path.is_dir() and has_remains(path)
    ]


def _hand_on(former: Path, folder: Path) -> None:
    """Moves a user's own files from a checkpoint to the one that has taken its place."""
    for path in foreign(former):
        if (folder / path).parent.is_dir() and not (folder / path).exists():
            (former / path).rename(folder / path)


# -- former checkpoints ---------------------------------------------------------------------------


def _kept(folder: Path) -> list[Path]:
    """Former checkpoints of this name, those of most steps first."""
    pattern = re.compile(rf"{re.escape(folder.name)}-step-([0-9]{{8,}})")
    found = [
        (int(match[1]), path)
        for path in folder.parent.iterdir()
        if (match := pattern.fullmatch(path.name)) and _is_marked(path)
    ]
    return [path for _, path in sorted(found, reverse=True)]


# -- what is one's own ----------------------------------------------------------------------------


def _marker(folder: Path, name: str | None = None) -> Path:
    return folder / f"{MARK}{name or folder.name}"


def _mark(folder: Path, name: str | None = None) -> None:
    """Says that it may be deleted, under its name or one that it is about to get."""
    _marker(folder, name).touch()
    sync(folder)


def _is_marked(folder: Path) -> bool:
    return not folder.is_symlink() and _marker(folder).is_file()


def _is_first(claim: Path) -> bool:
    """Whether no other rank of this disk has made this folder."""
    try:
        claim.mkdir()
    except FileExistsError:
        return False
    return True


def _discard(folder: Path) -> None:
    """Deletes a workspace or a former checkpoint; what cannot be deleted now is later."""
    inside = folder.iterdir() if folder.name.startswith(".") else ()
    with contextlib.suppress(OSError):
        for path in (*inside, folder):
            if path.is_dir():
                delete_own(path)
