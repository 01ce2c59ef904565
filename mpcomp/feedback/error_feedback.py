"""Error feedback: what a message left out is added to the next one. State at the sender only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Selecting
from mpcomp.compressors.identity import or_dense
from mpcomp.core.packing import Payload
from mpcomp.core.padding import blanked, keep_padded, padded_positions
from mpcomp.core.step import Visit
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.base import (
    Adaptable,
    AdaptableSender,
    Feedback,
    Receiver,
    Sender,
    check_inner,
    inner_positions,
    narrow,
    row_keys,
)
from mpcomp.feedback.slots import SlotStore, StoragePlan

__all__ = ["EFMixed", "ErrorFeedback"]


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """m = C(x + e), e <- x + e - m. Spec ``ef+topk:0.1``.

    Nothing is lost: over any number of steps the sum of what was sent plus the residual is the sum
    of what was to be sent. Seide et al. 2014; Stich et al. 2018; Rudakov et al. for cuts. The
    residual belongs to a row of a microbatch.

    Args:
        inner: compressor of x + e.
        storage: "fp32", "fp16", "bf16" or bits (1-8) of the stored residual.
        location: "device", "cpu", or a folder for files.
        lr_scaled: keep the residual in units of learning rate times gradient, as the theory does,
            so that it follows a change of the learning rate (gradients only; the pipeline must
            know it: ``pipe.follow_lr(optimizer)``).
        eval: "compressed" or "raw".

    Raises:
        TypeError: inner is not a compressor.
        ValueError: a setting outside those, or an inner compressor with unbiased=True.
    """

    inner: Compressor
    storage: str | int = "fp32"
    location: str = "device"
    lr_scaled: bool = False
    eval: str = "compressed"
    spec: ClassVar[str] = "ef"

    def __post_init__(self) -> None:
        check_inner(self)
        self._plan  # noqa: B018  (raises for a bad storage)

    @property
    def _plan(self) -> StoragePlan:
        return StoragePlan(self.storage, self.location)

    @property
    def parts(self) -> tuple[Compressor, ...]:
        """The compressors whose payloads make up a message."""
        return (self.inner,)

    def encode_parts(self, x: Tensor, residual: Tensor, visit: Visit) -> Payload:
        """The payloads of the parts, for a tensor and its fp32 residual of the same shape."""
        return _compress(self.inner, narrow(x + residual, x.dtype), visit, 0)

    def sender(self, meta: TensorMeta, device: torch.device) -> Sender:
        return _ResidualSender(self, SlotStore(meta.row_numel, self._plan, device))

    def receiver(self, meta: TensorMeta, device: torch.device) -> Receiver:
        return _SumReceiver(self)


@dataclass(frozen=True)
class EFMixed(ErrorFeedback):
    """Half of the budget for the tensor, half for the residual. Spec ``efmixed+topk:0.1``.

    Rudakov et al. name the method without a formula that could be verified. Chosen here:
    ``second="residual"``: m = C_(k/2)(x) + C_(k/2)(e), e <- e + x - m: each selects from its own.
    An element selected by both halves is their sum. The plausible alternative,
    ``second="remainder"``: m1 = C_(k/2)(x), m = m1 + C_(k/2)(x - m1 + e).

    Args:
        inner: a selecting compressor (topk, randomk, randomblock); each half keeps keep / 2.
        second: "residual" or "remainder".

    Other arguments and errors as for `ErrorFeedback`.
    """

    second: str = "residual"
    spec: ClassVar[str] = "efmixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, Selecting):
            raise ValueError(
                f"inner={self.inner}: EFMixed halves the number of elements, so it goes round "
                "topk, randomk or randomblock"
            )
        if self.second not in ("residual", "remainder"):
            raise ValueError(f"second={self.second!r}: EFMixed knows residual, remainder")

    @property
    def parts(self) -> tuple[Compressor, ...]:
        assert isinstance(self.inner, Selecting)
        half = dataclasses.replace(self.inner, keep=self.inner.keep / 2)  # type: ignore[type-var]
        return (half, half)

    def encode_parts(self, x: Tensor, residual: Tensor, visit: Visit) -> Payload:
        half = self.parts[0]
        first = _compress(half, x, visit, 0)
        if self.second == "remainder":
            meta = TensorMeta.of(x)
            sent = or_dense(half, meta).decompress(first, meta, visit.draw("0"))
            # Zeros at padded positions may have come back as something else.
            padded = padded_positions(visit.valid, meta, x.device)
            residual = blanked(residual + (x - sent), padded)
        return (*first, *_compress(half, narrow(residual, x.dtype), visit, 1))


def _compress(part: Compressor, x: Tensor, visit: Visit, index: int) -> Payload:
    return or_dense(part, TensorMeta.of(x)).compress(x, visit.draw(str(index)))


class _SumOfParts:
    """Layout and decoding of a message that is the sum of its parts."""

    def __init__(self, method: ErrorFeedback) -> None:
        self.method = method

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return tuple(
            wire for part in self.method.parts for wire in or_dense(part, meta).layout(meta)
        )

    def decode(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor:
        total: Tensor | None = None
        start = 0
        for index, part in enumerate(self.method.parts):
            compressor = or_dense(part, meta)
            stop = start + len(compressor.layout(meta))
            x = compressor.decompress(payload[start:stop], meta, visit.draw(str(index)))
            if total is not None:
                wide = torch.promote_types(x.dtype, torch.float32)
                x = narrow(total.to(wide) + x, x.dtype)
            total = x
            start = stop
        assert total is not None
        return total

    def positions(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor | None:
        if len(self.method.parts) > 1 or or_dense(self.method.inner, meta) != self.method.inner:
            return None
        return inner_positions(self.method.inner, payload, meta, visit, "0")


class _ResidualSender(AdaptableSender):
    def __init__(self, method: ErrorFeedback, store: SlotStore) -> None:
        super().__init__(store)
        self._message = _SumOfParts(method)

    def use(self, method: Feedback) -> None:
        assert isinstance(method, ErrorFeedback)
        self._message = _SumOfParts(method)

    def measured(self, x: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
        meta = TensorMeta.of(x)
        held = self._recall(visit, row_keys(visit, meta.num_rows))
        residual = blanked(held, padded_positions(visit.valid, meta, x.device))
        wanted = narrow(x + meta.unflatten(residual), x.dtype)
        return wanted, wanted

    def layout(self, meta: TensorMeta, visit: Visit) -> tuple[TensorMeta, ...]:
        return self._message.layout(meta)

    def positions(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor | None:
        return self._message.positions(payload, meta, visit)

    def encode(self, x: Tensor, visit: Visit) -> Payload:
        meta = TensorMeta.of(x)
        keys = row_keys(visit, meta.num_rows)
        held = self._recall(visit, keys)
        padded = padded_positions(visit.valid, meta, x.device)
        residual = blanked(held, padded)
        wanted = meta.flatten(x).to(torch.float32) + residual
        # Rounding to the tensor's dtype comes before compression, and what it takes away is part
        # of the new residual, so that half precision loses nothing either.
        payload = self._message.method.encode_parts(x, meta.unflatten(residual), visit)
        sent = self._message.decode(payload, meta, visit)
        left = wanted - meta.flatten(sent).to(torch.float32)
        self._note(visit, keys, keep_padded(left, held, padded))
        return payload

    def arrived(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor:
        return self._message.decode(payload, meta, visit)

    def observe_dense(self, x: Tensor, visit: Visit) -> None:
        assert self.store is not None
        meta = TensorMeta.of(x)
        keys = row_keys(visit, meta.num_rows)
        stale = [row for row, known in enumerate(self.store.known(keys)) if known]
        if stale:  # a residual that was never stored is zero as it is
            at = [keys[row] for row in stale]
            zeros = torch.zeros(len(stale), self.store.row_numel, device=x.device)
            padded = padded_positions(visit.valid, meta, x.device)
            if padded is not None:
                zeros = keep_padded(zeros, self._recall(visit, at), padded[stale])
            self._note(visit, at, zeros)


class _SumReceiver(Adaptable, Receiver):
    def __init__(self, method: ErrorFeedback) -> None:
        super().__init__(None)
        self._message = _SumOfParts(method)

    def use(self, method: Feedback) -> None:
        assert isinstance(method, ErrorFeedback)
        self._message = _SumOfParts(method)

    def layout(self, meta: TensorMeta, visit: Visit) -> tuple[TensorMeta, ...]:
        return self._message.layout(meta)

    def positions(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor | None:
        return self._message.positions(payload, meta, visit)

    def decode(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor:
        return self._message.decode(payload, meta, visit)

    def observe_dense(self, x: Tensor, visit: Visit) -> None:
        pass  # a receiver of error feedback keeps nothing
