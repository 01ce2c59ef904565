"""The fixed-point code of AC-SGD, kept as published for comparison with its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors import bits as bitpack
from mpcomp.compressors.base import Compressor
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["FixedPoint"]


@dataclass(frozen=True)
class FixedPoint(Compressor):
    """AC-SGD's b-bit fixed point. Spec ``fixed:4``, ``fixed:4:scale=tensor``.

    s = fp16(max |x|), q = clip(round(2^(b-1) x / (s + 1e-6)), -2^(b-1), 2^(b-1) - 1), decoded as q
    s / 2^(b-1). The code book is asymmetric (the largest value is clipped by a step), so `Quantize`
    is the better choice where parity with AC-SGD is not the point. Scales above 65504 are clamped.

    * Source: Wang et al., NeurIPS 2022, as in the authors' code (AC-SGD).
    * Theory: biased, as it rounds to the nearest, where the theorem of `AQSGD` asks for an unbiased
      code.

    Args:
        bits: 1 to 8.
        scale: "hidden" for one scale per element of the last dimension in the microbatch (the
            authors' setting for [batch, sequence, hidden]), "tensor" for one in all.

    Raises:
        ValueError: a setting outside those.
    """

    bits: int
    scale: str = "hidden"
    spec: ClassVar[str] = "fixed"
    draws = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits}: FixedPoint packs 1 to 8 bits")
        if self.scale not in ("hidden", "tensor"):
            raise ValueError(f"scale={self.scale!r}: FixedPoint knows 'hidden' and 'tensor'")

    def _columns(self, meta: TensorMeta) -> int:
        return max(1, meta.last_dim) if self.scale == "hidden" else 1

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return (
            TensorMeta((self._columns(meta),), torch.float16),
            TensorMeta((bitpack.packed_bytes(meta.numel, self.bits),), torch.uint8),
        )

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        meta = TensorMeta.of(x)
        columns = self._columns(meta)
        flat = meta.flatten(x).to(torch.float32).reshape(-1, columns)
        largest = flat.abs().amax(dim=0) if flat.shape[0] else flat.new_zeros(columns)
        scale = largest.clamp(max=torch.finfo(torch.float16).max).to(torch.float16)
        half = 1 << (self.bits - 1)
        q = (flat * half / (scale.to(torch.float32) + 1e-6)).round_().clamp_(-half, half - 1)
        codes = (q.nan_to_num_(nan=0.0) + half).to(torch.uint8)
        return (scale, bitpack.pack(codes.reshape(1, -1), self.bits)[0])

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        scale, packed = payload
        half = 1 << (self.bits - 1)
        codes = bitpack.unpack(packed.reshape(1, -1), self.bits, meta.numel)[0]
        q = codes.reshape(-1, self._columns(meta)).to(torch.float32).sub_(half)
        return meta.unflatten(q.mul_(scale.to(torch.float32)).div_(half).to(meta.dtype))
