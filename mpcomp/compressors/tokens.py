"""Tensors as vectors along their channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mpcomp.core.tensor_meta import TensorMeta

__all__ = ["Tokens"]


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
            x = x.movedim(1, -1)
        return x.reshape(self.num, self.width).to(torch.float32).contiguous()

    def split(self, x: Tensor) -> Tensor:
        """Finite `vectors`, in memory of their own."""
        return self.vectors(x).nan_to_num()

    def join(self, vectors: Tensor) -> Tensor:
        """The inverse: a tensor like ``meta``."""
        shape = self.meta.shape
        if len(shape) < 4:
            return vectors.reshape(shape)
        memory = torch.channels_last if self.meta.channels_last else torch.contiguous_format
        moved = vectors.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
        return moved.contiguous(memory_format=memory)
