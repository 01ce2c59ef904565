"""A tensor's description, the step, a message's context: all that both ends hold without a message.

A `TensorMeta` is a tensor without its data: its shape, dtype and memory order. A `Step` and a
`MessageContext` say what a message belongs to, and which of a tensor's positions are only padding.

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mpcomp.core.randomness import generator_for
from mpcomp.core.trace import NO_STAGE, Trace

__all__ = [
    "HISTORY_STEPS",
    "WHOLE_NUMBERS",
    "Key",
    "MessageContext",
    "SampleIds",
    "Step",
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
        return {each.name: getattr(self, each.name) for each in fields(self)}

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


# -- a step, and a message in it -------------------------------------------------------------------

#: Steps that a history in memory goes back: a long run's log belongs into a file.
HISTORY_STEPS = 1000
#: What a slot of a feedback method's state is found by.
Key = tuple[int, ...]
#: Ids of a microbatch's rows, or the index of a batch of fixed composition.
SampleIds = tuple[Key, ...] | int | None
#: Context of what is not traced.
_UNTRACED: Final = nullcontext()


class MessageContext(NamedTuple):
    """One message in a step. Both ends of a link are given equal ones.

    Attributes:
        step: number of the training step, skipped steps counted.
        microbatch: number of the microbatch within the step.
        draw: a fresh generator for a named part of the message; equal at both ends, and equal
            again when called again.
        sample_ids: see `SampleIds`.
        unit: factor that brings kept state into the units of this message's tensor: the loss
            scale, over the learning rate where a method follows it.
        valid: bool [rows, positions], False where the batch is padded; None where all count.
        gradients: of an activation's message: gives what arrived last as the gradients of slots,
            fp32 [slots, n], zeros of a slot that has had none; None where nothing keeps them.
        train: whether state is used and changed.
        on: whether the link compresses.
        sampled: whether figures that take time are measured of this microbatch.
        lr: learning rate of the step, where it is known.
        num_rows: of a tensor whose rows are left out where they are zero; None of others.
        checked: whether the message has a sum over its bits.
    """

    step: int
    microbatch: int
    draw: Callable[[str], torch.Generator]
    sample_ids: SampleIds = None
    unit: float = 1.0
    valid: Tensor | None = None
    gradients: Callable[[Sequence[Key]], Tensor] | None = None
    train: bool = True
    on: bool = True
    sampled: bool = False
    lr: float | None = None
    num_rows: int | None = None
    checked: bool = False

    @property
    def learns(self) -> bool:
        """Whether a method that learns from what is sent looks at this message."""
        return self.train and self.on and self.sampled


@dataclass(frozen=True)
class Step:
    """One step of training, or one pass of evaluation, as its links see it.

    Attributes:
        index: number of training steps before it, skipped ones counted.
        train: whether links may use and change state.
        compress_act: whether activations are compressed.
        compress_grad: whether gradients are compressed.
        compress_dp: whether gradients are compressed between replicas.
        sample_ids: per microbatch, for AQ-SGD.
        scaled: whether a loss scaler will skip the step if it is not finite.
        loss_scale: factor on the loss, and so on all gradients.
        lr: learning rate, for methods that follow it.
        call: number of this call, where one pass makes several (a token each, in generation): each
            draws anew.
        valid: per microbatch which positions count, of `valid_positions`.
        num_microbatches: in this step.
        trace: takes down when this rank does what; None of steps that nobody looks at.
    """

    index: int
    train: bool
    compress_act: bool = True
    compress_grad: bool = True
    compress_dp: bool = True
    sample_ids: tuple[SampleIds, ...] = ()
    scaled: bool = False
    loss_scale: float = 1.0
    lr: float | None = None
    call: int = 0
    valid: tuple[Tensor | None, ...] = ()
    num_microbatches: int = 1
    trace: Trace | None = field(default=None, repr=False, compare=False)

    def during(
        self,
        kind: str,
        stage: int = NO_STAGE,
        microbatch: int = NO_STAGE,
        link: str = "",
        num_bytes: int = 0,
    ) -> AbstractContextManager[None]:
        """A context whose time is a span of the trace (`mpcomp.core.trace`), if there is one."""
        if self.trace is None:
            return _UNTRACED
        return self.trace.during(kind, stage, microbatch, link, num_bytes)

    def samples(self, microbatch: int) -> bool:
        """Whether figures that take time are measured: in one microbatch a step, by turns."""
        return microbatch == self.index % self.num_microbatches

    def message(
        self,
        microbatch: int,
        seed: tuple[int | str, ...],
        *,
        on: bool,
        unit: float = 1.0,
        num_rows: int | None = None,
        checked: bool = False,
    ) -> MessageContext:
        """The context of a link's message, equal at both ends.

        Args:
            microbatch: its number.
            seed: of the link; random choices follow from this, the step and the microbatch.
            on: as of `MessageContext`, and so are those that follow.
            unit: likewise.
            num_rows: likewise.
            checked: likewise.
        """
        return MessageContext(
            self.index,
            microbatch,
            partial(self._generator, seed, microbatch),
            self.sample_ids[microbatch] if self.sample_ids else None,
            unit,
            self.valid[microbatch] if self.valid else None,
            train=self.train,
            on=on,
            sampled=self.samples(microbatch),
            lr=self.lr,
            num_rows=num_rows,
            checked=checked,
        )

    def _generator(
        self, seed: tuple[int | str, ...], microbatch: int, part: str
    ) -> torch.Generator:
        kind = "train" if self.train else "eval"
        again = ("call", self.call) if self.call else ()
        return generator_for(*seed, kind, self.index, microbatch, *again, part)
