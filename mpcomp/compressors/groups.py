"""Groups of elements that share a scale: tensor, sample, channel, token, or runs of n elements."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mpcomp.core.context import TensorMeta

__all__ = ["Grouping", "divisor", "extremes", "largest_of", "scale_dtype"]

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

    def clear_padding(self, groups: Tensor) -> Tensor:
        """Zeroes what fills up the last group, in place, so that it weighs on no sum.

        Args:
            groups: [groups, elements], its own in memory where there is padding.

        Returns:
            ``groups``.
        """
        if self.padding:
            groups[-1, groups.shape[1] - self.padding :] = 0
        return groups

    def counts(self, device: torch.device) -> Tensor:
        """Elements of each group without padding, at least 1 to divide by: fp32 [groups]."""
        counts = torch.full(
            (self.num_groups,), float(self._size), dtype=torch.float32, device=device
        )
        if self.padding:
            counts[-1] -= self.padding
        return counts.clamp_(min=1)

    @cached_property
    def padding(self) -> int:
        """Elements that fill up the last group."""
        return self.num_rows * self.row_numel - self.meta.numel

    @cached_property
    def _size(self) -> int:
        """Elements in a group."""
        return self.num_rows * self.row_numel // max(1, self.num_groups)


def scale_dtype(scope: str | int) -> torch.dtype:
    """fp32 for the one scale of a tensor, bf16 (fp32's range) for the many that are finer."""
    return torch.float32 if scope == "tensor" else torch.bfloat16


def extremes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of each group [groups, elements]; zeros for no elements."""
    if groups.shape[1] == 0:
        zeros = groups.new_zeros(groups.shape[0])
        return zeros, zeros
    if groups.shape[0] == 1:  # over all elements torch reduces in parallel, over a dim it may not
        low, high = groups.aminmax()
        return low.reshape(1), high.reshape(1)
    return groups.amin(dim=1), groups.amax(dim=1)  # twenty times as fast as aminmax(dim=1)


def largest_of(groups: Tensor) -> Tensor:
    """Largest magnitude of each group [groups, elements]; zeros for groups of no elements."""
    low, high = extremes(groups)
    return torch.maximum(-low, high)


def divisor(x: Tensor) -> Tensor:
    """``x`` as fp32 with 1 for 0, which a group of zeros, or of equal elements, has."""
    x = x.to(torch.float32)
    return torch.where(x > 0, x, torch.ones_like(x))
