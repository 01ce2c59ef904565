"""The change of a folder's name, at one instant where the file system can.

Linux swaps two names atomically (renameat2 with RENAME_EXCHANGE: ext4, xfs, btrfs, tmpfs, ...), so
there is no moment without a folder of the name. Elsewhere there are two renames, with a moment
between them at which both folders are there and neither has the name: whoever looks for it finds
them by `mpcomp.checkpoint.replacing.complete_saves`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

from mpcomp.checkpoint.files import sync

__all__ = ["put_in_place"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def put_in_place(new: Path, name: Path, aside: Path) -> None:
    """Renames ``new`` to ``name``, and what had that name to ``aside``; all on one file system.

    Raises:
        OSError: it cannot be renamed. Each of the two is under one of these names.
    """
    if not name.exists():
        new.rename(name)
    elif _exchange(new, name):
        new.rename(aside)
    else:
        name.rename(aside)
        new.rename(name)
    sync(name.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names; False where the system or the file system cannot, and nothing is changed."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    sys.audit("os.rename", str(one), str(other), -1, -1)  # as for any other change of a name
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
