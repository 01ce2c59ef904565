"""Same-sign quantization: elements of one sign are selected, and one number says them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, SentPositions, check_keep
from mpcomp.compressors.threshold import SampledTopK, count_set
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["MeanValue", "SameSign"]

_SIGNS = ("larger", "positive", "negative")
_FINDER = SampledTopK(1.0)  # finds any number of the largest, exactly


@dataclass(frozen=True)
class MeanValue(Compressor):
    """One fp32 number: all elements become their mean. Spec ``meanvalue``.

    The value compressor of `SameSign`. Means of mixed signs cancel, so behind another selection
    it says little.

    * Source: the values of RedSync's quantization (Fang et al., J. Parallel Distrib. Comput. 2019).
    * Theory: a contraction, ||x - C(x)||^2 = ||x||^2 - n mean^2, and biased.
    """

    spec: ClassVar[str] = "meanvalue"
    summable = True

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return (TensorMeta((1,), torch.float32),)

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return (_mean(x).reshape(1),)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        flat = payload[0].to(meta.dtype).expand(meta.numel).contiguous()
        return meta.unflatten(flat)


@dataclass(frozen=True)
class SameSign(SentPositions):
    """The largest elements of one sign, all sent as their mean. Spec ``samesign:0.001``.

    Indices and one fp32 number for the tensor. With sign s, the k = max(1, ceil(keep n - 1e-9))
    elements of largest s x are selected, the lowest index first among equal ones, and each arrives
    as the mean of the k. Where fewer than k elements have that sign, the smallest magnitudes of the
    other one fill up.

    Which sign: published, positive and negative take turns. A compressor remembers nothing, so
    it is told; a method that counts steps can give it "positive" and "negative" by turns, whose
    messages are alike. "larger" is the variant in the author's code: the sign whose k elements
    have the mean of larger magnitude.

    * Source: RedSync's quantization (Fang et al., J. Parallel Distrib. Comput. 2019).
    * Theory: a contraction, ||x - C(x)||^2 = ||x||^2 - k mean^2, and biased: for `ErrorFeedback`.

    Args:
        keep: fraction of the elements to send, in (0, 1].
        sign: "larger", "positive" or "negative".

    Raises:
        ValueError: a setting outside those.
    """

    keep: float
    sign: str = "larger"
    spec: ClassVar[str] = "samesign"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.sign not in _SIGNS:
            raise ValueError(f"sign={self.sign!r}: SameSign knows {', '.join(_SIGNS)}")

    @property
    def values(self) -> MeanValue:  # type: ignore[override]
        """The value compressor: one mean."""
        return MeanValue()

    def choose(self, flat: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
        if k in (0, flat.numel()):
            return torch.arange(k, device=flat.device)
        if self.sign == "positive":
            return _largest_signed(flat, k)
        if self.sign == "negative":
            return _largest_signed(-flat, k)
        both = [_largest_signed(signed, k) for signed in (flat, -flat)]
        up, down = (_mean(flat.index_select(0, positions)) for positions in both)
        return both[0] if bool(up >= -down) else both[1]


def _largest_signed(flat: Tensor, k: int) -> Tensor:
    """Ascending positions of the ``k`` largest elements, by value; ties to the lowest index."""
    above = flat.clamp(min=0)
    if count_set(above > 0) >= k:
        return _FINDER.choose(above, k)
    # The rare case: zeros and elements of the other sign have to fill up.
    order = flat.sort(descending=True, stable=True).indices
    return order[:k].sort().values


def _mean(x: Tensor) -> Tensor:
    """The mean as fp32, 0 of nothing."""
    x = x.to(torch.float32)
    if x.numel() == 0:
        return x.new_zeros(())
    # Scaled by the largest magnitude first: the sum may overflow fp32.
    largest = x.abs().amax()
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    return (x / unit).mean().clamp(-1, 1) * unit
