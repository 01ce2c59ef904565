"""One bit an element: its sign, with the mean magnitude as the common scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors import bits as bitpack
from mpcomp.compressors.base import Compressor
from mpcomp.compressors.groups import Grouping, divisor, largest_of
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["Sign"]


@dataclass(frozen=True)
class Sign(Compressor):
    """sign(x) times mean |x| of the elements that share a scale. Spec ``sign``, ``sign:sample``.

    The sign of zero is +.

    * Source: Karimireddy et al., ICML 2019 (EF-signSGD).
    * Theory: a contraction, ||x - C(x)||^2 = (1 - ||x||_1^2 / (n ||x||_2^2)) ||x||^2 of each group,
      and biased: for `ErrorFeedback`, without which signs may not converge (same paper).

    Args:
        scale: "tensor", "sample", "channel", "token" (a row of the innermost dimension in memory)
            or a number of consecutive elements; fp32 scales.
    """

    scale: str | int = "tensor"
    spec: ClassVar[str] = "sign"
    draws = False

    def __post_init__(self) -> None:
        Grouping.check(self.scale)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        grouping = Grouping.of(meta, self.scale)
        packed = bitpack.packed_bytes(grouping.row_numel, 1)
        return (
            TensorMeta((grouping.num_groups,), torch.float32),
            TensorMeta((grouping.num_rows, packed), torch.uint8),
        )

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        grouping = Grouping.of(TensorMeta.of(x), self.scale)
        groups = grouping.split(x)
        # Scaled by the largest magnitude first: the sum of magnitudes may overflow fp32.
        magnitudes = grouping.clear_padding(groups.abs())
        unit = divisor(largest_of(magnitudes))
        mean = magnitudes.div_(unit[:, None]).sum(dim=1) / grouping.counts(x.device) * unit
        return (mean, bitpack.pack(grouping.rows(groups >= 0).to(torch.uint8), 1))

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        scales, packed = payload
        grouping = Grouping.of(meta, self.scale)
        positive = grouping.groups(bitpack.unpack(packed, 1, grouping.row_numel)).view(torch.bool)
        scales = scales[:, None].to(meta.dtype)
        return grouping.join(torch.where(positive, scales, -scales))
