"""Stores of feedback methods' rows: one for each field at an end, addressed by slot key.

One row is one sample's flattened activation or gradient. Rows are stored in a chosen precision,
on the link's device, in host memory or in files, and admitted in order of arrival until a cap is
reached. Both ends of a link see the same keys in the same order and hold equal caps, so they admit
alike without a word on the wire.

A `FieldState` is what formulas see of a store. What an end keeps changes in two strokes: a step
*stages* what it would keep, and the end writes it when the step is known to be finite. Values are
staged in the units of the message at hand; what is kept is free of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Identity
from mpcomp.compressors.cast import Cast
from mpcomp.compressors.quantize import Quantize
from mpcomp.core.step import Key
from mpcomp.core.tensor_meta import TensorMeta, keep_padded, zero_padding
from mpcomp.core.transfer import to_device
from mpcomp.feedback.prefetch import ReadAhead
from mpcomp.feedback.tables import table_for

__all__ = [
    "SINGLE_SLOT",
    "Draw",
    "FieldState",
    "FieldStorage",
    "Rows",
    "SlotStore",
    "Slots",
    "StoragePlan",
    "as_rows",
]

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


# -- a field ---------------------------------------------------------------------------------------


#: Makes a fresh generator; ``alike`` says whether all senders draw the same from it.
Draw: TypeAlias = Callable[[bool], torch.Generator]


class Slots(NamedTuple):
    """The slots of one message.

    Attributes:
        keys: of the slots.
        unit: factor from what is kept to the units of the message.
        padded: of `mpcomp.core.tensor_meta.padded_positions`.
        draw: for what is rounded at random to be kept.
    """

    keys: Sequence[Key]
    unit: float = 1.0
    padded: Tensor | None = None
    draw: Draw | None = None


class FieldState(ABC):
    """One field at one end, slot by slot.

    Attributes:
        numel: numbers kept of a slot; 0 where they are not one tensor.
        store: the rows; None where they are not kept in a `SlotStore`.
    """

    numel: int = 0
    store: SlotStore | None = None

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes kept of a slot."""

    @abstractmethod
    def known(self, keys: Sequence[Key]) -> list[bool]:
        """Whether anything was ever written of each slot."""

    @abstractmethod
    def read(self, slots: Slots) -> Tensor:
        """Committed rows [keys, n] in units of the message, zero where padded or unknown."""

    @abstractmethod
    def stage(self, slots: Slots, value: Tensor, change: Tensor | None) -> tuple[Any, Tensor]:
        """Argument of `write` for new rows ``value`` [keys, n], and the rows to be read then.

        Args:
            slots: theirs.
            value: the rows; of no meaning where padded.
            change: of the rows since what was committed, for what is kept of changes alone.
        """

    @abstractmethod
    def cleared(self, slots: Slots) -> Any:
        """Argument of `write` for rows of zeros; what is padded stays."""

    @abstractmethod
    def write(self, keys: Sequence[Key], staged: Any) -> None:
        """Keeps what was staged."""

    @abstractmethod
    def state_dict(self, name: str) -> dict[str, Tensor]:
        """The only slot of a parameter, under ``name`` and ``name:...``; nothing if unknown."""

    @abstractmethod
    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state_dict` gave under this name.

        Raises:
            ValueError: it is not of this size.
        """


class FieldStorage(ABC):
    """A way to keep a field that is not one number an element."""

    @abstractmethod
    def state(self, plan: StoragePlan, device: torch.device) -> FieldState:
        """A new state, nothing of which is known."""


def as_rows(numel: int, plan: StoragePlan, device: torch.device) -> FieldState:
    """The state of a field that is kept as it is, one number an element."""
    return Rows(SlotStore(numel, plan, device))


#: The slot of what is kept of a parameter.
SINGLE_SLOT: list[Key] = [(0,)]


class Rows(FieldState):
    """One number an element, in the precision of the storage plan."""

    def __init__(self, store: SlotStore) -> None:
        self.store: SlotStore = store
        self.numel = store.row_numel

    @property
    def row_bytes(self) -> int:
        return self.store.row_bytes

    def known(self, keys: Sequence[Key]) -> list[bool]:
        return self.store.known(keys)

    def recall(self, slots: Slots) -> Tensor:
        """Committed rows in units of the message."""
        rows = self.store.read(slots.keys)
        return rows if slots.unit == 1 else rows * slots.unit

    def read(self, slots: Slots) -> Tensor:
        return zero_padding(self.recall(slots), slots.padded)

    def stage(self, slots: Slots, value: Tensor, change: Tensor | None) -> tuple[Any, Tensor]:
        value = value.to(torch.float32)
        if slots.padded is not None:
            value = keep_padded(value, self.recall(slots), slots.padded)
        return (value if slots.unit == 1 else value / slots.unit), value

    def cleared(self, slots: Slots) -> Any:
        shape = len(slots.keys), self.numel
        zeros = torch.zeros(shape, dtype=torch.float32, device=self.store.device)
        return self.stage(slots, zeros, None)[0]

    def write(self, keys: Sequence[Key], staged: Any) -> None:
        self.store.write(keys, staged)

    def state_dict(self, name: str) -> dict[str, Tensor]:
        if not len(self.store):
            return {}
        # Bits would be rounded again when that is stored, so they are under ``name:0`` ... as well.
        state = {name: self.store.read(SINGLE_SLOT)[0]}
        if self.store.rounds:
            rows = self.store.state_dict()
            state |= {f"{name}:{k.removeprefix('rows')}": v for k, v in rows.items() if k != "keys"}
        return state

    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        found = state[name].numel()
        if found != self.numel:
            raise ValueError(
                f"{name} is of {found} elements, here it has {self.numel}: use the same model"
            )
        rows = {
            f"rows{k.partition(':')[2]}": v for k, v in state.items() if k.startswith(name + ":")
        }
        if rows and self.store.rounds:
            self.store.load_state_dict({**rows, "keys": torch.tensor(SINGLE_SLOT)})
        else:
            self.store.write(SINGLE_SLOT, state[name].to(torch.float32)[None])
