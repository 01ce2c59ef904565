"""The gradient of what was sent: the forward message's elements, with nothing but values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.compressors.gather import ValuesAt, check_values
from mpcomp.core.spec import SpecValue
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["AtPositions", "SameIndices"]


@dataclass(frozen=True)
class SameIndices(SpecValue):
    """Sends the gradient at the elements that the activation's message carried. Spec ``same``.

    For ``grad_comp`` only, beside an ``act_comp`` that selects (topk, randomk, randomblock). No
    indices travel; the gradient is zero where the activation was dropped, which is the exact
    gradient of masking. Where the activation went dense, so does the gradient. The "shared"
    indices of Rudakov et al., section 4 (GPT-2).

    A boundary resolves it per microbatch into the positions, so it is no `Compressor` itself.

    Args:
        values: compressor of the values sent.

    Raises:
        ValueError: a selecting value compressor.
        TypeError: values is not a compressor.
    """

    values: Compressor | None = None
    spec: ClassVar[str] = "same"
    spec_inner: ClassVar[str | None] = "values"
    at_cuts = True
    reuses_selection = True

    def __post_init__(self) -> None:
        check_values(self.values)

    def at(self, positions: Tensor) -> AtPositions:
        """The compressor for one microbatch whose activation carried ``positions``."""
        return AtPositions(positions, self.values)


@dataclass(frozen=True, eq=False)
class AtPositions(Compressor):
    """Sends the elements at given positions (memory order), which the receiver knows too."""

    positions: Tensor
    values: Compressor | None

    def _values(self) -> ValuesAt:
        return ValuesAt(1, self.positions.numel(), self.values)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return self._values().layout(meta.dtype)

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return self._values().take(x, self.positions.to(x.device), generator)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        positions = self.positions.to(payload[0].device)
        return self._values().put(payload, positions, meta, generator)
