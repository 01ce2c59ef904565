"""Where feedback methods keep their rows: a table per link end, addressed by slot key.

One row is one sample's flattened activation or gradient. Rows are stored in a chosen precision,
on the link's device, in host memory or in a memory-mapped file, and admitted in order of arrival
until a cap is reached. Both ends of a link see the same keys in the same order and hold equal
caps, so they admit alike without a word on the wire.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpcomp.compressors import Cast, Compressor, Identity, Quantize
from mpcomp.tensor_meta import TensorMeta
from mpcomp.visit import Key

__all__ = ["SlotStore", "StoragePlan"]

_FLOATS: dict[str, Compressor] = {"fp32": Identity(), "fp16": Cast("fp16"), "bf16": Cast("bf16")}


@dataclass(frozen=True)
class StoragePlan:
    """How rows are stored: precision, place and cap.

    Args:
        storage: "fp32", "fp16", "bf16", or a number of bits (1-8) with a scale per row.
        location: "device" (where the tensors are), "cpu", or a folder for memory-mapped files.
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

    Raises:
        ValueError: the cap holds not even one row.
    """

    def __init__(self, row_numel: int, plan: StoragePlan, device: torch.device) -> None:
        self.row_numel = row_numel
        self._plan = plan
        self._device = device
        self._coder = plan.coder
        self._slots: dict[Key, int] = {}
        layout = self._coder.layout(TensorMeta((1, row_numel)))
        self.row_bytes = sum(part.dense_bytes for part in layout)
        self._capacity_limit: int | None = None
        if plan.cap_bytes is not None:
            self._capacity_limit = plan.cap_bytes // max(1, self.row_bytes)
            if self._capacity_limit == 0:
                raise ValueError(
                    f"cap_bytes={plan.cap_bytes}: one sample's state takes {self.row_bytes} bytes "
                    f"({row_numel} elements as {plan.storage}); raise the cap"
                )
        self._tables = [_Table(part, plan.location, device) for part in layout]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows held."""
        return len(self) * self.row_bytes

    def known(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a row (its slot is initialised)."""
        return [key in self._slots for key in keys]

    def read(self, keys: Sequence[Key]) -> Tensor:
        """Rows of ``keys`` as fp32 [len(keys), row_numel]; zeros where there is none."""
        slots = [self._slots.get(key, -1) for key in keys]
        held = [slot for slot in slots if slot >= 0]
        rows = torch.zeros(len(keys), self.row_numel, device=self._device)
        if held:
            payload = tuple(table.read(held).to(self._device) for table in self._tables)
            meta = TensorMeta((len(held), self.row_numel))
            found = self._coder.decompress(payload, meta)
            if len(held) == len(keys):
                return found
            where = [i for i, slot in enumerate(slots) if slot >= 0]
            rows[torch.tensor(where, device=self._device)] = found
        return rows

    def write(self, keys: Sequence[Key], rows: Tensor) -> None:
        """Stores fp32 rows [len(keys), row_numel]; new keys beyond the cap are not admitted."""
        admitted = []
        for i, key in enumerate(keys):
            if key not in self._slots:
                if self._capacity_limit is not None and len(self) >= self._capacity_limit:
                    continue
                self._slots[key] = len(self._slots)
            admitted.append(i)
        if not admitted:
            return
        if len(admitted) < len(keys):
            rows = rows[torch.tensor(admitted, device=rows.device)]
        slots = [self._slots[keys[i]] for i in admitted]
        for table, part in zip(self._tables, self._coder.compress(rows), strict=True):
            table.write(slots, part, len(self._slots))

    def state_dict(self) -> dict[str, Tensor]:
        """Keys [n, width] and stored rows, as tensors."""
        n = len(self)
        state = {f"rows{i}": table.read(list(range(n))) for i, table in enumerate(self._tables)}
        state["keys"] = torch.tensor(list(self._slots), dtype=torch.int64)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` gave."""
        keys = [tuple(key) for key in state["keys"].tolist()]
        self._slots = {key: i for i, key in enumerate(keys)}
        for i, table in enumerate(self._tables):
            table.write(list(range(len(keys))), state[f"rows{i}"], len(keys))


class _Table:
    """Rows of one wire tensor of the storage compressor; doubles its capacity as it fills."""

    def __init__(self, row: TensorMeta, location: str, device: torch.device) -> None:
        self._row_shape = row.shape[1:]
        self._dtype = row.dtype
        self._device = device if location == "device" else torch.device("cpu")
        self._file = None if location in ("device", "cpu") else _table_file(location, self)
        self._rows = torch.empty(0, *self._row_shape, dtype=self._dtype, device=self._device)

    def read(self, slots: list[int]) -> Tensor:
        if slots and slots[-1] - slots[0] == len(slots) - 1 and slots == sorted(slots):
            return self._rows[slots[0] : slots[-1] + 1].clone()  # a run: no gather
        return self._rows[torch.tensor(slots, dtype=torch.int64, device=self._device)]

    def write(self, slots: list[int], rows: Tensor, needed: int) -> None:
        if needed > self._rows.shape[0]:
            self._grow(max(needed, 2 * self._rows.shape[0]))
        index = torch.tensor(slots, dtype=torch.int64, device=self._device)
        self._rows.index_copy_(0, index, rows.to(self._device, self._dtype))

    def _grow(self, capacity: int) -> None:
        shape = (capacity, *self._row_shape)
        if self._file is not None:
            # The file grows in place: what was mapped before is its beginning. Not left to torch,
            # which grows a file by writing a zero over its first byte.
            meta = TensorMeta(shape, self._dtype)
            os.truncate(self._file, meta.dense_bytes)
            mapped = torch.from_file(self._file, shared=True, size=meta.numel, dtype=self._dtype)
            self._rows = mapped.reshape(shape)
            return
        grown = torch.empty(shape, dtype=self._dtype, device=self._device)
        grown[: self._rows.shape[0]] = self._rows
        self._rows = grown


def _table_file(folder: str, owner: _Table) -> str:
    """An empty file in ``folder`` that goes when its table goes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="mpcomp-slots-", dir=folder)
    os.close(handle)
    weakref.finalize(owner, Path(name).unlink, missing_ok=True)
    return name
