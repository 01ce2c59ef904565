"""Uniform quantization to 1-8 bits, with a scale for the tensor, a sample, channel, token or group.

Elements are rearranged into groups [G, n] that share a scale; each group is coded as

    q = clip(round((x - low) / step), 0, levels),    x^ = low + q step       ("minmax")
    q = clip(round(x / step + zero), 0, levels),     x^ = (q - zero) step    ("maxabs")

``minmax`` is the operator of Rudakov et al. (2^b levels between the smallest and the largest
value, both included). ``maxabs`` needs one number a group. Its code book is symmetric: at up to
3 bits it has 2^b levels and no zero, which at so few levels is the smaller error; above, 2^b - 1
levels of which zero is one, so that the zeros of a ReLU stay zero.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors import bits as bitpack
from mpcomp.compressors.base import Compressor, check_cf
from mpcomp.compressors.groups import Grouping, divisor, extremes, largest_of, scale_dtype
from mpcomp.core.context import TensorMeta
from mpcomp.core.kernels import kernel
from mpcomp.core.randomness import uniform
from mpcomp.core.wire import Payload

__all__ = ["Quantize", "bit_ladder", "bits_of"]

_MODES = ("minmax", "maxabs")
_ROUNDINGS = ("nearest", "stochastic")
# Larger elements are clipped: up to here, range and step stay finite in fp32 and bf16.
_LIMIT = torch.finfo(torch.float32).max / 4


@dataclass(frozen=True)
class Quantize(Compressor):
    """Uniform b-bit quantization. Spec ``quant:4``, ``quant:4:scale=128:rounding=stochastic``.

    The error of an element is at most step / 2 with nearest rounding and below one step with
    stochastic rounding, which is unbiased inside the range; step = (largest - smallest) /
    (2^bits - 1) of the element's group for ``minmax``.

    * Source: Rudakov et al., 2023, section 3 (min-max); Alistarh et al., QSGD, NeurIPS 2017, for
      stochastic rounding.
    * Theory: nearest rounding is biased, and a contraction where a group's step is small against
      its elements, which at 1 or 2 bits it may not be. Stochastic rounding is unbiased inside the
      range, as the theorem of `AQSGD` asks.

    Args:
        bits: 1 to 8.
        scale: what shares a scale: "tensor", "sample" (dim 0), "channel" (dim 1 of images and
            other 4-d tensors, else the last), "token" (a row of the innermost dimension in
            memory: a hidden vector, or the channels of a channels-last pixel) or a number of
            consecutive elements.
        mode: "minmax" or "maxabs"; by default minmax where a scale serves a tensor or a sample,
            maxabs for channels, tokens and groups, whose second number would double the overhead.
        rounding: "nearest" (half to even) or "stochastic".

    Scales are fp32 for a tensor, bf16 (fp32's range) for all that is finer.

    Raises:
        ValueError: a setting outside those.
    """

    bits: int
    scale: str | int = "tensor"
    mode: str | None = None
    rounding: str = "nearest"
    spec: ClassVar[str] = "quant"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits}: Quantize packs 1 to 8 bits; for 16 use Cast")
        Grouping.check(self.scale)
        if self.mode not in (None, *_MODES):
            raise ValueError(f"mode={self.mode!r}: Quantize knows {', '.join(_MODES)}")
        if self.rounding not in _ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r}: Quantize knows {', '.join(_ROUNDINGS)}")

    def with_cf(self, cf: float) -> Quantize:
        """The same with floor(32 / cf) bits, 1 to 8: fp32 shrinks at least so far, if it can."""
        return dataclasses.replace(self, bits=bits_of(cf, 1))

    def cf_ladder(self, lowest: float, highest: float) -> tuple[float, ...]:
        return bit_ladder(lowest, highest)

    @property
    def is_unbiased(self) -> bool:  # type: ignore[override]
        """Whether rounding is stochastic, which is unbiased inside the range of the scale."""
        return self.rounding == "stochastic"

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether rounding is stochastic."""
        return self.rounding == "stochastic"

    @property
    def _minmax(self) -> bool:
        if self.mode is None:
            return self.scale in ("tensor", "sample")
        return self.mode == "minmax"

    @property
    def _levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - (1 if self._minmax or self.bits <= 3 else 2)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        grouping = Grouping.of(meta, self.scale)
        scales = TensorMeta((grouping.num_groups,), scale_dtype(self.scale))
        codes = TensorMeta(
            (grouping.num_rows, bitpack.packed_bytes(grouping.row_numel, self.bits)), torch.uint8
        )
        return (scales, scales, codes) if self._minmax else (scales, codes)

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        grouping = Grouping.of(TensorMeta.of(x), self.scale)
        groups = grouping.split(x)
        scales, noise = self._scales(groups), None
        if self.rounding == "stochastic":
            assert generator is not None, "stochastic rounding draws from a generator"
            noise = uniform(generator, groups.numel(), groups.device).view_as(groups)
        rows = grouping.num_rows, grouping.row_numel
        codes = packed(groups, scales, noise, self._levels, self.bits, rows)
        return (*scales, codes)

    def _scales(self, groups: Tensor) -> Payload:
        """The smallest element if it is sent, and the step, of each group."""
        dtype = scale_dtype(self.scale)
        if not self._minmax:
            largest = largest_of(groups).clamp(max=_LIMIT)
            return (_round_up(_divided(largest, self._levels / 2), dtype),)
        low, high = extremes(groups)
        low, high = low.clamp(-_LIMIT, _LIMIT), high.clamp(-_LIMIT, _LIMIT)
        low = _round_down(low, dtype)
        return low, _round_up(_divided(high - low.float(), self._levels), dtype)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        grouping = Grouping.of(meta, self.scale)
        *scales, codes = payload
        shape = grouping.num_groups, grouping.num_rows * grouping.row_numel
        restored = unpacked(codes, tuple(scales), self._levels, self.bits, shape, meta.dtype)
        return grouping.join(restored)


@kernel
def packed(
    groups: Tensor,
    scales: Payload,
    noise: Tensor | None,
    levels: int,
    bits: int,
    rows: tuple[int, int],
) -> Tensor:
    """Codes of elements, packed: uint8 [rows, bytes].

    Args:
        groups: the elements, fp32 [G, n].
        scales: the smallest element if it is sent, and the step, of each group; [G] each.
        noise: in [0, 1), to be added before rounding down, fp32 [G, n]; None rounds to the nearest.
        levels: the largest code.
        bits: of a code.
        rows: number of the rows that are packed apart, and of elements in one.
    """
    *lows, step = scales
    position = groups - lows[0].float()[:, None] if lows else groups
    position = position / divisor(step)[:, None]
    if not lows:
        position += levels / 2
    position = position.round_() if noise is None else position.add_(noise).floor_()
    # NaN (a group that is not finite) must not reach the integer cast undefined.
    codes = position.clamp_(0, levels).nan_to_num_(nan=0.0).to(torch.uint8)
    return bitpack.pack(codes.reshape(rows), bits)


@kernel
def unpacked(
    codes: Tensor,
    scales: Payload,
    levels: int,
    bits: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Elements of packed codes: [G, n] of ``dtype``.

    Args:
        codes: of `packed`.
        scales: likewise.
        levels: likewise.
        bits: likewise.
        shape: number of groups, and of elements in all.
        dtype: of the elements.
    """
    num_groups, numel = shape
    q = bitpack.unpack(codes, bits, numel // max(1, len(codes))).to(torch.float32)
    q = q.reshape(num_groups, numel // max(1, num_groups))
    # Every product and sum is an operation of its own: no fused multiply-add, so that all devices
    # round alike.
    *lows, step = (scale.to(torch.float32)[:, None] for scale in scales)
    if lows:
        q.mul_(step).add_(lows[0])
    else:
        q.sub_(levels / 2).mul_(step)
    if dtype == torch.float16:  # bf16 scales, rounded outwards, lead beyond its range
        q.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return q.to(dtype)


def bits_of(cf: float, fewest: int) -> int:
    """Bits an element for a compression factor: floor(32 / cf) within ``fewest`` to 8."""
    check_cf(cf)
    return min(8, max(fewest, int(32 / cf + 1e-9)))  # 1e-9: as in `num_kept`


def bit_ladder(lowest: float, highest: float) -> tuple[float, ...]:
    """CFs from ``lowest`` to ``highest``, with every number of bits between."""
    inner = (32 / bits for bits in range(8, 0, -1))
    return (lowest, *(step for step in inner if lowest < step < highest), highest)


def _divided(x: Tensor, number: float) -> Tensor:
    """``x / number``, rounded once on all devices: by a plain number CUDA multiplies instead."""
    return x / torch.full((), number, dtype=torch.float32, device=x.device)


def _round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of ``dtype`` that is at least ``x``, so that the range is covered."""
    y = x.to(dtype)
    return torch.where(y.to(x.dtype) < x, torch.nextafter(y, torch.full_like(y, torch.inf)), y)


def _round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    return -_round_up(-x, dtype)
