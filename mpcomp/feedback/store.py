"""Stores of feedback methods' rows: one for each field at an end, addressed by slot key.

One row is one sample's flattened activation or gradient. Rows are stored in a chosen precision,
on the link's device, in host memory or in files, and admitted in order of arrival until a cap is
reached. Both ends of a link see the same keys in the same order and hold equal caps, so they admit
alike without a word on the wire.

A file is read and written by its descriptor and not mapped into memory: that is twice as fast where
pages are not at hand, and a full disk is an error that can be raised, where a mapping would end the
process. While a step computes, a thread reads ahead what the next one will ask for::

    caller   prefetch(b) ── step a ─────────── commit: forgets rows of a ── step b: takes rows of b
    worker        └─ reads the files ──┘

That is a copy of rows as they were stored when it was asked for. A row that is stored anew in the
meantime is forgotten there and read again where it lies, so reading ahead never changes a number,
only when a file is read. Several threads may take rows at once.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Identity
from mpcomp.compressors.cast import Cast
from mpcomp.compressors.quantize import Quantize
from mpcomp.core.context import Key, TensorMeta
from mpcomp.core.transfer import to_device

__all__ = ["FileTable", "MemoryTable", "ReadAhead", "SlotStore", "StoragePlan", "Table"]

_FLOATS: dict[str, Compressor] = {"fp32": Identity(), "fp16": Cast("fp16"), "bf16": Cast("bf16")}


@dataclass(frozen=True)
class StoragePlan:
    """Precision, place and cap of stored rows.

    Args:
        storage: "fp32", "fp16", "bf16", or a number of bits (1-8) with a scale per row.
        location: "device" (where the tensors are), "cpu", or a folder for files.
        cap_bytes: rows are admitted up to so many bytes at each end; None for no cap.

    Raises:
        ValueError: another storage or a cap below one byte.
    """

    storage: str | int = "fp32"
    location: str = "device"
    cap_bytes: int | None = None

    def __post_init__(self) -> None:
        self.coder  # noqa: B018  (raises for a bad storage)
        if self.cap_bytes is not None and self.cap_bytes < 1:
            raise ValueError(f"cap_bytes={self.cap_bytes}: a cap is a positive number of bytes")

    @property
    def coder(self) -> Compressor:
        """The compressor whose payload of a row is what is stored."""
        if self.storage in _FLOATS:
            return _FLOATS[str(self.storage)]
        if isinstance(self.storage, int) and 1 <= self.storage <= 8:
            return Quantize(self.storage, scale="sample")
        raise ValueError(
            f"storage={self.storage!r}: state is stored as {', '.join(_FLOATS)} or in 1 to 8 bits"
        )


class SlotStore:
    """A growing table of rows [row_numel], found by key.

    Args:
        row_numel: elements of a row.
        plan: precision, place and cap.
        device: of the tensors that are read and written.

    Attributes:
        row_bytes: bytes of one stored row.
        max_rows: rows that the cap admits; None without a cap.
        location: as planned.
        device: as given.
        rounds: whether what is stored is not what was written, bit for bit, when written again.

    Raises:
        ValueError: the cap holds not even one row.
    """

    def __init__(self, row_numel: int, plan: StoragePlan, device: torch.device) -> None:
        self.row_numel = row_numel
        self.location = plan.location
        self.device = device
        self.rounds = isinstance(plan.storage, int)
        self._coder = plan.coder
        self._slots: dict[Key, int] = {}
        layout = self._coder.layout(TensorMeta((1, row_numel)))
        self.row_bytes = sum(part.dense_bytes for part in layout)
        self.max_rows: int | None = None
        if plan.cap_bytes is not None:
            self.max_rows = plan.cap_bytes // max(1, self.row_bytes)
            if self.max_rows == 0:
                raise ValueError(
                    f"cap_bytes={plan.cap_bytes}: one sample's state takes {self.row_bytes} bytes "
                    f"({row_numel} elements as {plan.storage}); raise the cap"
                )
        self._tables = [table_for(part, plan.location, device) for part in layout]
        # Only where a read waits for a disk, or for a copy to another device.
        far = plan.location not in ("device", "cpu") or (
            plan.location == "cpu" and device.type != "cpu"
        )
        self._ahead = ReadAhead(self._tables, device) if far else None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows held."""
        return len(self) * self.row_bytes

    def known(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a row (its slot is initialised)."""
        return [key in self._slots for key in keys]

    def prefetch(self, batch: Iterable[Sequence[Key]]) -> None:
        """Begins to read the rows of a batch to come; of no effect where they are at hand.

        Args:
            batch: keys of each of its microbatches. Those without a row are left out.

        Raises:
            OSError: reading ahead failed since the last call.
        """
        if self._ahead is None:
            return
        held = [[key for key in keys if key in self._slots] for keys in batch]
        self._ahead.begin((keys, [self._slots[key] for key in keys]) for keys in held)

    def read(self, keys: Sequence[Key]) -> Tensor:
        """Rows of ``keys`` as fp32 [len(keys), row_numel]; zeros where there is none.

        Raises:
            OSError: a file cannot be read.
        """
        held = [key for key in keys if key in self._slots]
        if held:
            slots = [self._slots[key] for key in held]
            if self._ahead:
                stored = self._ahead.take(held, slots)
            else:
                stored = tuple(table.read(slots) for table in self._tables)
            payload = tuple(part.to(self.device, non_blocking=True) for part in stored)
            found = self._coder.decompress(payload, TensorMeta((len(held), self.row_numel)))
            if len(held) == len(keys):
                return found
        rows = torch.zeros(len(keys), self.row_numel, dtype=torch.float32, device=self.device)
        if held:
            where = [i for i, key in enumerate(keys) if key in self._slots]
            rows[to_device(torch.tensor(where), self.device)] = found
        return rows

    def write(self, keys: Sequence[Key], rows: Tensor) -> None:
        """Stores fp32 rows [len(keys), row_numel]; new keys beyond the cap are not admitted.

        Raises:
            OSError: a file cannot be written; the rows of ``keys`` are then of no use.
        """
        admitted = []
        for i, key in enumerate(keys):
            if key not in self._slots:
                if self.max_rows is not None and len(self) >= self.max_rows:
                    continue
                self._slots[key] = len(self._slots)
            admitted.append(i)
        if not admitted:
            return
        if self._ahead:
            self._ahead.forget(keys)
        if len(admitted) < len(keys):
            rows = rows[to_device(torch.tensor(admitted), rows.device)]
        slots = [self._slots[keys[i]] for i in admitted]
        for table, part in zip(self._tables, self._coder.compress(rows), strict=True):
            table.write(slots, part, len(self._slots))

    def state_dict(self) -> dict[str, Tensor]:
        """Keys [n, width] and stored rows, as tensors; to be used before the next `write`."""
        state = {f"rows{i}": table.first(len(self)) for i, table in enumerate(self._tables)}
        state["keys"] = torch.tensor(list(self._slots), dtype=torch.int64)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` gave.

        Raises:
            ValueError: it is of rows of another form; nothing has changed then.
        """
        keys = [tuple(key) for key in state["keys"].tolist()]
        for i, table in enumerate(self._tables):
            found, own = state[f"rows{i}"], (len(keys), *table.row_shape)
            if (tuple(found.shape), found.dtype) != (own, table.dtype):
                raise ValueError(
                    f"stored rows are {list(found.shape)} of {found.dtype}, here {list(own)} of "
                    f"{table.dtype}: use the same model, method and storage"
                )
        if self._ahead is not None:
            self._ahead.clear()
        self._slots = {key: i for i, key in enumerate(keys)}
        for i, table in enumerate(self._tables):
            if keys:
                table.write(range(len(keys)), state[f"rows{i}"], len(keys))


# -- tables of rows, by slot number ----------------------------------------------------------------

#: Tables in memory come in blocks of so many bytes; the first begins small.
_BLOCK_BYTES = 64 * 2**20


class Table(ABC):
    """Rows of one wire tensor of the storage compressor.

    Args:
        row: shape [1, ...] and dtype of one row.
        device: of the rows that are read.
    """

    def __init__(self, row: TensorMeta, device: torch.device) -> None:
        self.row_shape = row.shape[1:]
        self.dtype = row.dtype
        self.device = device

    @abstractmethod
    def read(self, slots: Sequence[int], *, pinned: bool = False) -> Tensor:
        """A copy of the rows of ``slots``: [slots, ...], if asked for in page-locked memory."""

    @abstractmethod
    def write(self, slots: Sequence[int], rows: Tensor, needed: int) -> None:
        """Stores rows [slots, ...]; ``needed`` slots there are in all."""

    @abstractmethod
    def first(self, count: int) -> Tensor:
        """The rows of the first ``count`` slots, to be looked at before anything is written."""


class MemoryTable(Table):
    """Blocks of rows on a device or in host memory. What is full is never copied to grow."""

    def __init__(self, row: TensorMeta, device: torch.device) -> None:
        super().__init__(row, device)
        self._block_rows = max(1, _BLOCK_BYTES // max(1, row.dense_bytes))
        self._blocks = [self._empty(0)]

    def _empty(self, rows: int, pinned: bool = False) -> Tensor:
        shape = (rows, *self.row_shape)
        return torch.empty(shape, dtype=self.dtype, device=self.device, pin_memory=pinned)

    def _index(self, slots: Sequence[int]) -> Tensor:
        index = torch.tensor(slots, dtype=torch.int64)
        return index if self.device.type == "cpu" else to_device(index, self.device)

    def read(self, slots: Sequence[int], *, pinned: bool = False) -> Tensor:
        out = self._empty(len(slots), pinned)
        blocks = self._blocks
        runs = list(_runs(slots, self._block_rows))
        if len(blocks) == 1 and len(runs) > 1:
            index = self._index(slots)
            return torch.index_select(blocks[0], 0, index, out=out)
        for slot, start, stop in runs:
            number, row = divmod(slot, self._block_rows)
            out[start:stop] = blocks[number][row : row + stop - start]
        return out

    def write(self, slots: Sequence[int], rows: Tensor, needed: int) -> None:
        self._grow(needed)
        rows = rows.to(self.device, self.dtype)
        if len(self._blocks) == 1:
            index = self._index(slots)
            self._blocks[0].index_copy_(0, index, rows)
            return
        for slot, start, stop in _runs(slots, self._block_rows):
            number, row = divmod(slot, self._block_rows)
            self._blocks[number][row : row + stop - start] = rows[start:stop]

    def _grow(self, needed: int) -> None:
        held = self._blocks[0].shape[0]
        if held < min(needed, self._block_rows):
            grown = self._empty(min(self._block_rows, max(needed, 2 * held)))
            grown[:held] = self._blocks[0]
            self._blocks[0] = grown
        while len(self._blocks) * self._block_rows < needed:
            self._blocks.append(self._empty(self._block_rows))

    def first(self, count: int) -> Tensor:
        return self.read(range(count))


class FileTable(Table):
    """A file of its own in a folder, without a name where the system has such files.

    It is made when first written to, and gone when the table goes or its process ends, however
    that is: its space is then free again.
    """

    def __init__(self, row: TensorMeta, folder: str) -> None:
        super().__init__(row, torch.device("cpu"))
        self._folder = folder
        self._row_bytes = row.dense_bytes
        self._open_file: Any = None

    @property
    def _file(self) -> int:
        """The descriptor of the file, which is made if there is none."""
        if self._open_file is None:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            self._open_file = tempfile.TemporaryFile(  # noqa: SIM115  (it lasts as the table does)
                prefix="mpcomp-slots-", dir=self._folder, buffering=0
            )
            weakref.finalize(self, self._open_file.close)
        descriptor: int = self._open_file.fileno()
        return descriptor

    def read(self, slots: Sequence[int], *, pinned: bool = False) -> Tensor:
        out = torch.empty(len(slots), *self.row_shape, dtype=self.dtype, pin_memory=pinned)
        view = _bytes_of(out)
        size = self._row_bytes
        for slot, start, stop in _runs(slots):
            part, at = view[start * size : stop * size], slot * size
            while part:
                got = os.preadv(self._file, [part], at)
                if not got:
                    raise OSError(
                        f"a file of rows in {self._folder} ends at byte {at}, before the rows "
                        "that were stored in it: is the disk in order?"
                    )
                part, at = part[got:], at + got
        return out

    def write(self, slots: Sequence[int], rows: Tensor, needed: int) -> None:
        view = _bytes_of(rows.to(self.device, self.dtype).contiguous())
        size = self._row_bytes
        for slot, start, stop in _runs(slots):
            part, at = view[start * size : stop * size], slot * size
            while part:
                try:
                    put = os.pwrite(self._file, part, at)
                except OSError as error:
                    raise OSError(
                        error.errno,
                        f"{error.strerror}: state could not be stored, so the ends of this link "
                        "no longer agree. Make room, or set cap_bytes, and go on from the last "
                        "checkpoint",
                        self._folder,
                    ) from error
                part, at = part[put:], at + put

    def first(self, count: int) -> Tensor:
        """As `Table.first`: mapped, so that a checkpoint of many rows need not fit in memory."""
        shape = (count, *self.row_shape)
        numel = TensorMeta(shape).numel
        if numel == 0:
            return torch.empty(shape, dtype=self.dtype)
        # Copied on write: whoever is given it may change it, and the file stays as it is.
        held = mmap.mmap(self._file, count * self._row_bytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(held, dtype=self.dtype, count=numel).reshape(shape)


def table_for(row: TensorMeta, location: str, device: torch.device) -> Table:
    """A table in ``location``: "device" (``device``), "cpu", or a folder."""
    if location in ("device", "cpu"):
        return MemoryTable(row, device if location == "device" else torch.device("cpu"))
    return FileTable(row, location)


def _bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return x.detach().reshape(-1).view(torch.uint8).numpy().data


def _runs(slots: Sequence[int], block: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(first slot, start, stop) of the stretches of ``slots`` that follow one another.

    None of them goes over from one block of so many slots to the next.
    """
    start = 0
    for i in range(1, len(slots) + 1):
        if (
            i == len(slots)
            or slots[i] != slots[i - 1] + 1
            or (block is not None and slots[i] % block == 0)
        ):
            yield slots[start], start, i
            start = i


# -- reading ahead ---------------------------------------------------------------------------------

#: Batches kept: the one about to be trained on, and the one after it.
_BATCHES = 2

_Rows = tuple[Tensor, ...]


@cache
def _worker() -> ThreadPoolExecutor:
    """The one thread of this process that reads; made when first needed."""
    return ThreadPoolExecutor(1, thread_name_prefix="mpcomp-prefetch")


class _Part:
    """Rows of some keys of one batch, on their way or here."""

    def __init__(self, number: int, rows: Future[_Rows]) -> None:
        self.number = number
        self.rows = rows


class ReadAhead:
    """Rows that are read ahead for one end.

    Args:
        tables: where the rows lie.
        device: of the link. Rows for another than the CPU wait in page-locked memory.
    """

    def __init__(self, tables: Sequence[Table], device: torch.device) -> None:
        self._tables = list(tables)
        self._pinned = device.type == "cuda"
        self._places: dict[Key, tuple[_Part, int]] = {}
        self._running: list[_Part] = []
        self._batches = 0
        self._taking = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, parts: Iterable[tuple[Sequence[Key], Sequence[int]]]) -> None:
        """Begins to read one batch, in parts (keys and their slots) that are used together.

        Raises:
            OSError: as `check`.
        """
        self.check()
        self._batches += 1
        oldest = self._batches - _BATCHES
        self._places = {k: at for k, at in self._places.items() if at[0].number > oldest}
        for part in self._running:
            if part.number <= oldest:
                part.rows.cancel()
        self._running = [part for part in self._running if part.number > oldest]
        for keys, slots in parts:
            if keys:
                rows = _worker().submit(_read, self._tables, list(slots), self._pinned)
                part = _Part(self._batches, rows)
                self._running.append(part)
                self._places.update((key, (part, i)) for i, key in enumerate(keys))

    def forget(self, keys: Iterable[Key]) -> None:
        """Forgets keys whose rows are about to be stored anew."""
        for key in keys:
            self._places.pop(key, None)

    def clear(self) -> None:
        """Forgets everything."""
        for part in self._running:
            part.rows.cancel()
        self._running.clear()
        self._places.clear()

    def check(self) -> None:
        """Raises what went wrong in the thread, and forgets everything: it is then read anew."""
        for part in self._running:
            if part.rows.done() and (error := part.rows.exception()) is not None:
                self.clear()
                raise error

    def take(self, keys: Sequence[Key], slots: Sequence[int]) -> _Rows:
        """The rows of ``keys``, waiting for those under way, reading those that were forgotten.

        Raises:
            OSError: a file cannot be read; also where that was found out ahead.
        """
        with self._taking:
            return self._taken(keys, slots)

    def _taken(self, keys: Sequence[Key], slots: Sequence[int]) -> _Rows:
        places = [self._places.pop(key, None) for key in keys]
        wanted: dict[_Part, tuple[list[int], list[int]]] = {}  # of a part: rows, and where they go
        late: list[int] = []
        for i, place in enumerate(places):
            if place is None:
                late.append(i)
            else:
                rows, where = wanted.setdefault(place[0], ([], []))
                rows.append(place[1])
                where.append(i)
        for part in wanted:
            part.rows.exception()  # waits
        self.check()
        live = {id(part) for part, _ in self._places.values()}
        self._running = [p for p in self._running if id(p) in live or not p.rows.done()]
        if len(wanted) == 1 and not late:
            (part, (rows, _)), *_ = wanted.items()
            held = part.rows.result()
            if rows == list(range(held[0].shape[0])):
                return held
        found = _read(self._tables, [slots[i] for i in late], self._pinned) if late else ()
        joined = []
        for number, table in enumerate(self._tables):
            shape = (len(keys), *table.row_shape)
            out = torch.empty(shape, dtype=table.dtype, pin_memory=self._pinned)
            for part, (rows, where) in wanted.items():
                out[torch.tensor(where)] = part.rows.result()[number][torch.tensor(rows)]
            if late:
                out[torch.tensor(late)] = found[number]
            joined.append(out)
        return tuple(joined)


def _read(tables: Sequence[Table], slots: Sequence[int], pinned: bool) -> _Rows:
    return tuple(table.read(slots, pinned=pinned) for table in tables)
