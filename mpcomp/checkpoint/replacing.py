"""A folder that is written beside its name and moved there when it is complete.

    .name-token/          grows, while name/ is still what it was
    .name-token-claim/    made by the one rank, of those that share the disk, that moves or deletes
    .name-token-old/      what name/ was, until all ranks have theirs in place

Ranks may share a disk or have one each, and need not know: making a folder succeeds for one alone.
If a machine fails meanwhile these stay, and go when a folder of that name is next replaced.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpcomp.checkpoint.files import sync, write_meta

__all__ = ["Replacement", "new_token"]


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
        self._beside = self._folder.with_name(f".{self._folder.name}-{token}")
        self._claim = self._beside.with_name(f"{self._beside.name}-claim")
        self._old = self._beside.with_name(f"{self._beside.name}-old")
        self._claimed = False
        self._in_place = False

    def make(self, part: str = "") -> Path:
        """The folder to write to, or a part of it."""
        path = self._beside / part
        path.mkdir(parents=True, exist_ok=True)
        return path

    def move(self, meta: Mapping[str, Any] | None = None) -> None:
        """Moves the folder into place, unless another rank does; all have written by now.

        Args:
            meta: what ``checkpoint.json`` says beside several parts.

        Raises:
            OSError: it cannot be moved. What was in its place is there again.
        """
        if not self._claims():
            return
        if meta is not None:
            write_meta(self._beside, meta)
        if self._folder.exists():  # aside first: at no time is there no complete folder
            self._folder.replace(self._old)
        try:
            self._beside.replace(self._folder)
        except BaseException:
            self._restore()
            raise
        self._in_place = True
        sync(self._folder.parent)

    def finish(self) -> None:
        """Deletes what has been replaced; all ranks have theirs in place by now."""
        if self._claimed:
            ours = re.compile(rf"\.{re.escape(self._folder.name)}-[0-9a-f]{{8}}(-claim|-old)?")
            for path in self._folder.parent.iterdir():
                if ours.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def undo(self) -> None:
        """Leaves everything as it was before `make`, unless another rank is moving the folder."""
        try:
            if not self._claims():
                return
        except OSError:  # nothing can be written there, so nothing was
            return
        if self._in_place:
            self._folder.replace(self._beside)
            self._restore()
        shutil.rmtree(self._beside, ignore_errors=True)
        self._claim.rmdir()

    def leave(self) -> None:
        """Gives up where nobody can tell whether the other ranks have moved theirs.

        Both are kept if this rank has moved its own, else nothing has changed.
        """
        if self._in_place:
            self._claim.rmdir()
        else:
            self.undo()

    def _restore(self) -> None:
        if self._old.exists():
            self._old.replace(self._folder)

    def _claims(self) -> bool:
        if not self._claimed:
            try:
                self._claim.mkdir()
            except FileExistsError:
                return False
            self._claimed = True
        return True
