"""Positions of a batch that are only padding, which no compressed message spends anything on.

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

from collections.abc import Sequence

import torch
from torch import Tensor

from mpcomp.core.tensor_meta import TensorMeta

__all__ = ["keep_padded", "padded_positions", "valid_positions", "zero_padding"]


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
        meta: the tensor.
        device: where it is.

    Returns:
        None where nothing is padded, or the tensor has no such positions: [rows, features] could
        be as wide as a sequence is long, and a channels-last image is not laid out by its dim 1.
    """
    if valid is None or len(meta.shape) < 3 or meta.channels_last:
        return None
    if meta.shape[:2] != tuple(valid.shape):
        return None
    return ~valid.to(device)[:, :, None]


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
