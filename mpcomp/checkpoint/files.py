"""The files of a checkpoint: writing a part, reading it tensor by tensor, telling what is one.

Every tensor has a checksum in ``checkpoint.json``, and so has that file itself: a bit that a disk
has lost is an error, and not a weight.
"""

from __future__ import annotations

import json
import os
import re
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
    "WeightsFile",
    "delete_own",
    "foreign",
    "has_remains",
    "is_checkpoint",
    "part_name",
    "sync",
    "weights_files",
    "write_meta",
    "write_part",
]

FORMAT, VERSION = "mpcomp checkpoint", 1
WEIGHTS, STATE, META = "weights.safetensors", "state.safetensors", "checkpoint.json"
#: Begins the name of an empty file in what `mpcomp.checkpoint.replacing` may delete.
MARK = ".made-by-mpcomp-"
_PART = re.compile(r"rank-\d{5,}-of-\d{5,}")


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
        for file, names in ((WEIGHTS, shapes.keys()), (STATE, state)):
            if lost := sorted(names ^ meta["checksums"][_kind(file)].keys()):
                raise ValueError(
                    f"{folder / file} is damaged: {lost[0]} is in one of it and {META} alone"
                )
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

    @property
    def weights(self) -> WeightsFile:
        """The file of the weights."""
        return WeightsFile(self.folder / WEIGHTS, self.shapes, self._checksums(WEIGHTS))

    def _read(self, file: str, names: list[str]) -> dict[str, Tensor]:
        return _tensors(self.folder / file, names, self._checksums(file))

    def _checksums(self, file: str) -> dict[str, int]:
        """Of a file's tensors, by name."""
        found: dict[str, int] = self.meta["checksums"][_kind(file)]
        return found


@dataclass(frozen=True)
class WeightsFile:
    """A safetensors file with weights, whoever wrote it.

    Attributes:
        path: of the file.
        shapes: of the weights, by name.
        checksums: by name; None where nothing says what was written.
    """

    path: Path
    shapes: Mapping[str, torch.Size]
    checksums: Mapping[str, int] | None = None

    def read(self, name: str) -> Tensor:
        """One of the weights, a copy.

        Raises:
            ValueError: it is not what was written.
        """
        return _tensors(self.path, [name], self.checksums)[name]


@dataclass(frozen=True)
class Saved:
    """A checkpoint, as far as it is known before its parts are read.

    Attributes:
        folder: of the checkpoint.
        token: distinguishes one save from another.
        num_steps: training steps until then.
        cut: chunks, and blocks of each stage.
        placement: numbers of the stages of each rank of a pipeline.
        num_replicas: number of pipelines.
        links: for several processes, traffic and whether there is state, by link.
        replicas: what their exchanges have in common; None where they compress nothing.
    """

    folder: Path
    token: str
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
            if parts := _parts(folder):
                raise ValueError(
                    f"{folder} lacks {META} beside {parts[0].name}: it is the same on all machines "
                    "of the run, so copy it from another"
                )
            Part.of(folder)  # raises, and says what is missing
        meta = _read_json(folder)
        if "placement" not in meta:
            _check_meta(folder, meta, OF_PART)
            Part.of(folder)
            placement = [list(range(len(meta["cut"]["stages"])))]
            return cls(
                folder, meta["token"], meta["num_steps"], meta["cut"], placement, 1, None, None
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
            meta["replicas"],
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
        if self.links is not None and part.meta["token"] != self.token:
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


def _tensors(
    path: Path, names: list[str], checksums: Mapping[str, int] | None
) -> dict[str, Tensor]:
    """Copies: safetensors maps the file into memory, and the file may change or go."""
    if not names:
        return {}
    read: dict[str, Tensor] = _with_file(
        path, lambda opened: {name: opened.get_tensor(name).clone() for name in names}
    )
    for name, tensor in read.items():
        if checksums is not None and checksums.get(name) != _checksum(tensor):
            raise ValueError(f"{path} is damaged: {name} is not what was written")
    return read


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
        entries = {name: value for name, value in meta.items() if name != "checksum"}
        if _checksum_of_json(entries) != meta.get("checksum"):
            raise ValueError("it is not what was written (its checksum differs)")
        check_form(meta, form)
    except ValueError as error:
        raise ValueError(f"{folder / META} is damaged: {error}") from error


def _missing(folder: Path) -> list[str]:
    """Files of a part that ``folder`` lacks."""
    return [name for name in (META, WEIGHTS, STATE) if not (folder / name).is_file()]


# -- telling what a folder is ---------------------------------------------------------------------


def is_checkpoint(folder: Path) -> bool:
    """Whether it has all files of a checkpoint, so that `save` may replace it."""
    return not _missing(folder) or _is_of_several(folder)


def has_remains(folder: Path) -> bool:
    """Whether it has anything of a checkpoint, whole or damaged."""
    return len(_missing(folder)) < 3 or bool(_parts(folder))


def foreign(folder: Path) -> list[Path]:
    """Entries of a checkpoint's folder that no save has written, relative to it."""
    places = [folder, *_parts(folder)]
    found = [path for place in places for path in place.iterdir() if not _is_own(path)]
    return [path.relative_to(folder) for path in found]


def delete_own(folder: Path) -> None:
    """Deletes a checkpoint; what no save has written stays, with its folder."""
    for place in [*_parts(folder), folder]:
        for name in (WEIGHTS, STATE, META):
            (place / name).unlink(missing_ok=True)
        for path in place.glob(f"{MARK}*"):  # last: what could not be deleted is still ours
            path.unlink(missing_ok=True)
        if not any(place.iterdir()):
            place.rmdir()


def _is_own(path: Path) -> bool:
    name = path.name
    return name in (WEIGHTS, STATE, META) or bool(_PART.fullmatch(name)) or name.startswith(MARK)


def _parts(folder: Path) -> list[Path]:
    """Folders of the parts that are there."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _PART.fullmatch(path.name) and path.is_dir()]
    return sorted(found)


def weights_files(folder: Path) -> list[WeightsFile]:
    """The safetensors files with a model's weights; in a checkpoint not those with its state.

    Of the parts of a checkpoint those of the first replica come first.

    Raises:
        ValueError: a file is truncated, or the checkpoint is damaged.
    """
    if parts := _parts(folder):
        Saved.of(folder)
        return [Part.of(part).weights for part in parts]
    if (folder / META).is_file():
        return [Part.of(folder).weights]
    names = sorted(path for path in folder.glob("*.safetensors") if path.name != STATE)
    return [WeightsFile(path, _with_file(path, _shapes)) for path in names]


def _is_of_several(folder: Path) -> bool:
    try:
        _read_meta(folder, OF_SEVERAL)
    except ValueError:
        return False
    return True
