"""The coding of one tensor: a compressor, the tensor's description, and what all ends draw for it.

At a cut it is a part of a message's plan; between replicas it is a parameter's, or that of a piece
of one. Each end makes an equal coding, so that a payload is all that travels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Selecting
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import Payload, packed_length, unpack

__all__ = ["Coding", "Encoded"]


@dataclass(frozen=True)
class Coding:
    """The way of a tensor to a payload, and of that to a tensor again.

    Attributes:
        compressor: what does it.
        meta: the tensor.
        draw: makes a fresh generator; equal at all ends, and equal again when called again.
        device: of the tensor; None for the payload's.
    """

    compressor: Compressor
    meta: TensorMeta
    draw: Callable[[], torch.Generator]
    device: torch.device | None = None

    def _generator(self) -> torch.Generator | None:
        """A fresh generator; None for a compressor that reads none, as seeding one takes time."""
        return self.draw() if self.compressor.draws else None

    @property
    def layout(self) -> tuple[TensorMeta, ...]:
        """Wire tensors of the payload."""
        return self.compressor.layout(self.meta)

    def compress(self, x: Tensor) -> Payload:
        """The payload of ``x``."""
        return self.compressor.compress(x, self._generator())

    def round_trip(self, x: Tensor, whole: Tensor) -> tuple[Payload, Tensor]:
        """The payload of ``x``, which is what is left of a tensor, and what it says."""
        return self.compressor.round_trip(x, whole, self.meta, self.draw)

    def encode(self, x: Tensor) -> Encoded:
        """The payload of ``x``, one scope as a whole; of a selection with its positions."""
        if not isinstance(self.compressor, Selecting):
            return Encoded(self, self.compress(x))
        generator, flat = self._generator(), x.reshape(-1)
        kept = self.compressor.num_kept(flat.numel())
        positions = self.compressor.choose(flat, kept, generator)
        return Encoded(self, self.compressor.take(x, positions, generator), positions)

    def take(self, x: Tensor, positions: Tensor) -> Encoded:
        """The payload of a selection that was made before."""
        assert isinstance(self.compressor, Selecting)
        return Encoded(self, self.compressor.take(x, positions, self._generator()), positions)

    def unpack(self, buffer: Tensor, start: int) -> tuple[Payload, int]:
        """The payload that begins at this byte of `mpcomp.core.wire.pack`, and where it ends."""
        return unpack(buffer, self.layout, start), packed_length(self.layout, start)

    def decompress(self, payload: Payload) -> Tensor:
        """The tensor that a payload says, like `meta`."""
        if self.device is not None and self.compressor.on_host:
            generator = self._generator()
            return self.compressor.decompress_to(self.device, payload, self.meta, generator)
        return self.compressor.decompress(payload, self.meta, self._generator())

    def positions(self, payload: Payload) -> Tensor | None:
        """Elements that a payload carries, ascending in memory order; None for all."""
        if not isinstance(self.compressor, Selecting):
            return None
        return self.compressor.indices(payload, self.meta, self._generator())

    def add_to(
        self,
        total: Tensor,
        payload: Payload,
        *,
        scale: float = 1.0,
        positions: Tensor | None = None,
    ) -> None:
        """Adds the tensor that a payload says, see `Compressor.add_to`."""
        self.compressor.add_to(
            total, payload, self.meta, self._generator(), scale=scale, positions=positions
        )


@dataclass(frozen=True)
class Encoded:
    """A tensor that was encoded here.

    Attributes:
        coding: how.
        payload: where the compressor has it.
        positions: of the elements that it carries, where the coding chose them.
    """

    coding: Coding
    payload: Payload
    positions: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return sum(part.nbytes for part in self.payload)

    def without(self, y: Tensor) -> Tensor:
        """A tensor [n] less what the payload says."""
        y = y.clone()
        self.coding.add_to(y, self.payload, scale=-1.0, positions=self.positions)
        return y
