"""A tensor without its data: what both ends of a link know of it before any data moves.

That is its shape, dtype and memory order, and which of its positions are only padding.

Compressors and feedback work on a tensor's elements in *memory order*. For a
contiguous tensor that is the usual order; for a channels-last image it is
N, H, W, C. Going by memory order makes flattening free in both cases and gives
the receiver a tensor with the strides the model had produced, which is what
keeps an uncompressed pipeline bitwise equal to the plain model.

A batch of a language model of transformers holds sequences of unequal lengths; its attention mask
says which of the positions count. In a model of one's own a mask of that name may mean anything, in
torch's attention the opposite, and says nothing here. At a cut that compresses, positions that do
not count are exact zeros, for the method and for the stage behind it, and what a feedback method
keeps there stays as it is: the same place holds another sample's token in the next batch. Both ends
hold the batch, so that none of this is sent.

What is uncompressed is left alone. A tensor has positions if it is [rows, positions, features] (or
has more dimensions) like the mask; any other crosses as if nothing were padded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

__all__ = [
    "WHOLE_NUMBERS",
    "TensorMeta",
    "cast_saturating",
    "keep_padded",
    "padded_positions",
    "valid_positions",
    "zero_padding",
]

#: Types in which a tensor's bits are whole numbers, by bytes of an element.
WHOLE_NUMBERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and memory order of a dense tensor, without its data.

    Attributes:
        shape: sizes, the first of which counts the rows (samples).
        dtype: element type.
        channels_last: whether a 4-d tensor lies in memory as [N, H, W, C].
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    @staticmethod
    def of(x: Tensor) -> TensorMeta:
        """The description of ``x``: one object for all tensors alike."""
        channels_last = (
            x.dim() == 4
            and not x.is_contiguous()
            and x.is_contiguous(memory_format=torch.channels_last)
        )
        return _shared(tuple(x.shape), x.dtype, channels_last)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, without what has been computed from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of the tensor itself, uncompressed, in its own dtype."""
        return self.numel * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Number of rows (samples): the first size, or one for a 0-d tensor."""
        return self.shape[0] if self.shape else 1

    @cached_property
    def row_numel(self) -> int:
        """Elements in one row (sample)."""
        return math.prod(self.shape[1:])

    def with_rows(self, num_rows: int) -> TensorMeta:
        """The same per-sample shape with another number of rows."""
        return replace(self, shape=(num_rows, *self.shape[1:])) if self.shape else self

    def with_dtype(self, dtype: torch.dtype) -> TensorMeta:
        """The same shape in another dtype."""
        return replace(self, dtype=dtype)

    def arrange(self, x: Tensor) -> Tensor:
        """``x`` in this memory order; no copy if it is."""
        memory = torch.channels_last if self.channels_last else torch.contiguous_format
        return x.contiguous(memory_format=memory)

    def flatten(self, x: Tensor) -> Tensor:
        """``x`` as contiguous [rows, elements of a row] in memory order; no copy if possible."""
        if self.channels_last:
            x = x.permute(0, 2, 3, 1)
        # Contiguous, as a strided matrix is its own reshape.
        return x.reshape(self.num_rows, self.row_numel).contiguous()

    def unflatten(self, flat: Tensor) -> Tensor:
        """The inverse of `flatten`: a view of ``flat`` with this shape and memory order."""
        if self.channels_last:
            n, c, h, w = self.shape
            return flat.reshape(n, h, w, c).permute(0, 3, 1, 2)
        return flat.reshape(self.shape)

    @property
    def last_dim(self) -> int:
        """Size of the innermost dimension in memory order (one for a 0-d tensor)."""
        if self.channels_last:
            return self.shape[1]
        return self.shape[-1] if self.shape else 1


@functools.lru_cache(4096)
def _shared(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> TensorMeta:
    """One object for equal descriptions, so that what follows from them is computed once."""
    return TensorMeta(shape, dtype, channels_last)


def cast_saturating(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 ``x`` in ``dtype``, its finite values kept finite; fp16 ends at 65504."""
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


# -- positions that are only padding ---------------------------------------------------------------


def valid_positions(
    attention_mask: Tensor | None, sizes: Sequence[int]
) -> tuple[Tensor | None, ...]:
    """Per microbatch which positions count, for `Step.valid`: once a step.

    On an accelerator this waits for the mask.

    Args:
        attention_mask: [b, s] of any dtype, 0 where a position is padded. None, or a mask of
            another number of dimensions, says nothing about positions.
        sizes: rows of the microbatches.

    Returns:
        bool [rows, s] for each microbatch, on the mask's device, or None where all positions
        count; nothing at all without a mask [b, s].
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return ()
    parts = torch.split(attention_mask != 0, list(sizes))  # the rows of `microbatch.scatter`
    full = torch.stack([part.all() for part in parts]).tolist()
    return tuple(None if all_count else part for part, all_count in zip(parts, full, strict=True))


def padded_positions(valid: Tensor | None, meta: TensorMeta, device: torch.device) -> Tensor | None:
    """Mask of a tensor's padded positions: bool [rows, positions, 1] on ``device``.

    Args:
        valid: bool [rows, positions], or None where all positions count.
        meta: the tensor. It may have the last of these positions alone, as a decoder's before the
            head, whose encoder's stand first.
        device: where it is.

    Returns:
        None where nothing is padded, or the tensor has no such positions: [rows, features] could
        be as wide as a sequence is long, and a channels-last image is not laid out by its dim 1.
    """
    if valid is None or len(meta.shape) < 3 or meta.channels_last:
        return None
    rows, positions = meta.shape[:2]
    all_positions = valid.shape[1]
    if rows != valid.shape[0] or not (positions == all_positions or 1 < positions < all_positions):
        return None
    return ~valid.to(device)[:, all_positions - positions :, None]


def zero_padding(x: Tensor, padded: Tensor | None) -> Tensor:
    """A copy of ``x`` with zeros where it is padded; ``x`` itself if ``padded`` is None.

    Args:
        x: [rows, positions, ...], or flattened [rows, elements].
        padded: of `padded_positions`.
    """
    if padded is None:
        return x
    return x.reshape(*padded.shape[:2], -1).masked_fill(padded, 0).reshape(x.shape)


def keep_padded(rows: Tensor, former: Tensor, padded: Tensor | None) -> Tensor:
    """State ``rows`` [rows, elements] with ``former`` where it is padded; both stay as they are."""
    if padded is None:
        return rows
    shape = (*padded.shape[:2], -1)
    kept = torch.where(padded, former.reshape(shape), rows.reshape(shape))
    return kept.reshape(rows.shape)
