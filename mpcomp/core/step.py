"""Context that both ends of a link share without a message: the step, and one message in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mpcomp.core.randomness import generator_for
from mpcomp.core.trace import NO_STAGE, Trace

__all__ = ["HISTORY_STEPS", "Key", "MessageContext", "SampleIds", "Step"]

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
        unit: factor from the units in which state is kept to those of this message's tensor:
            the loss scale, over the learning rate where a method follows it.
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
        valid: per microbatch which positions count, of `mpcomp.core.tensor_meta.valid_positions`.
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
