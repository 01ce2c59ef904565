"""Forms in which a field is kept: rows, count sketches, or a compressor's payload.

What an end keeps changes in two strokes: a step *stages* what it would keep, and the end writes it
when the step is known to be finite. Values are staged in the units of the message at hand; what is
kept is free of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mpcomp.compressors.base import Coding, Compressor
from mpcomp.core.padding import keep_padded, zero_padding
from mpcomp.core.step import Key
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import Payload
from mpcomp.feedback.sketch import VectorSketch
from mpcomp.feedback.slots import SlotStore, StoragePlan

__all__ = [
    "SINGLE_SLOT",
    "Draw",
    "FieldState",
    "FieldStorage",
    "Fp32Rows",
    "Payloads",
    "Sketched",
    "as_rows",
]

#: Makes a fresh generator; ``alike`` says whether all senders draw the same from it.
Draw: TypeAlias = Callable[[bool], torch.Generator]


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
    def read(self, keys: Sequence[Key], unit: float, padded: Tensor | None) -> Tensor:
        """Committed rows [keys, n] times ``unit``, zero where they are padded or unknown."""

    @abstractmethod
    def stage(
        self,
        keys: Sequence[Key],
        value: Tensor,
        change: Tensor | None,
        unit: float,
        padded: Tensor | None,
        draw: Draw | None,
    ) -> tuple[Any, Tensor]:
        """Argument of `write` for new rows ``value`` [keys, n], and the rows to be read then.

        Args:
            keys: their slots.
            value: the rows; of no meaning where padded.
            change: of the rows since what was committed, for what is kept of changes alone.
            unit: of the message at hand.
            padded: of `mpcomp.core.padding.padded_positions`.
            draw: for what is rounded at random to be kept.
        """

    @abstractmethod
    def cleared(self, keys: Sequence[Key], unit: float, padded: Tensor | None) -> Any:
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
    return _Rows(SlotStore(numel, plan, device))


#: The slot of what is kept of a parameter.
SINGLE_SLOT: list[Key] = [(0,)]


class _Rows(FieldState):
    """One number an element, in the precision of the storage plan."""

    def __init__(self, store: SlotStore) -> None:
        self.store: SlotStore = store
        self.numel = store.row_numel

    @property
    def row_bytes(self) -> int:
        return self.store.row_bytes

    def known(self, keys: Sequence[Key]) -> list[bool]:
        return self.store.known(keys)

    def recall(self, keys: Sequence[Key], unit: float) -> Tensor:
        """Committed rows times ``unit``."""
        rows = self.store.read(keys)
        return rows if unit == 1 else rows * unit

    def read(self, keys: Sequence[Key], unit: float, padded: Tensor | None) -> Tensor:
        return zero_padding(self.recall(keys, unit), padded)

    def stage(
        self,
        keys: Sequence[Key],
        value: Tensor,
        change: Tensor | None,
        unit: float,
        padded: Tensor | None,
        draw: Draw | None,
    ) -> tuple[Any, Tensor]:
        value = value.to(torch.float32)
        if padded is not None:
            value = keep_padded(value, self.recall(keys, unit), padded)
        return (value if unit == 1 else value / unit), value

    def cleared(self, keys: Sequence[Key], unit: float, padded: Tensor | None) -> Any:
        zeros = torch.zeros(len(keys), self.numel, dtype=torch.float32, device=self.store.device)
        return self.stage(keys, zeros, None, unit, padded, None)[0]

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


@dataclass(frozen=True)
class Fp32Rows(FieldStorage):
    """As it is, in fp32, whatever precision other fields of the memory are stored in.

    Attributes:
        numel: of a slot.
    """

    numel: int

    def state(self, plan: StoragePlan, device: torch.device) -> FieldState:
        return as_rows(self.numel, replace(plan, storage="fp32"), device)


@dataclass(frozen=True)
class Sketched(FieldStorage):
    """As a count sketch of each row, which is told of changes alone (`mpcomp.feedback.conef`)."""

    sketch: VectorSketch

    def state(self, plan: StoragePlan, device: torch.device) -> FieldState:
        return _Sketches(self.sketch, SlotStore(self.sketch.cells, plan, device))


class _Sketches(_Rows):
    """Cells in the precision of the storage plan; what is read is decoded from them."""

    def __init__(self, sketch: VectorSketch, store: SlotStore) -> None:
        super().__init__(store)
        self._sketch = sketch

    def read(self, keys: Sequence[Key], unit: float, padded: Tensor | None) -> Tensor:
        return zero_padding(self._sketch.estimate(self.recall(keys, unit)), padded)

    def stage(
        self,
        keys: Sequence[Key],
        value: Tensor,
        change: Tensor | None,
        unit: float,
        padded: Tensor | None,
        draw: Draw | None,
    ) -> tuple[Any, Tensor]:
        assert change is not None, "a sketch that was decoded cannot be sketched again"
        # A cell may hold padded positions too, which this message says nothing of.
        cells = self.recall(keys, unit) + self._sketch.sketch(zero_padding(change, padded))
        return (cells if unit == 1 else cells / unit), self._sketch.estimate(cells)

    def cleared(self, keys: Sequence[Key], unit: float, padded: Tensor | None) -> Any:
        return torch.zeros(len(keys), self.numel, dtype=torch.float32, device=self.store.device)


@dataclass(frozen=True)
class Payloads(FieldStorage):
    """As the payload of a compressor, of one slot alone: between replicas.

    Attributes:
        compressor: an unbiased one.
        meta: the shape in which it is given the row.
    """

    compressor: Compressor
    meta: TensorMeta

    def state(self, plan: StoragePlan, device: torch.device) -> FieldState:
        return _Payload(self.compressor, self.meta, device)


class _Payload(FieldState):
    """The payload, and the seed of choices that decoding must draw again."""

    def __init__(self, compressor: Compressor, meta: TensorMeta, device: torch.device) -> None:
        self._compressor = compressor
        self._meta = meta
        self._device = device
        self._held: tuple[Payload, Tensor] | None = None

    @property
    def row_bytes(self) -> int:
        return self._compressor.wire_bytes(self._meta)

    def known(self, keys: Sequence[Key]) -> list[bool]:
        return [self._held is not None for _ in keys]

    def read(self, keys: Sequence[Key], unit: float, padded: Tensor | None) -> Tensor:
        if self._held is None:
            return torch.zeros(1, self._meta.numel, dtype=torch.float32, device=self._device)
        return self._decoded(*self._held) * unit

    def stage(
        self,
        keys: Sequence[Key],
        value: Tensor,
        change: Tensor | None,
        unit: float,
        padded: Tensor | None,
        draw: Draw | None,
    ) -> tuple[Any, Tensor]:
        assert draw is not None and padded is None
        seed = torch.tensor([draw(False).initial_seed()])
        x = (value / unit).reshape(self._meta.shape)
        payload = self._coding(seed).compress(x)
        return (payload, seed), self._decoded(payload, seed) * unit

    def cleared(self, keys: Sequence[Key], unit: float, padded: Tensor | None) -> Any:
        raise AssertionError("between replicas nothing is cleared")

    def write(self, keys: Sequence[Key], staged: Any) -> None:
        self._held = staged

    def _decoded(self, payload: Payload, seed: Tensor) -> Tensor:
        return self._coding(seed).decompress(payload).reshape(1, -1)

    def _coding(self, seed: Tensor) -> Coding:
        return Coding(self._compressor, self._meta, partial(_generator, seed))

    def state_dict(self, name: str) -> dict[str, Tensor]:
        if self._held is None:
            return {}
        payload, seed = self._held
        return {f"{name}:seed": seed, **{f"{name}:{i}": part for i, part in enumerate(payload)}}

    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        layout = self._compressor.layout(self._meta)
        parts = tuple(state[f"{name}:{i}"] for i in range(len(layout)))
        for part, meta in zip(parts, layout, strict=True):
            if tuple(part.shape) != meta.shape:
                raise ValueError(
                    f"{name} is of shape {list(part.shape)}, here it has {list(meta.shape)}: use "
                    "the same model"
                )
        self._held = parts, state[f"{name}:seed"].cpu()


def _generator(seed: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed))
