"""Two thin factors instead of a matrix: one or more power iterations from a random start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.core.context import TensorMeta
from mpcomp.core.randomness import uniform
from mpcomp.core.wire import Payload

__all__ = ["LowRank", "matrix_shape", "orthonormal_", "times", "transposed_times"]


def matrix_shape(meta: TensorMeta) -> tuple[int, int]:
    """Rows and columns of a tensor's matrix: its innermost dimension in memory, by the others."""
    return (meta.numel // meta.last_dim, meta.last_dim) if meta.numel else (0, 0)


@dataclass(frozen=True)
class LowRank(Compressor):
    """A rank-r approximation, M ~ P Q^T with orthonormal P. Spec ``lowrank:4``.

    P = orthonormal(M Q), Q = M^T P from a random Q, and again ``iterations`` times. More iterations
    cost time alone. Between replicas `PowerSGD` keeps Q and sums the factors.

    A tensor of other shape is the matrix [elements / last_dim, last_dim] in memory order
    (`matrix_shape`): [batch * sequence, hidden] of a language model, pixels by channels
    of a channels-last image, [batch * channels * height, width] of another one. Vectors are
    better sent dense. Both factors travel in the tensor's dtype; the computation is fp32. What
    arrives is the sum of the columns' outer products, added up one after the other (`outer_sum`).

    * Source: the subspace iteration of PowerSGD (Vogels et al., NeurIPS 2019, algorithm 1) without
      its memory, as Optimus-CC (Song et al., ASPLOS 2023) sends the gradients of a cut.
    * Theory: P P^T M is a projection, so a contraction inside any feedback, and biased; exact up to
      rounding where r reaches the rank.

    Args:
        rank: columns of the factors, at least 1; at the most the matrix's smaller side is used.
        iterations: power iterations after the first, 0 or more.

    Raises:
        ValueError: a setting outside those.
    """

    rank: int
    iterations: int = 1
    spec: ClassVar[str] = "lowrank"
    by_matrix = True
    multiplies = True

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank={self.rank}: the factors have 1 column or more (lowrank:4)")
        if type(self.iterations) is not int or self.iterations < 0:
            raise ValueError(f"iterations={self.iterations}: power iterations are 0 or more")

    def _rank(self, meta: TensorMeta) -> int:
        return min(self.rank, *matrix_shape(meta))

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        rank = self._rank(meta)
        return tuple(TensorMeta((side, rank), meta.dtype) for side in matrix_shape(meta))

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        assert generator is not None, "the first factor is drawn from a generator"
        meta = TensorMeta.of(x)
        matrix = meta.flatten(x).reshape(matrix_shape(meta)).to(torch.float32)
        columns, rank = matrix.shape[1], self._rank(meta)
        q = uniform(generator, columns * rank, x.device).reshape(columns, rank) - 0.5
        if meta.numel == 0:
            return (matrix.new_zeros((0, 0), dtype=x.dtype), q.to(x.dtype))
        # Scaled by the largest magnitude: products may overflow or vanish.
        largest = matrix.abs().amax()
        matrix = matrix / torch.where(largest > 0, largest, torch.ones_like(largest))
        with torch.autocast(x.device.type, enabled=False):
            for _ in range(1 + self.iterations):
                p = orthonormal_(times(matrix, q))
                q = transposed_times(matrix, p)
        # P is of order 1 and Q of the order of the norm. A power of two shared out between them
        # makes both about as large, so that both fit a narrow dtype.
        size = largest.log2() + q.abs().amax().log2()
        unit = torch.where(size.isfinite(), size / 2, torch.zeros_like(size)).round().exp2()
        limit = min(torch.finfo(x.dtype).max, torch.finfo(torch.float32).max)
        factors = (p * unit, q * (largest / unit))
        return tuple(f.clamp(-limit, limit).to(x.dtype).contiguous() for f in factors)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        p, q = (factor.to(torch.float32) for factor in payload)
        if meta.numel == 0:
            return meta.unflatten(p.new_zeros(0, dtype=meta.dtype))
        units = [_power_above(factor) for factor in (p, q)]
        product = outer_sum(p / units[0], q / units[1])  # of numbers up to 2: no inf - inf
        product.mul_(units[0]).mul_(units[1])
        limit = min(torch.finfo(meta.dtype).max, torch.finfo(torch.float32).max)
        return meta.unflatten(product.clamp_(-limit, limit).to(meta.dtype))


def outer_sum(p: Tensor, q: Tensor) -> Tensor:
    """P Q^T, [rows, columns] in fp32: column by column, each product and each sum rounded.

    Not a matrix product, whose order of additions depends on the processor: what both ends of a
    link remember advances by this, and has to stay equal to the last bit for ever.
    """
    total = p[:, :1] * q[:, :1].T
    for column in range(1, p.shape[1]):
        total += p[:, column, None] * q[None, :, column]
    return total


def times(matrix: Tensor, q: Tensor) -> Tensor:
    """M Q, [rows, r], of a thin Q [columns, r]."""
    return matrix @ q.T.contiguous().T  # CPU libraries are five times as fast by columns


def transposed_times(matrix: Tensor, p: Tensor) -> Tensor:
    """M^T P, [columns, r], of a thin P [rows, r]; its memory order is by columns."""
    return (p.T @ matrix).T  # twenty times as fast as matrix.T @ p on a CPU


def orthonormal_(matrix: Tensor) -> Tensor:
    """Replaces the columns of fp32 [rows, r], r <= rows, by orthonormal ones of the same span.

    Householder's QR: orthonormal whatever the columns are. Zero or dependent columns give
    directions of no meaning, orthogonal to the others, not NaN; so a later product with them
    can find a direction again, where zeros would stay zeros for ever.

    Returns:
        ``matrix``.
    """
    assert matrix.shape[0] >= matrix.shape[1], f"{list(matrix.shape)} has no orthonormal columns"
    largest = matrix.abs().amax() if matrix.numel() else matrix.new_zeros(())
    # Scaled, as norms may overflow; and so a copy of its own in memory, as the order of LAPACK's
    # sums may depend on how a matrix lies there.
    fresh = matrix.contiguous() / torch.where(largest > 0, largest, torch.ones_like(largest))
    return matrix.copy_(torch.linalg.qr(fresh, mode="reduced").Q)


def _power_above(x: Tensor) -> Tensor:
    """The power of two above the largest magnitude of fp32 numbers, 0-d; 1 for zeros.

    At most 2^127, which is below fp32's largest. Of integers, as logarithms round by processor.
    """
    exponent = torch.frexp(x.abs().amax()).exponent.to(torch.int32)
    return ((exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)
