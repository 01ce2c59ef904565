"""All that one rank keeps of its parameters between steps: by name, committed or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.plan import OF_ERROR, Context, Item
from mpcomp.feedback.memory import Memory
from mpcomp.feedback.state import EndState

__all__ = ["ReplicaState", "load_tensors", "tensors_of"]


@dataclass
class _Piece:
    """A piece of a parameter that this rank forms the mean of, and what it keeps of that."""

    start: int
    numel: int
    end: EndState


class ReplicaState:
    """State of parameters and of pieces of them, and the factors of PowerSGD.

    Args:
        method: names the memories.
        metas: each parameter of this rank as a matrix.
        compressible: those that may go compressed.
        device: of the parameters.

    Attributes:
        ends: of the parameters.
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
        self.ends: dict[str, EndState] = {
            name: self._end(method.memory(compressed=name in compressible), meta)
            for name, meta in metas.items()
        }
        self._pieces: dict[str, _Piece] = {}
        self.factors: dict[str, Tensor] = {}

    def _end(self, memory: Memory, slot: TensorMeta) -> EndState:
        return EndState(memory, slot, self._device, capped=False)

    def end_of_mean(self, name: str, start: int, numel: int) -> EndState:
        """State of a piece of a parameter: ``numel`` elements from ``start`` on."""
        if name not in self._pieces:
            end = self._end(self._method.mean_memory(), TensorMeta((1, numel)))
            self._pieces[name] = _Piece(start, numel, end)
        piece = self._pieces[name]
        assert (piece.start, piece.numel) == (start, numel), "pieces stay the same for ever"
        return piece.end

    def hand_back(self, item: Item, context: Context) -> None:
        """Adds the residual that a piece's memory still holds to a parameter's target.

        For a step in which no mean is formed piece by piece. What is owed is a part of a mean, and
        this rank alone adds it to what the mean is formed of. (A memory that gives a part of it
        at a time will be asked again.)
        """
        piece = self._pieces.get(item.name)
        if piece is None or not piece.end.known:
            return
        zeros = torch.zeros(piece.numel, dtype=torch.float32, device=item.target.device)
        due = context.compensated(piece.end, zeros, item.name, OF_ERROR - 1)
        due.sent(lambda y: y - due.target)  # all of it is sent
        item.compensated.add(context.peers.size * due.target, piece.start)

    def commit(self, factors: Mapping[str, Tensor]) -> None:
        """Keeps what a step has staged."""
        for end in self._all():
            end.commit()
        self.factors.update(factors)

    def discard(self) -> None:
        """Forgets what a step has staged."""
        for end in self._all():
            end.discard()

    def discard_one(self, name: str) -> None:
        """Forgets what a step has staged of one parameter."""
        self.ends[name].discard()
        if name in self._pieces:
            self._pieces[name].end.discard()

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept, once something is kept of each."""
        return sum(end.row_bytes for end in self._all())

    def _all(self) -> Iterator[EndState]:
        yield from self.ends.values()
        for piece in self._pieces.values():
            yield piece.end

    def tensors(self) -> dict[str, Tensor]:
        """All state, under ``own/name/field``, ``phase/name/field`` and ``factor/name``."""
        found: dict[str, Tensor] = {}
        for name, end in self.ends.items():
            found.update({f"own/{name}/{k}": v for k, v in tensors_of(end).items()})
        for name, piece in self._pieces.items():
            found.update({f"phase/{name}/{k}": v for k, v in tensors_of(piece.end).items()})
            found[f"phase/{name}/start"] = torch.tensor(piece.start)
            found[f"phase/{name}/numel"] = torch.tensor(piece.numel)
        found.update({f"factor/{name}": value for name, value in self.factors.items()})
        return found

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError unless there is a place for all that `tensors` gave."""
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            name, _, field = rest.rpartition("/")
            if kind != "own":
                continue
            fields = self.ends[name].fields if name in self.ends else {}
            if (known := fields.get(field.partition(":")[0])) is None:
                raise ValueError(
                    f"the state has the {field} of {name}, for which there is no place here: "
                    "train the same parameters, with the same smallest= of ReplicaNetwork"
                )
            if ":" not in field and value.numel() != known.numel:
                raise ValueError(
                    f"the state of {name} is of {value.numel()} elements, here it has "
                    f"{known.numel}: use the same model"
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
                load_tensors(self.end_of_mean(name, start, numel), fields)
            else:
                load_tensors(self.ends[name], fields)


def tensors_of(end: EndState) -> dict[str, Tensor]:
    """Tensors kept of a parameter, under ``field`` and ``field:...``."""
    state: dict[str, Tensor] = {}
    for name, field in end.fields.items():
        state |= field.state_dict(name)
    return state


def load_tensors(end: EndState, state: Mapping[str, Tensor]) -> None:
    """Goes on from what `tensors_of` gave.

    Raises:
        ValueError: it is not of this size.
    """
    for name in dict.fromkeys(key.partition(":")[0] for key in state):
        end.fields[name].load_state_dict(name, state)
