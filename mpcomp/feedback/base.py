"""The contract of a feedback method: a frozen value that makes the two ends of a link.

A compressor forgets; a feedback method wraps one and remembers, per *slot* (a row of a
microbatch, a sample), what earlier messages left out. Its two ends never talk about state: each
follows from the messages and from visits that both hold.

State changes in two strokes. While a step runs, ends read what the step before left and note what
they would store; once the step is known to be finite on every stage, all of them `commit`, else
all `discard`. So a skipped step leaves no trace.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Selecting
from mpcomp.core.packing import Payload
from mpcomp.core.spec import SpecValue, shown
from mpcomp.core.step import Key, SampleIds, Visit
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.slots import SlotStore

__all__ = [
    "Adaptable",
    "AdaptableSender",
    "End",
    "Feedback",
    "Receiver",
    "Sender",
    "check_inner",
    "checksum",
    "inner_positions",
    "narrow",
    "row_keys",
]

_EVALS = ("compressed", "raw")


class Feedback(SpecValue, ABC):
    """A method that remembers, round any compressor.

    Attributes:
        inner: the compressor of what is sent.
        eval: what evaluation sends: "compressed" (the inner compressor's C(x), without state) or
            "raw" (the tensor itself).
    """

    inner: Compressor
    eval: str
    spec_inner: ClassVar[str | None] = "inner"
    #: Whether state is kept in units of learning rate times gradient.
    lr_scaled: bool = False
    #: Whether a slot belongs to a training sample, and not to a row of a microbatch.
    by_sample: ClassVar[bool] = False

    def check_visit(self, visit: Visit, num_rows: int) -> None:
        """Raises ValueError where a visit lacks what slots are found by."""

    def keys_to_come(self, ids: SampleIds, store: SlotStore) -> Sequence[Key]:
        """Slots in ``store`` that a microbatch of these samples will find; none by place."""
        return ()

    def check_cut(self) -> None:
        """Raises ValueError for settings that have no place at a cut."""

    @abstractmethod
    def sender(self, meta: TensorMeta, device: torch.device) -> Sender:
        """The end that sends tensors of ``meta``'s per-sample shape."""

    @abstractmethod
    def receiver(self, meta: TensorMeta, device: torch.device) -> Receiver:
        """The end that receives them."""


class End(ABC):
    """One end of a link: reads committed state, notes new state, commits or discards it.

    Args:
        store: the rows this end keeps, or None if it keeps none.
    """

    def __init__(self, store: SlotStore | None) -> None:
        self.store = store
        self._pending: list[tuple[int, Sequence[Key], Tensor]] = []

    @abstractmethod
    def layout(self, meta: TensorMeta, visit: Visit) -> tuple[TensorMeta, ...]:
        """Wire tensors of the message for this visit."""

    @abstractmethod
    def observe_dense(self, x: Tensor, visit: Visit) -> None:
        """Takes note that ``x`` itself went over in this visit (warm-up, compression off).

        ``x`` is whole, but what is kept for padded positions stays as it is.
        """

    def positions(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor | None:
        """Which elements the message carries, for `SameIndices`; None where it is dense."""
        return None

    def check(self, visit: Visit, num_rows: int) -> int:
        """A number that is equal at both ends as long as they agree about slots and flags."""
        return 0

    def commit(self) -> None:
        """Stores what was noted, in ascending order of microbatches on every rank."""
        for _, keys, rows in sorted(self._pending, key=lambda note: note[0]):
            assert self.store is not None
            self.store.write(keys, rows)
        self._pending.clear()

    def discard(self) -> None:
        """Forgets what was noted."""
        self._pending.clear()

    def _note(self, visit: Visit, keys: Sequence[Key], rows: Tensor) -> None:
        """Notes fp32 rows in the message's units for `commit`."""
        self._pending.append(
            (visit.microbatch, keys, rows if visit.unit == 1 else rows / visit.unit)
        )

    def _recall(self, visit: Visit, keys: Sequence[Key]) -> Tensor:
        """The committed rows of ``keys`` in the message's units, fp32."""
        assert self.store is not None
        rows = self.store.read(keys)
        return rows if visit.unit == 1 else rows * visit.unit


class Sender(End):
    """The end that encodes."""

    @abstractmethod
    def encode(self, x: Tensor, visit: Visit) -> Payload:
        """The payload of ``x``, exactly as `layout` says; ``x`` is zero where it is padded."""

    @abstractmethod
    def arrived(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor:
        """What `Receiver.decode` will make of the payload that was encoded last."""


class Receiver(End):
    """The end that decodes."""

    @abstractmethod
    def decode(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor:
        """What the receiver works with: a tensor like ``meta``, of no meaning where padded."""


class Adaptable(ABC):
    """An end whose inner compressor may change in the course of a run."""

    @abstractmethod
    def use(self, method: Feedback) -> None:
        """Codes by ``method`` from now on, which has another inner compressor and no more."""


class AdaptableSender(Adaptable, Sender):
    """The end of such a link that encodes."""

    @abstractmethod
    def measured(self, x: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
        """What the inner compressor is given for ``x``, and what its error is compared with.

        Tensors like ``x``, which is zero where it is padded; so are they.
        """


def check_inner(method: Feedback) -> None:
    """Raises unless the fields that all feedback methods have are valid."""
    inner = method.inner
    if not isinstance(inner, Compressor):
        raise TypeError(
            f"inner={shown(inner)}: {type(method).__name__} goes round a compressor such as "
            "TopK(0.1) or Quantize(4); one feedback method a link"
        )
    if getattr(inner, "unbiased", False):
        raise ValueError(
            f"inner={inner}: unbiased=True inside feedback diverges, as its error is larger than "
            "the tensor; leave it out"
        )
    if method.eval not in _EVALS:
        raise ValueError(f"eval={method.eval!r}: evaluation is {' or '.join(_EVALS)}")


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 ``x`` in ``dtype``, its finite values kept finite; what that cuts off stays in state."""
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def row_keys(visit: Visit, num_rows: int) -> list[Key]:
    """Slots by place: row ``r`` of microbatch ``m``. A shorter batch uses the leading rows."""
    return [(visit.microbatch, row) for row in range(num_rows)]


def checksum(keys: Sequence[Key], flags: Sequence[bool]) -> int:
    """A 32-bit sum over slots and their flags."""
    return zlib.crc32(repr((list(keys), list(flags))).encode())


def inner_positions(
    inner: Compressor, payload: Payload, meta: TensorMeta, visit: Visit, part: str
) -> Tensor | None:
    """Positions of a selecting inner compressor's message."""
    if not isinstance(inner, Selecting):
        return None
    return inner.indices(payload, meta, visit.draw(part))
