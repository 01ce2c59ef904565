"""Tables of stored rows: a tensor in memory, or a file.

Both are addressed by slot number and grow as slots come. A file is read and written by its
descriptor and not mapped into memory: that is twice as fast where pages are not at hand, and a
full disk is an error that can be raised, where a mapping would end the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.transfer import to_device

__all__ = ["FileTable", "MemoryTable", "Table", "table_for"]

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
