"""EF21 and AQ-SGD: both ends keep the same estimate of a tensor and send what corrects it.

    d = C(x - h),  h <- h + d,  the receiver works with h

One algorithm with two ways to find the slot of a row: EF21 by its place (microbatch, row), AQ-SGD
by the sample it is. The estimate is advanced by the *decoded payload* alone, with the same
operations at both ends, so the two stay equal bit for bit. A row without an estimate is sent by
itself (raw, or with a milder compressor); a microbatch may mix both kinds, and because both ends
hold the flags, the layout is known without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.compressors.identity import Identity, or_dense
from mpcomp.core.packing import Payload
from mpcomp.core.padding import blanked, keep_padded, padded_positions
from mpcomp.core.step import Key, SampleIds, Visit
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.feedback.base import (
    Adaptable,
    AdaptableSender,
    End,
    Feedback,
    Receiver,
    Sender,
    check_inner,
    checksum,
    inner_positions,
    narrow,
    row_keys,
)
from mpcomp.feedback.slots import SlotStore, StoragePlan

__all__ = ["AQSGD", "EF21"]


@dataclass(frozen=True)
class EF21(Feedback):
    """d = C(x - h), h <- h + d, the receiver uses h. Spec ``ef21+topk:0.1``.

    Richtarik, Sokolov, Fatkhullin, NeurIPS 2021, algorithm 2; Rudakov et al. for cuts. For a
    fixed input h converges to it geometrically. The estimate belongs to a row of a microbatch.

    Args:
        inner: compressor of the difference.
        first: compressor of a row that has no estimate yet; None sends it raw (exact start).
            ``first=inner`` is the start from h = 0.
        storage: "fp32", "fp16", "bf16" or bits (1-8) of the stored estimate, at both ends.
        location: "device", "cpu", or a folder for files.
        cap_bytes: estimates are kept up to so many bytes at each end; rows beyond it are always
            sent as first ones. None for no cap.
        eval: "compressed" or "raw".

    Raises:
        TypeError: inner or first is not a compressor.
        ValueError: a setting outside those, or a compressor with unbiased=True.
    """

    inner: Compressor
    first: Compressor | None = None
    storage: str | int = "fp32"
    location: str = "device"
    cap_bytes: int | None = None
    eval: str = "compressed"
    spec: ClassVar[str] = "ef21"

    def __post_init__(self) -> None:
        check_inner(self)
        if self.first is not None and not isinstance(self.first, Compressor):
            raise TypeError(f"first={self.first!r}: expected a compressor, or None for raw")
        self._plan  # noqa: B018  (raises for a bad storage or cap)

    @property
    def _plan(self) -> StoragePlan:
        return StoragePlan(self.storage, self.location, self.cap_bytes)

    def slots(self, visit: Visit, num_rows: int) -> Sequence[Key]:
        """The slot of each row of a microbatch."""
        return row_keys(visit, num_rows)

    def sender(self, meta: TensorMeta, device: torch.device) -> Sender:
        return _EstimateSender(self, SlotStore(meta.row_numel, self._plan, device))

    def receiver(self, meta: TensorMeta, device: torch.device) -> Receiver:
        return _EstimateReceiver(self, SlotStore(meta.row_numel, self._plan, device))


@dataclass(frozen=True)
class AQSGD(EF21):
    """The estimate of each training sample, from its last visit. Spec ``aqsgd+quant:4``.

    Wang et al., NeurIPS 2022, algorithm 1: the first visit of a sample goes raw, later ones send
    Q(a - m), m <- m + Q(a - m). Its theorem needs an unbiased Q with ||x - Q(x)|| <= c ||x||,
    c < sqrt(1/2). Every training step needs ``sample_ids``. A sample that the first epoch left out
    (``drop_last``) has its first visit when it comes, and goes raw then.

    Each end of each cut keeps a row for every training sample: num_samples x elements of a
    sample's activation x bytes of an element (4 "fp32", 2 "fp16" and "bf16", bits / 8 and a scale
    a row), and a stage between two cuts is an end of both. 20 000 samples of GPT-2-XL (1024 x
    1600) in "fp16" are 61 GiB an end; ``pipe.state_bytes(batch, num_samples)`` says it for a
    pipeline before the run. What memory does not hold goes to ``location=``, "cpu" or a folder on
    a local disk; ``pipe.prefetch(ids)`` then reads the rows of the next batch while this one is
    trained on. ``cap_bytes=`` bounds an end instead: samples that find it full go raw for ever,
    which the report's wire bytes show. Rows have one shape: pad all batches to one length, as a
    batch of another starts all of them anew.

    Args:
        key: what a slot is found by: "sample" (``sample_ids`` [b]), "augmented" (``sample_ids``
            [b, 2]: id and augmentation seed), or "batch" (``sample_ids`` the index of a batch
            whose composition is fixed).

    Other arguments and errors as for `EF21`.
    """

    key: str = "sample"
    spec: ClassVar[str] = "aqsgd"
    by_sample: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key not in ("sample", "augmented", "batch"):
            raise ValueError(f"key={self.key!r}: AQSGD knows sample, augmented, batch")

    def check_visit(self, visit: Visit, num_rows: int) -> None:
        self.slots(visit, num_rows)

    def slots(self, visit: Visit, num_rows: int) -> Sequence[Key]:
        ids = visit.sample_ids
        if self.key == "batch":
            if not isinstance(ids, int):
                raise ValueError(
                    "AQSGD(key='batch') needs sample_ids=<index of the batch>, a whole number, "
                    f"in every training step; got {_described(ids)}"
                )
            return [(ids, *key) for key in row_keys(visit, num_rows)]
        width = {"sample": 1, "augmented": 2}[self.key]
        if not isinstance(ids, tuple) or any(len(key) != width for key in ids):
            form = "[batch]" if width == 1 else "[batch, 2] (id, augmentation seed)"
            raise ValueError(
                f"AQSGD(key={self.key!r}) needs sample_ids {form} in every training step; "
                f"got {_described(ids)}"
            )
        assert len(ids) == num_rows
        return ids

    def keys_to_come(self, ids: SampleIds, store: SlotStore) -> Sequence[Key]:
        if not isinstance(ids, int):
            return ids or ()
        # Of a batch by number all microbatches; their rows were stored in ascending order.
        keys: list[Key] = []
        key = (ids, 0, 0)
        while store.known([key])[0]:
            keys.append(key)
            key = (ids, key[1], key[2] + 1)
            if not store.known([key])[0]:
                key = (ids, key[1] + 1, 0)
        return keys


def _described(ids: object) -> str:
    if isinstance(ids, tuple):
        return f"ids of {len(ids[0]) if ids else 0} numbers each"
    return "none" if ids is None else repr(ids)


class _EstimateEnd(Adaptable, End):
    """What the two ends share: slots, flags, layout, and the update itself."""

    store: SlotStore

    def __init__(self, method: EF21, store: SlotStore) -> None:
        super().__init__(store)
        self._method = method

    def use(self, method: Feedback) -> None:
        assert isinstance(method, EF21)
        self._method = method

    def check(self, visit: Visit, num_rows: int) -> int:
        keys = self._method.slots(visit, num_rows)
        return checksum(keys, self.store.known(keys))

    def _parts(self, meta: TensorMeta, known: Sequence[bool]) -> list[tuple[str, Compressor, int]]:
        """(name, compressor, rows) of the message's parts: first visits, then later ones."""
        later = sum(known)
        parts = []
        if later < len(known):
            rows = len(known) - later
            first = self._method.first or Identity()
            parts.append(("first", or_dense(first, meta.with_rows(rows)), rows))
        if later:
            inner = or_dense(self._method.inner, meta.with_rows(later))
            parts.append(("later", inner, later))
        return parts

    def _known(self, meta: TensorMeta, visit: Visit) -> list[bool]:
        return self.store.known(self._method.slots(visit, meta.num_rows))

    def layout(self, meta: TensorMeta, visit: Visit) -> tuple[TensorMeta, ...]:
        return tuple(
            wire
            for _, compressor, rows in self._parts(meta, self._known(meta, visit))
            for wire in compressor.layout(meta.with_rows(rows))
        )

    def positions(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor | None:
        parts = self._parts(meta, self._known(meta, visit))
        if len(parts) > 1 or parts[0][0] == "first" or parts[0][1] != self._method.inner:
            return None  # some rows went whole, and so does their gradient
        return inner_positions(self._method.inner, payload, meta, visit, "later")

    def observe_dense(self, x: Tensor, visit: Visit) -> None:
        meta = TensorMeta.of(x)
        keys = self._method.slots(visit, meta.num_rows)
        estimate = meta.flatten(x).to(torch.float32, copy=True)
        padded = padded_positions(visit.valid, meta, x.device)
        if padded is not None:
            estimate = keep_padded(estimate, self._recall(visit, keys), padded)
        self._note(visit, keys, estimate)

    def _advance(
        self, payload: Payload, meta: TensorMeta, visit: Visit, keys: Sequence[Key], held: Tensor
    ) -> Tensor:
        """The new estimate [rows, n] fp32 from the payload; notes it for `commit`.

        ``held`` is the estimate of ``keys`` so far; it may be written to.
        """
        known = self.store.known(keys)
        padded = padded_positions(visit.valid, meta, held.device)
        former = held if padded is None else held.clone()
        estimate = held
        start = 0
        for name, compressor, count in self._parts(meta, known):
            part_meta = meta.with_rows(count)
            stop = start + len(compressor.layout(part_meta))
            x = compressor.decompress(payload[start:stop], part_meta, visit.draw(name))
            rows = part_meta.flatten(x).to(torch.float32)
            if count == len(keys):
                # A raw row is a view of the tensor itself; zeros + row would turn -0.0 into 0.0.
                estimate = rows.clone() if name == "first" else estimate + rows
            else:
                where = _rows_that(known, name == "later", rows.device)
                if name == "first":
                    estimate.index_copy_(0, where, rows)
                else:
                    estimate.index_add_(0, where, rows)
            start = stop
        estimate = keep_padded(estimate, former, padded)
        self._note(visit, keys, estimate)
        return estimate


class _EstimateSender(_EstimateEnd, AdaptableSender):
    def measured(self, x: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
        meta = TensorMeta.of(x)
        keys = self._method.slots(visit, meta.num_rows)
        flat = meta.flatten(x)
        held = blanked(self._recall(visit, keys), padded_positions(visit.valid, meta, x.device))
        # A row without an estimate is taken for one with an estimate of zero, although it goes raw:
        # that tells more of messages to come than that it leaves nothing out.
        return meta.unflatten(narrow(flat.to(torch.float32) - held, meta.dtype)), x

    def encode(self, x: Tensor, visit: Visit) -> Payload:
        meta = TensorMeta.of(x)
        keys = self._method.slots(visit, meta.num_rows)
        known = self.store.known(keys)
        held = self._recall(visit, keys)
        # No difference where x is padded, whatever is kept there.
        base = blanked(held, padded_positions(visit.valid, meta, x.device))
        flat = meta.flatten(x)
        payload: Payload = ()
        for name, compressor, count in self._parts(meta, known):
            part_meta = meta.with_rows(count)
            where = _rows_that(known, name == "later", x.device)
            rows = flat if count == len(keys) else flat.index_select(0, where)
            if name == "later":
                before = base if count == len(keys) else base.index_select(0, where)
                rows = narrow(rows.to(torch.float32) - before, meta.dtype)
            payload += compressor.compress(part_meta.unflatten(rows), visit.draw(name))
        self._advance(payload, meta, visit, keys, held)
        return payload

    def arrived(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor:
        microbatch, _, estimate = self._pending[-1]
        assert microbatch == visit.microbatch
        return meta.unflatten(narrow(estimate * visit.unit, meta.dtype))


class _EstimateReceiver(_EstimateEnd, Receiver):
    def decode(self, payload: Payload, meta: TensorMeta, visit: Visit) -> Tensor:
        keys = self._method.slots(visit, meta.num_rows)
        estimate = self._advance(payload, meta, visit, keys, self._recall(visit, keys))
        x = narrow(estimate, meta.dtype)
        # A copy, as the estimate waits for the commit while the stage may write to its input.
        return meta.unflatten(x.clone() if x is estimate else x)


def _rows_that(known: Sequence[bool], flag: bool, device: torch.device) -> Tensor:
    """Indices of the rows whose flag is ``flag``."""
    return torch.tensor([i for i, k in enumerate(known) if k == flag], device=device)
