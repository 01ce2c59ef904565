"""Two-level selection: the second, stricter choice is made among the survivors of the first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Selecting, check_keep, num_kept
from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import of_inner, shown
from mpcomp.core.wire import Payload

__all__ = ["MultiLevel", "levels"]


def levels(
    first: Selecting, keep: float, flat: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Both choices of a two-level selection, in one pass over the tensor.

    Multi-level compression of GraVAC (Tyagi & Swany, IEEE CLOUD 2023): X1 = C(X), X2 = C(X1). The
    number of the second follows from the tensor's, never from the first one's, so for an exact
    top-k both are the direct choices.

    Args:
        first: the method, with the first level's ``keep``.
        keep: fraction of the tensor's elements that the second level leaves, at most first.keep.
        flat: the elements [n].
        generator: for methods that draw; the second draw follows the first.

    Returns:
        Ascending int64 positions in ``flat`` of the first and of the second level.
    """
    n = flat.numel()
    return _levels(first, num_kept(keep, n), flat, generator)


def _levels(
    first: Selecting, k: int, flat: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    survivors = first.choose(flat, max(k, first.num_kept(flat.numel())), generator)
    among = first.choose(flat.index_select(0, survivors), k, generator)
    return survivors, survivors.index_select(0, among)


@dataclass(frozen=True)
class MultiLevel(Selecting):
    """``first`` over the tensor, then again among what it kept. Spec ``multilevel:0.001+topk:0.1``.

    C2(C1(x)); sends ``keep`` of the tensor's elements. Equal to the direct choice, ties included,
    for exact top-k (`TopK`, `SampledTopK`, `RedSyncTopK`), in distribution for `RandomK`; a block
    within a block starts less often near a tensor's ends. Cheaper where a search over all elements
    is dear and both levels are wanted, as GraVAC wants them (`levels`).

    * Source: multi-level compression of GraVAC (Tyagi & Swany, IEEE CLOUD 2023).
    * Theory: that of ``first``, at the smaller fraction.

    Args:
        first: the method and its first level; it selects over the whole tensor here, whatever
            its scope. Its value compressor codes what is sent.
        keep: fraction of the tensor's elements to send, in (0, first.keep].

    Raises:
        ValueError: keep outside that.
        TypeError: first does not select, or has two levels itself.
    """

    first: Selecting
    keep: float
    spec: ClassVar[str] = "multilevel"
    spec_inner: ClassVar[str | None] = "first"

    def __post_init__(self) -> None:
        if not isinstance(self.first, Selecting) or isinstance(self.first, MultiLevel):
            raise TypeError(
                f"first={shown(self.first)}: two levels of a selecting compressor such as TopK(0.1)"
            )
        check_keep(self.keep)
        if self.keep > self.first.keep:
            raise ValueError(
                f"keep={self.keep} above the first level's {self.first.keep}: the second level "
                "chooses among what the first one kept"
            )

    summable = of_inner("summable", "first")
    shares_choice = of_inner("shares_choice", "first")
    values = of_inner("values", "first")
    is_unbiased = of_inner("is_unbiased", "first")
    contractive = of_inner("contractive", "first")

    @property
    def unbiased(self) -> bool:
        """Whether the method scales what it decodes up, which feedback refuses."""
        return bool(getattr(self.first, "unbiased", False))

    @property
    def _direct(self) -> Selecting:
        """The method in one level, which has the same messages."""
        return self.first.over_tensor().with_keep(self.keep)

    def with_keep(self, keep: float) -> MultiLevel:
        """The same method with another second level; the first is widened where it must be."""
        first = self.first if keep <= self.first.keep else self.first.with_keep(keep)
        return dataclasses.replace(self, first=first, keep=keep)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return self._direct.layout(meta)

    def choose(self, flat: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
        return _levels(self.first, k, flat, generator)[1]

    def take(
        self, x: Tensor, positions: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        return self._direct.take(x, positions, generator)

    def indices(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        if not self.shares_choice:
            return self._direct.indices(payload, meta, generator)
        # A shared choice looks at the number of elements alone.
        elements = torch.zeros((), dtype=torch.float32, device=payload[0].device).expand(meta.numel)
        return self.choose(elements, self.num_kept(meta.numel), generator)

    def decoded(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        return self._direct.decoded(payload, meta, generator)
