"""The files of a checkpoint: writing a part, reading it tensor by tensor, telling what is one.

Every tensor has a checksum in ``checkpoint.json``, and so has that file itself: a bit that a disk
has lost is an error, and not a weight. Checkpoints from before there were checksums are read too.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mpcomp.checkpoint.forms import OF_PART, OF_SEVERAL, check_form

__all__ = [
    "Part",
    "Saved",
    "is_checkpoint",
    "part_name",
    "sync",
    "weights_files",
    "write_meta",
    "write_part",
]

FORMAT, VERSION = "mpcomp checkpoint", 1
WEIGHTS, STATE, META = "weights.safetensors", "state.safetensors", "checkpoint.json"


def part_name(rank: int, num_ranks: int) -> str:
    """Folder of one rank's part."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}"


# -- writing --------------------------------------------------------------------------------------


def write_part(
    folder: Path,
    meta: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
) -> None:
    """Writes the three files of one part, and waits until the disk has them.

    Raises:
        OSError: the folder cannot be written.
        TypeError: ``meta`` has what JSON cannot hold.
    """
    checksums = {}
    for name, given in ((WEIGHTS, weights), (STATE, state)):
        tensors = _on_cpu(given)
        checksums[_kind(name)] = {key: _checksum(value) for key, value in tensors.items()}
        try:
            save_file(tensors, folder / name)
        except SafetensorError as error:
            raise OSError(f"{folder / name} cannot be written: {error}") from error
        sync(folder / name)
    write_meta(folder, {**meta, "checksums": checksums})


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    """Writes ``checkpoint.json``, and waits until the disk has it."""
    # As they are read again: of names that are numbers, for example, JSON makes text.
    entries = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **meta}))
    entries["checksum"] = _checksum_of_json(entries)
    (folder / META).write_text(json.dumps(entries, indent=1))
    sync(folder / META)
    sync(folder)


def sync(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder: power may fail at any time."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some network file systems cannot do that
            raise
    finally:
        os.close(handle)


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies that share no storage, which safetensors would refuse."""
    return {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}


def _kind(file: str) -> str:
    return file.partition(".")[0]


def _checksum(tensor: Tensor) -> int:
    """Of a contiguous tensor on the CPU: its dtype, shape and bytes."""
    about = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, about)


def _checksum_of_json(entries: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(entries, sort_keys=True).encode())


# -- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The files of one rank, or of the only one; tensors are read when they are asked for.

    Attributes:
        folder: with the three files.
        meta: of ``checkpoint.json``.
        shapes: of the weights, by name.
        state: names of the tensors in ``state.safetensors``.
    """

    folder: Path
    meta: dict[str, Any]
    shapes: dict[str, torch.Size]
    state: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> Part:
        """Opens a part.

        Raises:
            ValueError: it is not complete, damaged, or of another format.
        """
        if missing := _missing(folder):
            raise ValueError(
                f"{folder} is no complete checkpoint: {', '.join(missing)} missing; expected a "
                "folder that Pipeline.save has written"
            )
        meta = _read_meta(folder, OF_PART)
        shapes = _with_file(folder / WEIGHTS, _shapes)
        state = _with_file(folder / STATE, lambda file: frozenset(file.keys()))
        return cls(folder, meta, shapes, state)

    def read_weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Weights that this part has of ``names``."""
        return self._read(WEIGHTS, [name for name in names if name in self.shapes])

    def read_state(
        self, prefix: str, wanted: Callable[[str], bool] = lambda rest: True
    ) -> dict[str, Tensor]:
        """The state's tensors under ``prefix``, by the rest of their names, if that is wanted."""
        rests = sorted(name.removeprefix(prefix) for name in self.state if name.startswith(prefix))
        read = self._read(STATE, [prefix + rest for rest in rests if wanted(rest)])
        return {name.removeprefix(prefix): value for name, value in read.items()}

    def _read(self, file: str, names: list[str]) -> dict[str, Tensor]:
        if not names:
            return {}
        # Copies: safetensors maps the file into memory, and the file may change or go.
        read: dict[str, Tensor] = _with_file(
            self.folder / file, lambda opened: {n: opened.get_tensor(n).clone() for n in names}
        )
        if "checksums" in self.meta:
            checksums = self.meta["checksums"][_kind(file)]
            for name, tensor in read.items():
                if checksums.get(name) != _checksum(tensor):
                    raise ValueError(
                        f"{self.folder / file} is damaged: {name} is not what was written"
                    )
        return read


@dataclass(frozen=True)
class Saved:
    """A checkpoint, as far as it is known before its parts are read.

    Attributes:
        folder: of the checkpoint.
        token: distinguishes one save from another; None in old checkpoints.
        num_steps: training steps until then.
        cut: chunks, and blocks of each stage.
        placement: numbers of the stages of each rank of a pipeline.
        num_replicas: number of pipelines.
        links: for several processes, traffic and whether there is state, by link.
        replicas: what their exchanges have in common; None where they compress nothing.
    """

    folder: Path
    token: str | None
    num_steps: int
    cut: dict[str, Any]
    placement: list[list[int]]
    num_replicas: int
    links: dict[str, Any] | None
    replicas: dict[str, Any] | None

    @classmethod
    def of(cls, folder: Path) -> Saved:
        """Reads ``checkpoint.json``.

        Raises:
            ValueError: there is none, or it is damaged, or of another format.
        """
        if not (folder / META).is_file():
            Part.of(folder)  # raises, and says what is missing
        meta = _read_json(folder)
        if "placement" not in meta:
            _check_meta(folder, meta, OF_PART)
            Part.of(folder)
            placement = [list(range(len(meta["cut"]["stages"])))]
            return cls(
                folder, meta.get("token"), meta["num_steps"], meta["cut"], placement, 1, None, None
            )
        _check_meta(folder, meta, OF_SEVERAL)
        placed = sorted(stage for stages in meta["placement"] for stage in stages)
        if placed != list(range(len(meta["cut"]["stages"]))):
            raise ValueError(f"{folder / META} is damaged: its placement is not that of its stages")
        return cls(
            folder,
            meta["token"],
            meta["num_steps"],
            meta["cut"],
            meta["placement"],
            meta["num_replicas"],
            meta["links"],
            meta.get("replicas"),  # not in old checkpoints
        )

    @property
    def num_parts(self) -> int:
        """Ranks that have saved it."""
        return len(self.placement) * self.num_replicas

    def part_folder(self, rank: int) -> Path:
        """Folder of one rank's part."""
        return self.folder if self.links is None else self.folder / part_name(rank, self.num_parts)

    def part(self, rank: int) -> Part:
        """Opens one rank's part.

        Raises:
            ValueError: it is not complete, damaged, of another format, or of another save.
        """
        part = Part.of(self.part_folder(rank))
        if self.links is not None and part.meta.get("token") != self.token:
            raise ValueError(
                f"{part.folder} is not of the same save as the rest of {self.folder}: it is of "
                f"step {part.meta['num_steps']}, the rest of step {self.num_steps}"
            )
        return part


def _with_file(path: Path, read: Callable[[Any], Any]) -> Any:
    try:
        with safe_open(path, framework="pt") as file:
            return read(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or foreign: {error}") from error


def _shapes(file: Any) -> dict[str, torch.Size]:
    names: list[str] = file.keys()
    return {name: torch.Size(file.get_slice(name).get_shape()) for name in names}


def _read_meta(folder: Path, form: Any) -> dict[str, Any]:
    meta = _read_json(folder)
    _check_meta(folder, meta, form)
    return meta


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        meta = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or foreign: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by Pipeline.save")
    return meta


def _check_meta(folder: Path, meta: dict[str, Any], form: Any) -> None:
    if meta.get("version") != VERSION:
        raise ValueError(
            f"{folder} has checkpoint version {meta.get('version')}; this mpcomp reads {VERSION}"
        )
    try:
        if "checksum" in meta:
            entries = {name: value for name, value in meta.items() if name != "checksum"}
            if _checksum_of_json(entries) != meta["checksum"]:
                raise ValueError("it is not what was written (its checksum differs)")
        check_form(meta, form)
    except ValueError as error:
        raise ValueError(f"{folder / META} is damaged: {error}") from error


def _missing(folder: Path) -> list[str]:
    """Files of a part that ``folder`` lacks."""
    return [name for name in (META, WEIGHTS, STATE) if not (folder / name).is_file()]


# -- telling what a folder is ---------------------------------------------------------------------


def is_checkpoint(folder: Path) -> bool:
    """Whether `save` may replace ``folder``: nobody else's files are deleted."""
    return not _missing(folder) or _is_of_several(folder)


def weights_files(folder: Path) -> list[Path]:
    """The safetensors files with a model's weights; in a checkpoint not those with its state.

    Of the parts of a checkpoint those of the first replica come first.
    """
    if _is_of_several(folder):
        return sorted(folder.glob(f"rank-*-of-*/{WEIGHTS}"))
    if (folder / WEIGHTS).is_file() and (folder / STATE).is_file():
        return [folder / WEIGHTS]
    return sorted(folder.glob("*.safetensors"))


def _is_of_several(folder: Path) -> bool:
    try:
        _read_meta(folder, OF_SEVERAL)
    except ValueError:
        return False
    return True
