"""The gradient of what was sent: the forward message's elements, with nothing but values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, ValuesAt, check_values
from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import SpecValue
from mpcomp.core.wire import Payload

__all__ = ["AtPositions", "SameIndices"]

_PLACES = ("sent", "nonzero")


@dataclass(frozen=True)
class SameIndices(SpecValue):
    """Sends the gradient at the elements that the activation's message carried. Spec ``same``.

    For ``grad_comp`` only. No indices travel; the gradient is zero where the activation was
    dropped, which is the exact gradient of masking. Where the activation went dense, so does the
    gradient. It needs an ``act_comp`` that selects (topk, randomk, randomblock).

    With ``where="nonzero"`` it sends the gradient where the activation that arrived is not zero,
    beside any ``act_comp``. For cuts behind a ReLU, as in a ResNet: what the stage before makes of
    a gradient is zero where its output was, so half of the gradient, or what it may be, need not
    travel, and nothing is lost but what the activation's own message rounds to zero. Elsewhere
    that is the gradient of a dead zone: ``act_comp="step:0.5"`` then loses what it has rounded.

    A link resolves it per microbatch into the positions, so it is no `Compressor` itself.

    * Source: the "shared" indices of Rudakov et al., 2023, section 4 (GPT-2); ``where="nonzero"``
      is this project's own.
    * State: the positions that the activation's message carried, at both ends, until the gradient
      of that microbatch has gone.
    * Theory: the exact gradient of the masked activation, so no error is made that the activation's
      message has not made; values may be compressed on top of it.

    Args:
        values: compressor of the values sent, as one row of them.
        where: "sent", or "nonzero".

    Raises:
        ValueError: a selecting value compressor, or another place.
        TypeError: values is not a compressor.
    """

    values: Compressor | None = None
    where: str = "sent"
    spec: ClassVar[str] = "same"
    spec_inner: ClassVar[str | None] = "values"
    at_cuts = True

    def __post_init__(self) -> None:
        check_values(self.values, last=True)
        if self.where not in _PLACES:
            raise ValueError(f"where={self.where!r}: SameIndices knows {', '.join(_PLACES)}")

    def check_place(self, argument: str) -> None:
        if argument != "grad_comp":
            raise ValueError(
                f"{argument}={type(self).__name__}(): it reuses the activation's selection, so it "
                "is for grad_comp"
            )

    def check_beside(self, other: SpecValue, boundary: int) -> None:
        if not (other.selects or self.where == "nonzero"):
            raise ValueError(
                f"grad_comp={type(self).__name__}() at boundary {boundary} with act_comp={other}: "
                "there must be one selection to reuse; use act_comp=TopK(...), RandomK(...) or "
                "RandomBlock(...), also inside ef, ef21 or aqsgd, or same:where=nonzero"
            )

    def at(self, positions: Tensor) -> AtPositions:
        """The compressor for one microbatch whose activation carried ``positions``."""
        return AtPositions(positions, self)


@dataclass(frozen=True, eq=False)
class AtPositions(Compressor):
    """Sends the elements at given positions (memory order), which the receiver knows too."""

    positions: Tensor
    method: SameIndices

    def __str__(self) -> str:
        """The spec of the method."""
        return str(self.method)

    @property
    def variable_length(self) -> bool:  # type: ignore[override]
        """Whether the values' message is."""
        return self.method.values is not None and self.method.values.variable_length

    def _values(self) -> ValuesAt:
        return ValuesAt(1, self.positions.numel(), self.method.values)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return self._values().layout(meta.dtype)

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return self._values().take(x, self.positions.to(x.device), generator)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        positions = self.positions.to(payload[0].device)
        return self._values().put(payload, positions, meta, generator)
