"""The right of one run to write a checkpoint's folder, which ends with the processes that have it.

    lock = FolderLock(folder, run="0a1b2c3d")     # the same on all ranks
    with SharedOutcome(mesh): lock.take()
    with SharedOutcome(mesh): lock.check()        # raises where another run has it
    ...
    lock.release()

A file ``.name.lock`` beside the folder is locked by one rank of those that share the disk, and says
which run that is. The kernel unlocks it when that process ends, however it ends. It is a lock of
fcntl's, which belongs to a process: one that takes it twice has it until it has released it twice,
and processes that are forked from it, such as a loader's, do not have it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FolderLock"]

_IS_HELD = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@dataclass
class _Right:
    """A right of this process: an open file, or None where it is that of another rank."""

    handle: int | None
    count: int = 0


#: The kernel's locks are of processes, and so is this list of them.
_rights: dict[tuple[int, Path], _Right] = {}


class FolderLock:
    """The right to write a folder, of all ranks of a run.

    Args:
        folder: the checkpoint, which need not be there.
        run: a token that no other run has, the same on all ranks.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder.resolve()
        self._path = self._folder.with_name(f".{self._folder.name}.lock")
        self._run = run
        self._pid = os.getpid()
        self._taken = False

    def take(self) -> None:
        """Takes the right, if it is free; `check` says whether that or another rank had it.

        Raises:
            OSError: the lock's file cannot be written.
        """
        right = _rights.get(self._key)
        if right is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            right = _rights[self._key] = _Right(self._locked())
        right.count += 1
        self._taken = True

    def check(self) -> None:
        """Checks, once all ranks have called `take`, that this run has it.

        Raises:
            ValueError: another run has it; it has been released here.
        """
        right = _rights[self._key]
        if right.handle is not None or right.count > 1:
            return
        try:
            holder: dict[str, Any] = json.loads(self._path.read_text())
        except (OSError, ValueError):  # it has just been taken, or released
            holder = {}
        if holder.get("run") == self._run:
            return
        self.release()
        who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown machine')}"
        raise ValueError(
            f"{self._folder} is being written by {who}: wait for that run or end it, or choose "
            "another folder"
        )

    def keep_for(self, owner: object) -> None:
        """Keeps the right as long as an object lives, unless this process has it otherwise."""
        if self._taken and _rights[self._key].count == 1:
            self._taken = False
            kept = FolderLock(self._folder, self._run)
            kept._taken = True
            weakref.finalize(owner, kept.release)

    def release(self) -> None:
        """Gives the right back; nothing where it was not taken, or by another process."""
        if not self._taken or self._pid != os.getpid():
            return
        self._taken = False
        right = _rights[self._key]
        right.count -= 1
        if right.count:
            return
        del _rights[self._key]
        if right.handle is not None:
            try:
                self._path.unlink(missing_ok=True)  # first, while nobody else can have locked it
            finally:
                os.close(right.handle)

    @property
    def _key(self) -> tuple[int, Path]:
        return os.getpid(), self._path

    def _locked(self) -> int | None:
        """The lock's file, opened and locked; None where another process has locked it."""
        if sys.platform == "win32":
            self._warn("Windows")
            return os.open(self._path, os.O_RDWR | os.O_CREAT)
        import fcntl

        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at_path(handle):
                    holder = {"pid": os.getpid(), "host": socket.gethostname(), "run": self._run}
                    os.truncate(handle, 0)
                    os.write(handle, json.dumps(holder).encode())
                    return handle
            except OSError as error:
                if error.errno in _IS_HELD:
                    os.close(handle)
                    return None
                if error.errno in _UNSUPPORTED:
                    self._warn(f"the file system of {self._path.parent}")
                    return handle
                os.close(handle)
                raise
            os.close(handle)  # it was deleted by whoever released it: once more

    def _is_at_path(self, handle: int) -> bool:
        """Whether the path is still that of the opened file."""
        try:
            return os.path.samestat(os.fstat(handle), self._path.stat())
        except FileNotFoundError:
            return False

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"{what} has no locks, so nothing keeps another run from writing {self._folder} as "
            "well: give each run a folder of its own",
            stacklevel=3,
        )
