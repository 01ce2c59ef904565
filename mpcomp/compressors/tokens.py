"""Tensors as vectors along their channels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.core.compiled import compiled
from mpcomp.core.context import WHOLE_NUMBERS, TensorMeta
from mpcomp.core.kernels import kernel
from mpcomp.core.threads import each, slices_of

__all__ = ["Tokens"]

_HEIGHT, _WIDTH = 16, 8  # of a tile, which a processor has in registers


@dataclass(frozen=True)
class Tokens:
    """A tensor as vectors along its channels.

    Attributes:
        meta: of the tensor.
        num: vectors.
        width: elements of one.
    """

    meta: TensorMeta
    num: int
    width: int

    @classmethod
    def of(cls, meta: TensorMeta) -> Tokens:
        """The vectors of a tensor; of fewer than two dimensions it is one."""
        shape = meta.shape
        width = shape[1 if len(shape) >= 4 else -1] if len(shape) >= 2 else meta.numel
        return cls(meta, meta.numel // max(1, width), width)

    @property
    def image(self) -> tuple[int, int] | None:
        """Height and width of images, whose pixels the vectors are, line by line; else None."""
        if len(self.meta.shape) < 4:
            return None
        height, width = self.meta.shape[-2:]
        return height, width

    def vectors(self, x: Tensor) -> Tensor:
        """fp32 [vectors, elements], contiguous."""
        if x.dim() >= 4:
            moved = x.movedim(1, -1)
            x = moved if moved.is_contiguous() else transposed(x.flatten(2).contiguous())
        return x.reshape(self.num, self.width).to(torch.float32).contiguous()

    def split(self, x: Tensor) -> Tensor:
        """Finite `vectors`, in memory of their own."""
        return self.vectors(x).nan_to_num()

    def join(self, vectors: Tensor) -> Tensor:
        """The inverse: a tensor like ``meta``."""
        shape = self.meta.shape
        if len(shape) < 4:
            return vectors.reshape(shape)
        if self.meta.channels_last:
            moved = vectors.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
            return moved.contiguous(memory_format=torch.channels_last)
        of_images = vectors.reshape(shape[0], math.prod(shape[2:]), shape[1]).contiguous()
        return transposed(of_images).reshape(shape)


@kernel
def transposed(x: Tensor) -> Tensor:
    """Matrices [B, M, N], contiguous, as [B, N, M]."""
    return x.transpose(1, 2).contiguous()


@transposed.on("cpu")
def _transposed_on_cpu(x: Tensor) -> Tensor:
    # torch reads one element of a line of the cache, and comes back for the next one too late
    num, rows, columns = x.shape
    numbers = x.view(WHOLE_NUMBERS[x.dtype.itemsize]).numpy()
    out = np.empty((num, columns, rows), numbers.dtype)
    each(lambda some: fill_transposed(numbers[some], out[some]), slices_of(num, rows * columns))
    return torch.from_numpy(out).view(x.dtype)


@compiled
def fill_transposed(x: NDArray[Any], out: NDArray[Any]) -> None:
    """Transposes matrices tile by tile.

    Args:
        x: of any numbers [B, M, N].
        out: takes them, [B, N, M].
    """
    num, num_rows, num_columns = x.shape
    bottom, right = num_rows - num_rows % _HEIGHT, num_columns - num_columns % _WIDTH
    for b in range(num):
        for left in range(0, right, _WIDTH):
            for top in range(0, bottom, _HEIGHT):
                for i in range(_HEIGHT):
                    for j in range(_WIDTH):
                        out[b, left + j, top + i] = x[b, top + i, left + j]
        for j in range(num_columns):  # what is in no whole tile
            for i in range(bottom if j < right else 0, num_rows):
                out[b, j, i] = x[b, i, j]
