"""The save to go on from: the one under its name, or that which all ranks have.

A machine that fails in the middle of a save may leave the new checkpoint in place on some disks,
the former one on others, and on a file system without an atomic exchange neither. All of them are
still there, in the workspaces of `mpcomp.checkpoint.replacing`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpcomp.checkpoint.files import Saved, has_remains
from mpcomp.checkpoint.locking import FolderLock
from mpcomp.checkpoint.replacing import complete_saves, new_token, put_back
from mpcomp.comm.agreement import SharedOutcome
from mpcomp.comm.mesh import Mesh

__all__ = ["exists", "find"]


def exists(folder: str | Path) -> bool:
    """Whether this disk has a checkpoint for `find`, whole or not: under its name, or about to."""
    return has_remains(Path(folder)) or bool(_hidden(Path(folder)))


def find(mesh: Mesh, folder: Path) -> Saved:
    """Opens the checkpoint of this name, after it has got the name back where that is due.

    All ranks call this. Where the one under the name is not the same on all of them, it is the
    newest that all have; and so where there is none of the name.

    Args:
        mesh: the ranks.
        folder: of the checkpoint, on each rank's own disk.

    Raises:
        ValueError: there is none, or a damaged one, or none that all ranks have; or another run is
            writing it.
    """
    with SharedOutcome(mesh) as looking:
        hidden = _hidden(folder)
        named = Saved.of(folder) if folder.exists() or not hidden else None
        held = {_identity(saved): saved for saved in hidden}
        if named is not None:
            held[_identity(named)] = named
        own = None if named is None else _identity(named)
        looking.value = [new_token(), own, list(held)]
    names = [name for _, name, _ in looking.values]
    if named is not None and all(name == names[0] for name in names):
        return named
    token = looking.values[0][0]
    chosen = _common(folder, [list(map(tuple, of_rank)) for _, _, of_rank in looking.values], names)
    lock = FolderLock(folder, token)
    try:
        with SharedOutcome(mesh):
            lock.take()
        with SharedOutcome(mesh):
            lock.check()
        with SharedOutcome(mesh):
            if own != chosen:
                warnings.warn(
                    f"a save of {folder} was interrupted; the checkpoint of step {chosen[1]}, "
                    "which is complete, gets its name back",
                    stacklevel=2,
                )
                put_back(held[chosen].folder, folder, token)
        with SharedOutcome(mesh):
            lock.release()
            found = Saved.of(folder)
    finally:
        lock.release()
    return found


def _hidden(folder: Path) -> list[Saved]:
    found = []
    for path in complete_saves(folder):
        try:
            found.append(Saved.of(path))
        except ValueError:  # damaged, so none to go on from
            continue
    return found


_Identity = tuple[str | None, int, int]


def _identity(saved: Saved) -> _Identity:
    return saved.token, saved.num_steps, saved.num_parts


def _common(
    folder: Path, held: Sequence[Sequence[Any]], names: Sequence[Sequence[Any] | None]
) -> Any:
    """The newest of the saves that all ranks have; on every rank alike."""
    common = [save for save in held[0] if all(save in of_rank for of_rank in held)]
    if common:
        return max(common, key=lambda save: (save[1], save[0] or ""))
    described = [
        f"{'none' if name is None else f'step {name[1]}'} on rank {rank}"
        for rank, name in enumerate(names)
    ]
    differing = next(i for i, name in enumerate(names) if name != names[0] or name is None)
    raise ValueError(
        f"{folder} is not of the same save on all ranks: {described[differing]}, {described[0]}, "
        "and no other save is on the disks of all; copy one there"
    )
