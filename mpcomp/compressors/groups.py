"""Groups of elements that share a scale: tensor, sample, channel, token, or runs of n elements."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mpcomp.core.tensor_meta import TensorMeta

__all__ = ["Grouping"]

_SCOPES = ("tensor", "sample", "channel", "token")


@dataclass(frozen=True)
class Grouping:
    """A rearrangement of a tensor into groups, and of per-element codes into packed rows.

    A "token" is a row of the innermost dimension in memory: the hidden vector of a token in
    [batch, sequence, hidden], the channels of a pixel in a channels-last image. Tensors of fewer
    than two dimensions are one group, unless groups are runs of a number of elements.

    Attributes:
        meta: the tensor.
        num_groups: how many scales there are.
        num_rows: rows that are packed apart, so that each starts on a byte.
        row_numel: elements in such a row, padding of the last group included.
    """

    meta: TensorMeta
    scope: str | int
    num_groups: int
    num_rows: int
    row_numel: int

    @staticmethod
    def check(scope: str | int) -> None:
        """Raises ValueError unless ``scope`` is one that `of` takes."""
        if isinstance(scope, bool) or not (
            scope in _SCOPES or (isinstance(scope, int) and scope >= 1)
        ):
            raise ValueError(
                f"scale={scope!r}: a scale is shared by 'tensor', 'sample', 'channel', 'token' "
                "or a number of elements (such as 128)"
            )

    @classmethod
    @functools.lru_cache(4096)
    def of(cls, meta: TensorMeta, scope: str | int) -> Grouping:
        """The grouping of a tensor like ``meta``."""
        numel = meta.numel
        if scope == "tensor" or (isinstance(scope, str) and len(meta.shape) < 2):
            return cls(meta, "tensor", 1, 1, numel)
        if scope == "sample":
            return cls(meta, scope, meta.num_rows, meta.num_rows, meta.row_numel)
        if scope == "channel":
            channels = meta.shape[1 if len(meta.shape) >= 4 else -1]
            return cls(meta, scope, channels, 1, numel)
        if scope == "token":
            return cls(meta, scope, numel // max(1, meta.last_dim), 1, numel)
        assert isinstance(scope, int)
        groups = -(-numel // scope)
        return cls(meta, scope, groups, 1, groups * scope)

    def split(self, x: Tensor) -> Tensor:
        """``x`` as fp32 [groups, elements]; the last run is padded with its own last element."""
        if self.scope == "channel":
            dim = 1 if x.dim() >= 4 else -1
            return x.movedim(dim, 0).reshape(self.num_groups, self._size).to(torch.float32)
        flat = self.meta.flatten(x).to(torch.float32)
        if isinstance(self.scope, int):
            flat = flat.reshape(-1)
            padding = self.row_numel - flat.numel()
            if padding:
                flat = torch.cat([flat, flat[-1:].expand(padding)])
        return flat.reshape(self.num_groups, self._size)

    def join(self, groups: Tensor) -> Tensor:
        """Inverse of `split`: [groups, elements] -> a tensor like ``meta``."""
        if self.scope == "channel":
            dim = 1 if len(self.meta.shape) >= 4 else len(self.meta.shape) - 1
            sizes = list(self.meta.shape)
            first = groups.reshape([sizes.pop(dim), *sizes]).movedim(0, dim)
            memory = torch.channels_last if self.meta.channels_last else torch.contiguous_format
            return first.contiguous(memory_format=memory)
        return self.meta.unflatten(groups.reshape(-1)[: self.meta.numel])

    def rows(self, groups: Tensor) -> Tensor:
        """Per-element codes [groups, elements] as the rows that are packed apart."""
        return groups.reshape(self.num_rows, self.row_numel)

    def groups(self, rows: Tensor) -> Tensor:
        """Inverse of `rows`."""
        return rows.reshape(self.num_groups, self._size)

    @cached_property
    def padding(self) -> int:
        """Elements that fill up the last group."""
        return self.num_rows * self.row_numel - self.meta.numel

    @cached_property
    def _size(self) -> int:
        """Elements in a group."""
        return self.num_rows * self.row_numel // max(1, self.num_groups)
