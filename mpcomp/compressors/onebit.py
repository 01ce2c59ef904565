"""One bit an element and two numbers a column: the code of 1-bit SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors import bits as bitpack
from mpcomp.compressors.base import Compressor
from mpcomp.compressors.lowrank import matrix_shape
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["OneBitColumns"]


@dataclass(frozen=True)
class OneBitColumns(Compressor):
    """Signs, decoded as two means of each column. Spec ``onebit``.

    Of a matrix [rows, columns], elements that are not negative arrive as the mean of those of their
    column, negative ones as the mean of theirs; the sign of zero is +, and the mean of no elements
    is 0. Wire: one bit an element and two fp32 numbers a column.

    A tensor of other shape is the matrix [elements / last_dim, last_dim] in memory order
    (`lowrank.matrix_shape`), so a vector has a column for each element and is better sent dense.

    * Source: 1-bit SGD (Seide et al., Interspeech 2014).
    * Theory: a contraction, as the two means are the nearest two numbers to a column's two sides,
      and biased: for `ErrorFeedback`, and `OneBit` between replicas.
    """

    spec: ClassVar[str] = "onebit"
    by_matrix = True

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        _rows, columns = matrix_shape(meta)
        return (
            TensorMeta((2, columns), torch.float32),
            TensorMeta((bitpack.packed_bytes(meta.numel, 1),), torch.uint8),
        )

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        meta = TensorMeta.of(x)
        matrix = meta.flatten(x).reshape(matrix_shape(meta)).to(torch.float32)
        positive = matrix >= 0
        return (_two_means(matrix, positive), bitpack.pack_bools(positive.reshape(-1)))

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        means, packed = payload
        positive = bitpack.unpack_bools(packed, meta.numel).reshape(matrix_shape(meta))
        up, down = means.to(meta.dtype)
        # As exact as torch.where, which is slow where a row serves all rows.
        return meta.unflatten((positive * up).add_(~positive * down))


def _two_means(matrix: Tensor, positive: Tensor) -> Tensor:
    """Means of a column's elements that are ``positive``, and of the others: fp32 [2, columns]."""
    if matrix.numel() == 0:
        return matrix.new_zeros(2, matrix.shape[1])
    # Scaled by the largest magnitude first: the sums may overflow fp32.
    largest = matrix.abs().amax(dim=0)
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    scaled = matrix / unit
    sums = torch.stack([scaled.clamp(min=0).sum(dim=0), scaled.clamp(max=0).sum(dim=0)])
    num_positive = positive.sum(dim=0, dtype=torch.int32)
    counts = torch.stack([num_positive, matrix.shape[0] - num_positive])
    return (sums / counts.clamp(min=1)).clamp(-1, 1) * unit
