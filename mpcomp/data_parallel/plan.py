"""One parameter's gradient during the exchange, and what all gradients of a step share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mpcomp.comm.collectives import Peers
from mpcomp.compressors import Compressor
from mpcomp.compressors.coding import Coding, Encoded
from mpcomp.core.tensor_meta import TensorMeta, narrow
from mpcomp.core.traffic import ReplicaTraffic
from mpcomp.data_parallel.base import Controller, Draw, matrix_of
from mpcomp.feedback.memory import Sent, State
from mpcomp.feedback.state import EndState

__all__ = ["OF_ERROR", "Compensated", "Context", "Item", "shape_for"]

#: The piece of a parameter for which numbers are drawn that round what is kept of it.
OF_ERROR = -1


@dataclass
class Context:
    """The context that all paths of a step share.

    Attributes:
        peers: who takes part.
        controller: what chooses codecs.
        unit: factor from what memories keep to this step's gradients.
        draw: ``draw(name, piece)(alike)`` is a fresh generator.
        end_of_mean: what is kept of a piece of a parameter that this replica forms the mean of, by
            name, first element and number of elements.
        factors: the right factors of PowerSGD, by parameter, and those of this step.
        traffic: of this step.
    """

    peers: Peers
    controller: Controller
    unit: float
    draw: Callable[[str, int], Draw]
    end_of_mean: Callable[[str, int, int], EndState]
    factors: dict[str, Tensor]
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

    def compensated(self, end: EndState, x: Tensor, name: str, piece: int) -> Compensated:
        """The target for ``x`` [n], whose residual is rounded by numbers drawn for a piece."""
        return Compensated(end, x, end.open(unit=self.unit, draw=self.draw(name, piece), flat=True))


class Compensated:
    """A tensor that is due, and the target that is sent in its place, with the state behind it.

    Args:
        end: what is kept of it.
        x: fp32 [n].
        state: of its slot.

    Attributes:
        target: fp32 [n]; ``x`` itself where nothing is kept.
    """

    def __init__(self, end: EndState, x: Tensor, state: State) -> None:
        self._memory = end.memory
        self._x = x
        self._state = state
        self.keeps = end.keeps
        self.target = self._memory.compensate(x, state)

    def sent(self, without: Callable[[Tensor], Tensor], positions: Tensor | None = None) -> None:
        """Tells the memory what a message says.

        Args:
            without: takes that from a tensor [n]; gives a new one.
            positions: of the elements that were sent, ascending; None for all of them.
        """
        sent = Sent(self._x, self.target, without, lambda: positions, alone=False)
        self._memory.sent(sent, self._state)

    def add(self, owed: Tensor, start: int) -> None:
        """Sends besides, from element ``start`` on, what another memory has kept of the tensor."""
        piece = slice(start, start + owed.numel())
        self.target = self.target.clone()
        self.target[piece] += owed

    def received(self, mean: Tensor) -> Tensor:
        """The result [n], from the mean of what all have sent."""
        return self._memory.received(mean, self._state)


@dataclass
class Item:
    """One parameter's gradient in one step.

    Attributes:
        name: of the parameter.
        gradient: replaced by the result at the end.
        end: what this replica keeps of the parameter.
        compressible: whether it may go compressed.
        narrowed: type that it is rounded to where it goes uncompressed; None for its own.
        compensated: its target, once it is loaded.
    """

    name: str
    gradient: Tensor
    end: EndState
    compressible: bool
    narrowed: torch.dtype | None = None
    compensated: Compensated = field(init=False)

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

    def load(self, context: Context, factor: float = 1.0) -> Tensor:
        """Reads the gradient, times ``factor``; sets the target. Returns the gradient [n]."""
        gradient = self.meta.flatten(self.gradient).reshape(-1).to(torch.float32)
        if factor != 1:
            gradient = gradient * factor
        self.compensated = context.compensated(self.end, gradient, self.name, OF_ERROR)
        if self.compressible and self.target.data_ptr() == self.gradient.data_ptr():
            # Sums round by how a tensor is aligned, and so by where it lies in a bucket of DDP.
            self.compensated.target = self.target.clone()
        return gradient

    @property
    def target(self) -> Tensor:
        """The tensor that is to be sent, fp32 [n] in memory order."""
        return self.compensated.target

    def shaped(self, codec: Compressor) -> TensorMeta:
        """The shape in which a codec gets it."""
        return shape_for(codec, self.meta)

    def encode(self, context: Context) -> Encoded:
        """The message of the whole parameter; what it leaves out goes to the memory."""
        codec = context.compressor_of(self.name)
        meta = self.shaped(codec)
        x = narrow(self.target, meta.dtype).reshape(meta.shape)
        encoded = context.controller.encode(self.name, x, context.coding(codec, meta, self.name, 0))
        if self.end.keeps:
            self.sent(encoded.without, encoded.positions)
        context.count(encoded)
        return encoded

    def sent(self, without: Callable[[Tensor], Tensor], positions: Tensor | None = None) -> None:
        """Tells the memory what the message says; see `Compensated.sent`."""
        self.compensated.sent(without, positions)

    def finish(self, mean: Tensor) -> None:
        """Writes the result into the gradient, from the mean [n] of what all have sent."""
        result = self.compensated.received(mean)
        self.gradient.copy_(self.meta.unflatten(narrow(result, self.meta.dtype)))


def shape_for(codec: Compressor, meta: TensorMeta) -> TensorMeta:
    """A matrix for a codec that works by matrix, else one row."""
    if codec.by_matrix:
        return matrix_of(meta)
    return TensorMeta((1, meta.numel), meta.dtype)
