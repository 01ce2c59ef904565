"""A plan: how one tensor becomes one message, and that a tensor again.

Each end makes its plan once, when a message is due, from what both ends hold: the method, the
tensor's description and the message's context. It then says the layout before there is data, and
encodes, or decodes. What it puts on the wire is the payload; the header is the link's.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.compressors.coding import Coding
from mpcomp.compressors.identity import Identity, or_dense
from mpcomp.core.padding import blanked
from mpcomp.core.step import Key, MessageContext
from mpcomp.core.tensor_meta import TensorMeta, narrow
from mpcomp.core.wire import Parts, Payload
from mpcomp.feedback.base import Feedback
from mpcomp.feedback.memory import Sent
from mpcomp.feedback.state import EndState, SlotState

__all__ = ["MemoryPlan", "PlainPlan", "Plan"]


class Plan(ABC):
    """One message of a tensor, at one end.

    Attributes:
        meta: the tensor.
        layout: of the payload.
        check: a number that is equal at both ends as long as they agree about slots.
        dense: whether the tensor goes as it is.
        variable: whether the message may end before the layout does, known once it is coded.
        lags: of the message that was encoded here, as `mpcomp.core.traffic.Traffic.lags`; None
            unless it was asked for, and samples came again to a memory.
    """

    meta: TensorMeta
    layout: tuple[TensorMeta, ...]
    check: int = 0
    dense: bool = False
    variable: bool = False
    lags: Tensor | None = None

    @abstractmethod
    def encode(self, x: Tensor, *, asked: bool = False) -> Payload:
        """The payload of ``x``, exactly as `layout` says; once.

        Args:
            x: like `meta`.
            asked: whether `arrived` will be, which a method may know without decoding, and `lags`.
        """

    @abstractmethod
    def decode(self, payload: Payload) -> Tensor:
        """The receiver's tensor, like `meta` and zero where padded; once."""

    @abstractmethod
    def arrived(self, payload: Payload) -> Tensor:
        """The other end's tensor for the payload that was encoded here."""

    @abstractmethod
    def positions(self, payload: Payload) -> Tensor | None:
        """Elements that the message carries, for `SameIndices`; None where it is dense."""


class PlainPlan(Plan):
    """A message of a compressor alone.

    Args:
        coder: the compressor.
        meta: the tensor.
        context: of the message.
        padded: where the batch is padded, of which a dense message takes no notice.
        end: what this end keeps, to be told of a tensor that goes as it is in training.
    """

    def __init__(
        self,
        coder: Compressor,
        meta: TensorMeta,
        context: MessageContext,
        padded: Tensor | None,
        end: EndState | None = None,
    ) -> None:
        self.meta = meta
        self._coding = Coding(coder, meta, partial(context.draw, ""))
        self.layout = self._coding.layout
        self.check = coder.check
        self.dense = coder.sends_dense
        self.variable = coder.variable_length
        self._context = context
        self._all_padded = padded
        self._padded = None if self.dense else padded
        self._end = end if self.dense else None
        self._arrived: Tensor | None = None

    def encode(self, x: Tensor, *, asked: bool = False) -> Payload:
        x = blanked(x, self._padded)
        if asked:
            payload, said = self._coding.round_trip(x, x)
            self._arrived = blanked(said, self._padded)
        else:
            payload = self._coding.compress(x)
        self._observe(x)
        return payload

    def decode(self, payload: Payload) -> Tensor:
        x = self._coding.decompress(payload)
        self._observe(x)
        return blanked(x, self._padded)

    def arrived(self, payload: Payload) -> Tensor:
        if self._arrived is None:
            self._arrived = blanked(self._coding.decompress(payload), self._padded)
        return self._arrived

    def positions(self, payload: Payload) -> Tensor | None:
        return self._coding.positions(payload)

    def _observe(self, x: Tensor) -> None:
        """Tells the memory of a tensor that went as it is (warm-up, compression off).

        It is whole, but what is kept for padded positions stays as it is.
        """
        if self._end is None or not self._end.fields:
            return
        memory, context = self._end.memory, self._context
        assert isinstance(memory, Feedback)
        state = self._end.open(
            memory.slots(context, self.meta.num_rows),
            unit=context.unit,
            order=context.microbatch,
            padded=self._all_padded,
            names=self._end.mirrored,
        )
        # A copy: the stage may write to the tensor before the step is over.
        memory.dense(self.meta.flatten(x).to(torch.float32, copy=True), state)


@dataclass(frozen=True)
class _Rows:
    """Rows of a tensor whose slots are alike.

    Attributes:
        first: whether they have no estimate yet, and so are sent by themselves.
        index: which rows, ascending; None for all.
        parts: codings of these rows, whose sum is what the message says of them.
        state: of their slots.
        padded: of these rows.
    """

    first: bool
    index: Tensor | None
    parts: tuple[Coding, ...]
    state: SlotState
    padded: Tensor | None

    @property
    def meta(self) -> TensorMeta:
        return self.parts[0].meta

    def decoded(self, part: Coding, payload: Payload) -> Tensor:
        """The rows that a part's payload says, [rows, n] in the tensor's dtype."""
        return self.meta.flatten(part.decompress(payload))

    def of(self, flat: Tensor) -> Tensor:
        """These rows of [all rows, n]."""
        return flat if self.index is None else flat.index_select(0, self.index)


class MemoryPlan(Plan):
    """A message of a feedback method.

    Args:
        method: the memory, and the compressors of targets.
        end: what this end keeps.
        meta: the tensor.
        context: of the message.
        padded: where the batch is padded.
        device: of the tensor.

    Raises:
        ValueError: the context lacks what slots are found by.
    """

    def __init__(
        self,
        method: Feedback,
        end: EndState,
        meta: TensorMeta,
        context: MessageContext,
        padded: Tensor | None,
        device: torch.device,
    ) -> None:
        self.meta = meta
        self._method = method
        self._end = end
        self._context = context
        self._padded = padded
        self._device = device
        self._result: Tensor | None = None
        keys = method.slots(context, meta.num_rows)
        self._rows: list[_Rows] = []
        if end.estimate is None:
            self._add(False, keys, None)
        else:
            known = end.fields[end.estimate].known(keys)
            self.check = zlib.crc32(repr((list(keys), known)).encode())
            for flag in (False, True):
                rows = [row for row, held in enumerate(known) if held is flag]
                if rows:
                    self._add(not flag, keys, None if len(rows) == len(keys) else rows)
        codings = [part for rows in self._rows for part in rows.parts]
        self._parts = Parts(
            tuple(part.layout for part in codings),
            tuple(part.compressor.variable_length for part in codings),
        )
        self.layout = self._parts.layout
        self.variable = any(self._parts.varies)

    def _add(self, first: bool, keys: Sequence[Key], rows: list[int] | None) -> None:
        """Plans the message of some rows, behind those that are planned already."""
        method, context = self._method, self._context
        meta, padded, index = self.meta, self._padded, None
        if rows is not None:
            meta, keys = meta.with_rows(len(rows)), [keys[row] for row in rows]
            index = torch.tensor(rows, device=self._device)
            padded = None if padded is None else padded[rows]
        coders = (method.first or Identity(),) if first else method.coders_of(keys, context, meta)
        parts = []
        for i, coder in enumerate(coders):
            coder = or_dense(coder, meta)
            name = "first" if first else str(i) if i or self._end.estimate is None else "later"
            parts.append(Coding(coder, meta, partial(context.draw, name)))
        state = self._end.open(
            keys,
            unit=context.unit,
            order=context.microbatch,
            padded=padded,
            names=self._end.mirrored,
        )
        self._rows.append(_Rows(first, index, tuple(parts), state, padded))

    # -- the sender -----------------------------------------------------------------------------

    def encode(self, x: Tensor, *, asked: bool = False) -> Payload:
        flat = self.meta.flatten(blanked(x, self._padded))
        payloads: list[Payload] = []
        results = []
        for rows in self._rows:
            own = rows.of(flat)
            encode = self._encode_first if rows.first else self._encode
            parts, result = encode(rows, own)
            payloads += parts
            results.append(result)
            if asked and self._method.by_sample and not rows.first:
                self.lags = self._lags_of(rows, own, result)
            rows.state.release()
        self._result = self._joined(results)
        return self._parts.joined(payloads)

    def _encode_first(self, rows: _Rows, x: Tensor) -> tuple[list[Payload], Tensor]:
        (part,) = rows.parts
        given = rows.meta.unflatten(x)
        payload, said = part.round_trip(given, given)
        return [payload], self._first(rows, rows.meta.flatten(said))

    def _encode(self, rows: _Rows, x: Tensor) -> tuple[list[Payload], Tensor]:
        """The payloads of rows, and what the receiver will work with, [rows, n]."""
        method, state = self._method, rows.state
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        target = blanked(method.compensate(wide, state), rows.padded)
        payloads: list[Payload] = []
        said: list[Tensor] = []
        for i, part in enumerate(rows.parts):
            # Rounding to the tensor's dtype comes before compression, and what it takes away is
            # part of what is left, so that half precision loses nothing either.
            given = narrow(method.part(i, x, target, said, state), x.dtype)
            given = rows.meta.unflatten(blanked(given, rows.padded))
            payload, decoded = part.round_trip(given, rows.meta.unflatten(x))
            said.append(rows.meta.flatten(decoded))
            payloads.append(payload)
        total = _sum(said)

        def positions() -> Tensor | None:
            return self._positions(rows, payloads)

        def without(y: Tensor) -> Tensor:
            return blanked(y - said_in_all, rows.padded)

        if self._end.keeps:
            said_in_all = total.to(target.dtype)
            method.sent(Sent(wide, target, without, positions), state)
        if self._end.estimate is not None:  # the receiver's, which this end has a copy of
            total = method.received(total.to(torch.float32), state)
        return payloads, total

    def _lags_of(self, rows: _Rows, x: Tensor, now: Tensor) -> Tensor:
        """`lags` of rows that came again.

        Args:
            rows: the rows.
            x: what they are, [rows, n].
            now: what is remembered of them from here on, likewise.
        """
        assert self._end.estimate is not None
        x, before = x.to(now.dtype), rows.state[self._end.estimate]
        off = [blanked(x - each, rows.padded).flatten() for each in (before, now)]
        sums = [torch.dot(each, each) for each in (x.flatten(), *off)]
        stayed, there = before == now, torch.ones_like(now, dtype=torch.bool)
        counts = [blanked(each, rows.padded).sum() for each in (stayed, there)]
        return torch.stack([each.to(torch.float64) for each in (*sums, *counts)])

    def measured(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The target for ``x``, and the tensor that its error is compared with; both like it.

        A row without an estimate is taken for one with an estimate of zero, although it goes raw:
        that tells more of messages to come than that it leaves nothing out.
        """
        context = self._context
        state = self._end.open(
            self._method.slots(context, self.meta.num_rows),
            unit=context.unit,
            padded=self._padded,
            names=self._end.mirrored,
            stages=False,
        )
        x = blanked(x, self._padded)
        flat = self.meta.flatten(x).to(torch.float32)
        target = narrow(self._method.compensate(flat, state), self.meta.dtype)
        target = self.meta.unflatten(blanked(target, self._padded))
        return target, target if self._end.estimate is None else x

    # -- the receiver ---------------------------------------------------------------------------

    def decode(self, payload: Payload) -> Tensor:
        payloads = iter(self._parts.parted(payload))
        results = []
        for rows in self._rows:
            results.append(self._decode(rows, [next(payloads) for _ in rows.parts]))
            rows.state.release()
        return blanked(self._tensor(self._joined(results)), self._padded)

    def _decode(self, rows: _Rows, payloads: Sequence[Payload]) -> Tensor:
        said = [
            rows.decoded(part, payload) for part, payload in zip(rows.parts, payloads, strict=True)
        ]
        if rows.first:
            return self._first(rows, said[0])
        total = _sum(said)
        if self._end.fields:
            total = total.to(torch.float32)
        return self._method.received(total, rows.state)

    # -- both -----------------------------------------------------------------------------------

    def arrived(self, payload: Payload) -> Tensor:
        assert self._result is not None
        return blanked(self._tensor(self._result), self._padded)

    def positions(self, payload: Payload) -> Tensor | None:
        if len(self._rows) > 1 or self._rows[0].first:
            return None  # some rows went whole, and so does their gradient
        return self._positions(self._rows[0], self._parts.parted(payload))

    def _positions(self, rows: _Rows, payloads: Sequence[Payload]) -> Tensor | None:
        """Elements of these rows that their own payloads carry; None for all."""
        (part, *others) = rows.parts
        return None if others else part.positions(payloads[0])

    def _first(self, rows: _Rows, said: Tensor) -> Tensor:
        """Begins the estimates of rows that were sent by themselves."""
        # A copy, as rows that went raw may be views of the tensor itself.
        estimate = said.to(torch.float32, copy=True)
        self._method.dense(estimate, rows.state)
        return estimate

    def _joined(self, results: Sequence[Tensor]) -> Tensor:
        """All rows, from those of each group."""
        if len(results) == 1:
            return results[0]
        joined = results[0].new_empty(self.meta.num_rows, self.meta.row_numel)
        for rows, result in zip(self._rows, results, strict=True):
            assert rows.index is not None
            joined.index_copy_(0, rows.index, result)
        return joined

    def _tensor(self, flat: Tensor) -> Tensor:
        """A result as a tensor like `meta`, which shares no memory with what is kept."""
        x = narrow(flat, self.meta.dtype)
        return self.meta.unflatten(x.clone() if x is flat and self._end.fields else x)


def _sum(said: Sequence[Tensor]) -> Tensor:
    """Sum of decoded parts, in their dtype."""
    total = said[0]
    for part in said[1:]:
        wide = torch.promote_types(part.dtype, torch.float32)
        total = narrow(total.to(wide) + part, part.dtype)
    return total
