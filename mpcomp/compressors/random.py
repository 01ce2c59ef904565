"""Sending elements chosen at random: both ends draw the choice, only values travel."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Selecting, ValuesAt, check_keep, check_values
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["RandomBlock", "RandomK"]


@dataclass(frozen=True)
class _SharedChoice(Selecting):
    """A selection that depends on the shared generator alone, never on the data."""

    keep: float
    unbiased: bool = False
    values: Compressor | None = None
    spec_inner: ClassVar[str | None] = "values"
    shares_choice = True

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_values(self.values)

    @property
    def is_unbiased(self) -> bool:  # type: ignore[override]
        """Whether values are scaled up by n / k; then but for the rounding of what codes them."""
        return self.unbiased

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        """Unless scaled up: then E||x - C(x)||^2 = (n/k - 1) ||x||^2."""
        return not self.unbiased

    @property
    def summable(self) -> bool:  # type: ignore[override]
        """All replicas choose the same elements, so their payloads may be added."""
        return self.values is None or self.values.summable

    @abstractmethod
    def _draw(self, n: int, k: int, generator: torch.Generator) -> Tensor:
        """``k`` of ``n`` positions, ascending, on the CPU."""

    def draw(
        self, n: int, k: int, generator: torch.Generator | None, device: torch.device
    ) -> Tensor:
        """``k`` of ``n`` positions, ascending; draws nothing where all are kept."""
        assert generator is not None, "the choice is drawn from a generator both ends share"
        if k == n:
            return torch.arange(k, device=device)
        return self._draw(n, k, generator).to(device)

    def choose(self, flat: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
        return self.draw(flat.numel(), k, generator, flat.device)

    def _values(self, meta: TensorMeta) -> ValuesAt:
        return ValuesAt(1, self.num_kept(meta.numel), self.values)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return self._values(meta).layout(meta.dtype)

    def take(
        self, x: Tensor, positions: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        return self._values(TensorMeta.of(x)).take(x, positions, generator)

    def indices(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        return self.draw(meta.numel, self.num_kept(meta.numel), generator, payload[0].device)

    def decoded(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        values = self._values(meta).decode(payload, meta.dtype)
        if not (self.unbiased and meta.numel):
            return values
        scaled = values * (meta.numel / values.numel())
        # Of the largest the multiple is the largest: what was finite stays so, and nothing else.
        largest = torch.full_like(values, torch.finfo(values.dtype).max).copysign(values)
        return torch.where(scaled.isinf() & values.isfinite(), largest, scaled)


@dataclass(frozen=True)
class RandomK(_SharedChoice):
    """Keeps k = ceil(keep n) elements of the tensor, uniformly at random. Spec ``randomk:0.1``.

    Positions are drawn by both ends from equal generators, so only values travel.

    * Source: Stich et al., NeurIPS 2018.
    * Theory: a contraction in expectation, E||x - C(x)||^2 = (1 - k/n) ||x||^2, and biased: for
      `ErrorFeedback`. With ``unbiased=True`` E C(x) = x, at E||x - C(x)||^2 = (n/k - 1) ||x||^2:
      for SGD without a memory, whose rate falls with that variance.

    Args:
        keep: fraction of the elements to send, in (0, 1].
        unbiased: scale the decoded values by n / k, up to the largest finite one. Not inside error
            feedback, which diverges.
        values: compressor of the values sent.

    Raises:
        ValueError: keep outside (0, 1], or a selecting value compressor.
        TypeError: values is not a compressor.
    """

    spec: ClassVar[str] = "randomk"

    def _draw(self, n: int, k: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(n, generator=generator)[:k].sort().values


@dataclass(frozen=True)
class RandomBlock(_SharedChoice):
    """Keeps ``k`` neighbouring elements from a random start. Spec ``randomblock:0.1``.

    A block that runs over the end goes on at the beginning. Reading and writing runs of memory
    makes it the cheapest selection. Arguments and errors as for `RandomK`.

    * Source: Vogels et al., NeurIPS 2019, as a rival of PowerSGD; the gradient compressor of ConEF
      (Li et al., 2023).
    * Theory: as of `RandomK`, since each element is in the block with probability k/n.
    """

    spec: ClassVar[str] = "randomblock"

    def _draw(self, n: int, k: int, generator: torch.Generator) -> Tensor:
        start = int(torch.randint(n, (), generator=generator))
        wrapped = max(0, start + k - n)
        return torch.cat([torch.arange(wrapped), torch.arange(start, start + k - wrapped)])
