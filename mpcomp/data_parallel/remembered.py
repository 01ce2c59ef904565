"""All that one rank remembers of its parameters between steps: by name, committed or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.item import OF_ERROR, Context, Item
from mpcomp.data_parallel.memory import Memory

__all__ = ["Remembered"]


@dataclass
class _Phase:
    """The memory of a piece of a parameter, which this rank forms the mean of."""

    start: int
    numel: int
    memory: Memory


class Remembered:
    """Memories of parameters and of pieces of them, and the factors of PowerSGD.

    Args:
        method: makes memories.
        metas: each parameter of this rank as a matrix.
        compressible: those that may go compressed.
        device: of the parameters.

    Attributes:
        memories: of the parameters.
        factors: the right factors of PowerSGD.
    """

    def __init__(
        self,
        method: ReplicaMethod,
        metas: Mapping[str, TensorMeta],
        compressible: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._method = method
        self._device = device
        self.memories: dict[str, Memory] = {
            name: method.memory(meta, device, compressed=name in compressible)
            for name, meta in metas.items()
        }
        self._phases: dict[str, _Phase] = {}
        self.factors: dict[str, Tensor] = {}

    def phase_memory(self, name: str, start: int, numel: int) -> Memory:
        """That of a piece of a parameter: ``numel`` elements from ``start`` on."""
        if name not in self._phases:
            memory = self._method.phase_memory(numel, self._device)
            self._phases[name] = _Phase(start, numel, memory)
        phase = self._phases[name]
        assert (phase.start, phase.numel) == (start, numel), "pieces stay the same for ever"
        return phase.memory

    def hand_back(self, item: Item, context: Context) -> None:
        """Adds to what is wanted what a piece's memory still owes.

        For a step in which no mean is formed piece by piece. What is owed is a part of a mean, and
        this rank alone adds it to what the mean is formed of. (A memory that gives a part of it
        at a time will be asked again.)
        """
        phase = self._phases.get(item.name)
        if phase is None or not phase.memory.known:
            return
        zeros = torch.zeros(phase.numel, device=item.wanted.device)
        owed = phase.memory.wanted(zeros, context.unit)
        phase.memory.keep(zeros, None, context.unit, context.draw(item.name, OF_ERROR - 1))
        wanted = item.wanted.clone()
        wanted[phase.start : phase.start + phase.numel] += context.peers.size * owed
        item.wanted = wanted

    def commit(self, factors: Mapping[str, Tensor]) -> None:
        """Keeps what a step has noted."""
        for memory in self._all():
            memory.commit()
        self.factors.update(factors)

    def discard(self) -> None:
        """Forgets what a step has noted."""
        for memory in self._all():
            memory.discard()

    def discard_one(self, name: str) -> None:
        """Forgets what a step has noted of one parameter."""
        self.memories[name].discard()
        if name in self._phases:
            self._phases[name].memory.discard()

    @property
    def num_bytes(self) -> int:
        """Bytes of all memories, once something is kept in each."""
        return sum(memory.num_bytes for memory in self._all())

    def _all(self) -> Iterator[Memory]:
        yield from self.memories.values()
        for phase in self._phases.values():
            yield phase.memory

    def tensors(self) -> dict[str, Tensor]:
        """All state, under ``own/name/field``, ``phase/name/field`` and ``factor/name``."""
        found: dict[str, Tensor] = {}
        for name, memory in self.memories.items():
            found.update({f"own/{name}/{k}": v for k, v in memory.state_dict().items()})
        for name, phase in self._phases.items():
            found.update({f"phase/{name}/{k}": v for k, v in phase.memory.state_dict().items()})
            found[f"phase/{name}/start"] = torch.tensor(phase.start)
            found[f"phase/{name}/numel"] = torch.tensor(phase.numel)
        found.update({f"factor/{name}": value for name, value in self.factors.items()})
        return found

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError unless there is a place for all that `tensors` gave."""
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            name, _, field = rest.rpartition("/")
            if kind != "own":
                continue
            memory = self.memories.get(name)
            sizes = memory.sizes if memory is not None else {}
            if field.partition(":")[0] not in sizes:
                raise ValueError(
                    f"the state has the {field} of {name}, for which there is no place here: "
                    "train the same parameters, with the same smallest= of ReplicaNetwork"
                )
            if ":" not in field and value.numel() != sizes[field]:
                raise ValueError(
                    f"the state of {name} is of {value.numel()} elements, here it has "
                    f"{sizes[field]}: use the same model"
                )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from what `tensors` gave."""
        found: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "factor":
                self.factors[name] = value.to(self._device)
            elif kind in ("own", "phase"):
                name, _, field = name.rpartition("/")
                found.setdefault((kind, name), {})[field] = value.to(self._device)
        for (kind, name), fields in found.items():
            if kind == "phase":
                start, numel = int(fields.pop("start")), int(fields.pop("numel"))
                self.phase_memory(name, start, numel).load_state_dict(fields)
            else:
                self.memories[name].load_state_dict(fields)
