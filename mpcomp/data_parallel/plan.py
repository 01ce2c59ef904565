"""A parameter between replicas: what is kept of it, and the plan of its gradient in one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.compressors.base import Coding, Encoded
from mpcomp.core.context import TensorMeta, cast_saturating
from mpcomp.core.traffic import ReplicaTraffic
from mpcomp.data_parallel.base import Controller, Draw, ReplicaMethod, matrix_of
from mpcomp.data_parallel.network import Peers
from mpcomp.feedback.memory import Field, Memory, Sent, State
from mpcomp.feedback.state import EndState

__all__ = [
    "RESIDUAL_STREAM",
    "Context",
    "GradientPlan",
    "ReplicaState",
    "load_tensors",
    "shape_for",
    "split_key",
    "tensors_of",
]

#: The piece of a parameter for which numbers are drawn that round what is kept of it.
RESIDUAL_STREAM = -1


@dataclass
class Context:
    """The part of a step that all of its paths share.

    Attributes:
        peers: who takes part.
        controller: what chooses codecs.
        state: of this rank's parameters.
        unit: factor from what memories keep to this step's gradients.
        draw: ``draw(name, piece)(alike)`` is a fresh generator.
        new_factors: the right factors of PowerSGD of this step, by parameter.
        traffic: of this step.
    """

    peers: Peers
    controller: Controller
    state: ReplicaState
    unit: float
    draw: Callable[[str, int], Draw]
    new_factors: dict[str, Tensor] = field(default_factory=dict)
    traffic: ReplicaTraffic = field(default_factory=ReplicaTraffic)

    def coding(self, codec: Compressor, meta: TensorMeta, name: str, piece: int) -> Coding:
        """The coding of a piece of a parameter, like ``meta``."""
        draw = self.draw(name, piece)
        return Coding(codec, meta, partial(draw, codec.shares_choice))

    def compressor_of(self, name: str) -> Compressor:
        """The compressor of a parameter that goes compressed."""
        codec = self.controller.codec(name)
        assert isinstance(codec, Compressor)
        return codec

    def count(self, encoded: Encoded) -> None:
        """Counts a payload; of a selection its values alone are floats."""
        kept = encoded.positions
        floats = encoded.num_bytes / 4 if kept is None else kept.numel()
        self.traffic.count_part(encoded.num_bytes, floats)


@dataclass
class GradientPlan:
    """The plan of one gradient in one step: what is due, what is sent in its place, what arrives.

    It is loaded once, then sent, then finished. A mean that one replica forms for all is sent by a
    plan of its own, which is not finished.

    Attributes:
        name: of the parameter.
        gradient: replaced by the result at the end.
        end: what this replica keeps of the parameter.
        compressible: whether it may go compressed.
        narrowed: type that it is rounded to where it goes uncompressed; None for its own.
        target: fp32 [n] in memory order, to be sent, once it is loaded.
    """

    name: str
    gradient: Tensor
    end: EndState
    compressible: bool = False
    narrowed: torch.dtype | None = None
    target: Tensor = field(init=False)
    _x: Tensor = field(init=False)
    _state: State = field(init=False)

    def __post_init__(self) -> None:
        self.meta = TensorMeta.of(self.gradient)

    @property
    def numel(self) -> int:
        return self.meta.numel

    @property
    def uncompressed_meta(self) -> TensorMeta:
        """The tensor as it travels where it goes uncompressed."""
        if self.narrowed is None or self.narrowed.itemsize >= self.meta.dtype.itemsize:
            return self.meta
        return dataclasses.replace(self.meta, dtype=self.narrowed)

    def shaped(self, codec: Compressor) -> TensorMeta:
        """The shape in which a codec gets it."""
        return shape_for(codec, self.meta)

    def load(
        self, context: Context, factor: float = 1.0, *, stream: int = RESIDUAL_STREAM
    ) -> Tensor:
        """Reads the gradient, times ``factor``; sets the target. Returns the gradient [n].

        Args:
            context: of the step.
            factor: on the gradient.
            stream: the piece whose numbers round what is kept.
        """
        x = self.meta.flatten(self.gradient).reshape(-1).to(torch.float32)
        if factor != 1:
            x = x * factor
        draw = context.draw(self.name, stream)
        self._x, self._state = x, self.end.open(unit=context.unit, draw=draw, flat=True)
        self.target = self.end.memory.compensate(x, self._state)
        if self.compressible and self.target.data_ptr() == self.gradient.data_ptr():
            # Sums round by how a tensor is aligned, and so by where it lies in a bucket of DDP.
            self.target = self.target.clone()
        return x

    def add(self, owed: Tensor, start: int) -> None:
        """Sends besides, from element ``start`` on, what another memory has kept of the tensor."""
        self.target = self.target.clone()
        self.target[start : start + owed.numel()] += owed

    def encode(self, context: Context) -> Encoded:
        """The message of the whole parameter; what it leaves out goes to the memory."""
        codec = context.compressor_of(self.name)
        coding = context.coding(codec, self.shaped(codec), self.name, 0)
        x = cast_saturating(self.target, coding.meta.dtype).reshape(coding.meta.shape)
        return self.note(context, context.controller.encode(self.name, x, coding))

    def note(self, context: Context, encoded: Encoded) -> Encoded:
        """Counts a message of the target, and tells the memory of it; returns the message."""
        if self.end.keeps:
            self.sent(encoded.without, encoded.positions)
        context.count(encoded)
        return encoded

    def sent(self, without: Callable[[Tensor], Tensor], positions: Tensor | None = None) -> None:
        """Tells the memory what a message says.

        Args:
            without: takes that from a tensor [n]; gives a new one.
            positions: of the elements that were sent, ascending; None for all of them.
        """
        sent = Sent(self._x, self.target, without, lambda: positions, alone=False)
        self.end.memory.sent(sent, self._state)

    def finish(self, mean: Tensor) -> None:
        """Writes the result into the gradient, from the mean [n] of what all have sent."""
        result = self.end.memory.received(mean, self._state)
        self.gradient.copy_(self.meta.unflatten(cast_saturating(result, self.meta.dtype)))


def shape_for(codec: Compressor, meta: TensorMeta) -> TensorMeta:
    """A matrix for a codec that works by matrix, else one row."""
    if codec.by_matrix:
        return matrix_of(meta)
    return TensorMeta((1, meta.numel), meta.dtype)


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
        self._metas = metas
        self._device = device
        self.ends: dict[str, EndState] = {
            name: self._end(method.memory(compressed=name in compressible), meta)
            for name, meta in metas.items()
        }
        self._pieces: dict[str, _Piece] = {}
        self.factors: dict[str, Tensor] = {}

    def _end(self, memory: Memory, slot: TensorMeta) -> EndState:
        return EndState(memory, slot, self._device, capped=False)

    def second_stage(self, name: str, start: int, numel: int) -> EndState:
        """State of a piece of a parameter: ``numel`` elements from ``start`` on."""
        if name not in self._pieces:
            end = self._end(self._method.second_stage_memory(), TensorMeta((1, numel)))
            self._pieces[name] = _Piece(start, numel, end)
        piece = self._pieces[name]
        assert (piece.start, piece.numel) == (start, numel), "pieces stay the same for ever"
        return piece.end

    def flush_second_stage_residual(self, plan: GradientPlan, context: Context) -> None:
        """Adds the residual that a piece's memory still holds to a parameter's target.

        For a step in which no mean is formed piece by piece. What is owed is a part of a mean, and
        this rank alone adds it to what the mean is formed of. (A memory that gives a part of it
        at a time will be asked again.)
        """
        piece = self._pieces.get(plan.name)
        if piece is None or not piece.end.known:
            return
        zeros = torch.zeros(piece.numel, dtype=torch.float32, device=plan.target.device)
        owed = GradientPlan(plan.name, zeros, piece.end)
        owed.load(context, stream=RESIDUAL_STREAM - 1)
        owed.sent(partial(torch.sub, other=owed.target))  # all of it is sent
        plan.add(context.peers.size * owed.target, piece.start)

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
            kind, name, field = split_key(key)
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

    def merged(self, replicas: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The `tensors` that every replica goes on with, from those of more or fewer of them.

        Each field says how it is merged (`mpcomp.feedback.Field`). Factors are the same on all
        replicas. Of what else there is, such as a controller's, every replica gets the mean.

        Raises:
            ValueError: something belongs to as many replicas as there were.
        """
        # With several replicas on a machine only the first of each holds anything.
        held: dict[str, list[Tensor]] = {}
        for replica in replicas:
            for key, value in replica.items():
                held.setdefault(key, []).append(value)
        result: dict[str, Tensor] = {}
        owed: dict[str, Tensor] = {}
        for key, values in held.items():
            kind, name, field = split_key(key)
            field, _, part = field.partition(":")
            if "/" in name or (part and f"{kind}/{name}/{field}" not in held):
                raise _inseparable(name)
            if part:
                continue  # bits that stand for another field
            declared = self._declared(kind, name, values[0].numel()).get(field)
            if kind == "phase":
                if declared is None or declared.merges != "owed":
                    continue
                if declared.kept is not None:
                    raise _inseparable(name)
                owed[name] = torch.cat(values)  # pieces, in the order of replicas
            elif kind == "factor" or (declared is not None and declared.merges == "same"):
                result[key] = values[0]
            else:
                result[key] = torch.stack(values).mean(dim=0)
        for name, meta in self._metas.items():
            for field, each in self._declared("own", name, meta.numel).items():
                key, source = f"own/{name}/{field}", f"own/{name}/{each.mirrors}"
                if source in result:
                    result[key] = result[source]
                elif each.merges == "owed" and key in result and name in owed:
                    result[key] = result[key] + owed.pop(name)
        return result

    def _declared(self, kind: str, name: str, numel: int) -> Mapping[str, Field]:
        """The fields of a parameter, or of a piece of it of so many elements."""
        if kind == "phase":
            return self._method.second_stage_memory().fields(TensorMeta((1, numel)))
        if kind != "own" or name not in self.ends:
            return {}
        return self.ends[name].memory.fields(self._metas[name])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from what `tensors` gave."""
        found: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, name, field = split_key(key)
            if kind == "factor":
                self.factors[name] = value.to(self._device)
            elif kind in ("own", "phase"):
                found.setdefault((kind, name), {})[field] = value.to(self._device)
        for (kind, name), fields in found.items():
            if kind == "phase":
                start, numel = int(fields.pop("start")), int(fields.pop("numel"))
                load_tensors(self.second_stage(name, start, numel), fields)
            else:
                load_tensors(self.ends[name], fields)


def split_key(key: str) -> tuple[str, str, str]:
    """Kind, parameter and field of a tensor of `ReplicaState.tensors`; some kinds have no field."""
    kind, _, name = key.partition("/")
    if kind not in ("own", "phase"):
        return kind, name, ""
    name, _, field = name.rpartition("/")
    return kind, name, field


def tensors_of(end: EndState) -> dict[str, Tensor]:
    """Tensors kept of a parameter, under ``field`` and ``field:...``."""
    state: dict[str, Tensor] = {}
    for name, kept in end.fields.items():
        state |= kept.state_dict(name)
    return state


def load_tensors(end: EndState, state: Mapping[str, Tensor]) -> None:
    """Goes on from what `tensors_of` gave.

    Raises:
        ValueError: it is not of this size.
    """
    for name in dict.fromkeys(key.partition(":")[0] for key in state):
        end.fields[name].load_state_dict(name, state)


def _inseparable(name: str) -> ValueError:
    return ValueError(
        f"what is remembered of {name} belongs to as many replicas as it was saved with: a piece "
        "of it, or compressed in a way that cannot be averaged; use as many, or load the weights "
        "alone with weights= of mpcomp.pipeline"
    )
