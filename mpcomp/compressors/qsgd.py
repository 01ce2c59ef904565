"""QSGD: levels of a group's norm, rounded at random so that the mean is exact."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors import bits as bitpack
from mpcomp.compressors.base import Compressor
from mpcomp.compressors.groups import Grouping, divisor, largest_of
from mpcomp.compressors.quantize import bit_ladder, bits_of
from mpcomp.core.context import TensorMeta
from mpcomp.core.randomness import uniform
from mpcomp.core.wire import Payload

__all__ = ["QSGD"]


@dataclass(frozen=True)
class QSGD(Compressor):
    """s = 2^(bits-1) - 1 levels of the norm of a group. Spec ``qsgd:4``, ``qsgd:4:group=128``.

    x^_i = ||x||_2 sgn(x_i) xi_i / s, where xi_i is s |x_i| / ||x||_2 rounded at random to a
    neighbouring integer so that E x^ = x. Codes are packed to ``bits`` bits instead of Elias's
    code, so that sizes are known beforehand; norms are fp32.

    * Source: Alistarh et al., NeurIPS 2017, eq. 3.
    * Theory: unbiased, E||x - x^||^2 <= min(n / s^2, sqrt(n) / s) ||x||^2 for groups of n elements
      (lemma 3.1): for SGD without a memory. Where that is above 1 it is no contraction, and error
      feedback round it may diverge: use 8 bits or small groups there.

    Args:
        bits: 2 to 8.
        group: number of consecutive elements that share a norm.

    Raises:
        ValueError: a setting outside those.
    """

    bits: int
    group: int = 512
    spec: ClassVar[str] = "qsgd"
    is_unbiased = True

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits}: QSGD packs 2 to 8 bits, one of them the sign")
        if type(self.group) is not int or self.group < 1:
            raise ValueError(f"group={self.group!r}: a norm is shared by a number of elements")

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def with_cf(self, cf: float) -> QSGD:
        """The same with floor(32 / cf) bits, 2 to 8: fp32 shrinks at least so far, if it can."""
        return dataclasses.replace(self, bits=bits_of(cf, 2))

    def cf_ladder(self, lowest: float, highest: float) -> tuple[float, ...]:
        return bit_ladder(lowest, highest)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        grouping = Grouping.of(meta, self.group)
        return (
            TensorMeta((grouping.num_groups,), torch.float32),
            TensorMeta((bitpack.packed_bytes(meta.numel, self.bits),), torch.uint8),
        )

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        assert generator is not None, "stochastic rounding draws from a generator"
        grouping = Grouping.of(TensorMeta.of(x), self.group)
        groups = grouping.clear_padding(grouping.split(x))  # (a copy where there is padding)
        norms = _norms(groups)
        position = groups.abs() / divisor(norms)[:, None] * self._levels
        noise = uniform(generator, position.numel(), position.device)
        level = (position + noise.view_as(position)).floor_().clamp_(max=self._levels)
        # NaN (a group that is not finite) must not reach the integer cast undefined.
        signed = torch.copysign(level, groups).nan_to_num_(nan=0.0)
        codes = (signed + self._levels).to(torch.uint8).reshape(1, -1)
        return (norms, bitpack.pack(codes[:, : x.numel()], self.bits)[0])

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        norms, packed = payload
        codes = bitpack.unpack(packed.reshape(1, -1), self.bits, meta.numel)[0]
        level = codes.to(torch.float32).sub_(self._levels).div_(self._levels)
        scales = norms.repeat_interleave(self.group)[: meta.numel]
        limit = min(torch.finfo(meta.dtype).max, torch.finfo(torch.float32).max)
        # A norm may lie beyond what single elements of a narrow type can be.
        return meta.unflatten(level.mul_(scales).clamp_(-limit, limit).to(meta.dtype))


def _norms(groups: Tensor) -> Tensor:
    """||.||_2 of each group, at the most fp32's largest number: fp32 [groups]."""
    # Scaled by the largest magnitude first: squares may overflow or vanish.
    unit = divisor(largest_of(groups))
    squares = (groups / unit[:, None]).square_().sum(dim=1)
    # The root in fp64: processors differ in the last bits of one in fp32.
    norms = squares.to(torch.float64).sqrt_().to(torch.float32) * unit
    return norms.clamp(max=torch.finfo(torch.float32).max)
