"""A gradient on its way: what is to be sent for it, and what has come of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpcomp.comm.collectives import Peers
from mpcomp.compressors import Compressor
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.base import Controller, Draw, Encoded
from mpcomp.data_parallel.memory import Memory
from mpcomp.feedback.base import narrow

__all__ = ["OF_ERROR", "Context", "Item", "Tally", "matrix_of"]

#: The piece of a parameter for which numbers are drawn that round what is kept of it.
OF_ERROR = -1


def matrix_of(meta: TensorMeta) -> TensorMeta:
    """A tensor as a matrix [first dim, all others]."""
    return TensorMeta((meta.num_rows, meta.row_numel), meta.dtype)


@dataclass
class Tally:
    """What messages of one step held, as their sender made them.

    Attributes:
        wire_bytes: bytes.
        dense_bytes: what the same gradients would have been uncompressed.
        floats: numbers of 32 bits; a selection counts its values alone, as the papers do.
    """

    wire_bytes: int = 0
    dense_bytes: int = 0
    floats: float = 0.0


@dataclass
class Context:
    """What all paths of a step share.

    Attributes:
        peers: who takes part.
        controller: what chooses codecs.
        unit: factor from what memories keep to this step's gradients.
        draw: ``draw(name, piece)(alike)`` is a fresh generator.
        phase_memory: of a piece of a parameter that this replica forms the mean of, by name, first
            element and number of elements.
        factors: the right factors of PowerSGD, by parameter, and those of this step.
        tally: of this step.
    """

    peers: Peers
    controller: Controller
    unit: float
    draw: Callable[[str, int], Draw]
    phase_memory: Callable[[str, int, int], Memory]
    factors: dict[str, Tensor]
    new_factors: dict[str, Tensor] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


@dataclass
class Item:
    """One parameter's gradient in one step.

    Attributes:
        name: of the parameter.
        gradient: replaced by the result at the end.
        memory: what this replica remembers of the parameter.
        compressible: whether it may go compressed.
        narrowed: type that it is rounded to where it goes uncompressed; None for its own.
    """

    name: str
    gradient: Tensor
    memory: Memory
    compressible: bool
    narrowed: torch.dtype | None = None
    #: What is to be sent, fp32 [n] in memory order.
    wanted: Tensor = field(init=False)

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

    def load(self, unit: float, factor: float = 1.0) -> Tensor:
        """Reads the gradient, times ``factor``; sets what is to be sent. Gives the gradient [n]."""
        gradient = self.meta.flatten(self.gradient).reshape(-1).to(torch.float32)
        if factor != 1:
            gradient = gradient * factor
        self.wanted = self.memory.wanted(gradient, unit)
        if self.compressible and self.wanted.data_ptr() == self.gradient.data_ptr():
            # Sums round by how a tensor is aligned, and so by where it lies in a bucket of DDP.
            self.wanted = self.wanted.clone()
        return gradient

    def shaped(self, codec: Compressor) -> TensorMeta:
        """The shape in which a codec gets it."""
        return shape_for(codec, self.meta)

    def keep(self, rest: Tensor, positions: Tensor | None, context: Context) -> None:
        """Tells the memory what was not sent."""
        self.memory.keep(rest, positions, context.unit, context.draw(self.name, OF_ERROR))

    def finish(self, mean: Tensor, unit: float) -> None:
        """Writes the result into the gradient, from the mean [n] of what all have sent."""
        result = self.memory.result(mean, unit)
        self.gradient.copy_(self.meta.unflatten(narrow(result, self.meta.dtype)))


def shape_for(codec: Compressor, meta: TensorMeta) -> TensorMeta:
    """A matrix for a codec that works by matrix, else one row."""
    if codec.by_matrix:
        return matrix_of(meta)
    return TensorMeta((1, meta.numel), meta.dtype)


def count(tally: Tally, encoded: Encoded) -> None:
    """Counts a message's payload."""
    num_bytes = sum(part.nbytes for part in encoded.payload)
    tally.wire_bytes += num_bytes
    kept = encoded.positions
    tally.floats += num_bytes / 4 if kept is None else kept.numel()
