"""The endpoint of a memory: what its ends here keep, and the plans of its messages.

State belongs to a per-sample shape. When another shape comes, the ends start anew; should the step
that brought it be discarded, the former ends come back.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcomp.compressors.base import Coding, Compressor, Identity, or_dense
from mpcomp.compressors.rows import InRows
from mpcomp.core.context import (
    Key,
    MessageContext,
    SampleIds,
    TensorMeta,
    cast_saturating,
    padded_positions,
    zero_padding,
)
from mpcomp.core.transfer import to_device
from mpcomp.core.wire import Parts, Payload
from mpcomp.feedback.base import Feedback
from mpcomp.feedback.memory import Sent, Side
from mpcomp.feedback.state import EndState, SlotState
from mpcomp.links.endpoints.base import Endpoint, PlainPlan, Plan, StateSize

__all__ = ["DensePlan", "MemoryEndpoint", "MemoryPlan", "end_of"]


def end_of(method: Feedback, side: Side, meta: TensorMeta, device: torch.device) -> EndState:
    """A new end of a link, for tensors of ``meta``'s per-sample shape."""
    return EndState(method, TensorMeta((1, meta.row_numel)), device, (side,))


@dataclass
class _Held:
    """The ends for one per-sample shape."""

    sample: TensorMeta | None = None
    ends: dict[Side, EndState] = field(default_factory=dict)


class MemoryEndpoint(Endpoint, of=Feedback):
    """The sender and the receiver of a memory, where they are on this rank."""

    makes_good = True
    method: Feedback

    def __init__(self, method: Feedback) -> None:
        super().__init__(method)
        self._memory = method  # names the fields, whatever ratio an adaptive link sets
        self._held = _Held()
        self._former: _Held | None = None  # before the open step brought another shape

    @property
    def coders(self) -> Sequence[Compressor]:
        return (*self.method.coders, self.method.first or Identity())

    # -- messages -------------------------------------------------------------------------------

    def plan(
        self, side: Side, meta: TensorMeta, context: MessageContext, device: torch.device
    ) -> Plan:
        method = self.method
        if not context.train:
            coder = method.evaluation if context.on else Identity()
            return PlainPlan(coder, meta, context, device)
        context = self._scaled(context)
        end = self.end(side, meta, device)
        if not context.on:
            return DensePlan(end, meta, context, device)
        if method.looks_at_gradients and isinstance(self.partner, MemoryEndpoint):
            # What an activation's sender knows of gradients is what it has received.
            known = partial(self.partner.remembered, side.other, meta, device)
            context = context._replace(gradients=known)
        if context.num_rows is not None and method.rows_wait:
            inner = InRows(method.inner, context.num_rows)
            method = replace(method, inner=inner)  # type: ignore[type-var]
        return MemoryPlan(method, end, meta, context, device)

    def _scaled(self, context: MessageContext) -> MessageContext:
        """The context in the units that the memory keeps its state in."""
        if not self.method.lr_scaled:
            return context
        if not context.lr:
            raise ValueError(
                f"{self.method} keeps its residual in units of the learning rate, which this "
                f"pipeline does not know (lr={context.lr}): call pipe.follow(optimizer)"
            )
        return context._replace(unit=context.unit / context.lr)

    def check(self, context_of: Callable[[int], MessageContext], sizes: Sequence[int]) -> None:
        for microbatch, num_rows in enumerate(sizes):
            self.method.slots(self._scaled(context_of(microbatch)), num_rows)

    def remembered(
        self, side: Side, meta: TensorMeta, device: torch.device, keys: Sequence[Key]
    ) -> Tensor:
        """The estimates of slots at an end, as the steps before have left them: fp32 [slots, n].

        Args:
            side: the end.
            meta: of a message.
            device: of the end.
            keys: of the slots; one that has no estimate has zeros.
        """
        return self.end(side, meta, device).estimates(keys)

    def measured(self, x: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        if not isinstance(plan, MemoryPlan):  # the step sends dense, and is measured all the same
            end = self.end(Side.SENDER, plan.meta, x.device)
            context = self._scaled(plan.context)
            plan = MemoryPlan(self.method, end, plan.meta, context, x.device)
        return plan.measured(x)

    # -- what is kept ---------------------------------------------------------------------------

    @property
    def ends(self) -> Mapping[str, EndState]:
        return {side.value: self._held.ends[side] for side in Side if side in self._held.ends}

    def end(self, side: Side, meta: TensorMeta, device: torch.device) -> EndState:
        """The end of one side for tensors of ``meta``'s per-sample shape."""
        self._adopt(meta)
        if side not in self._held.ends:
            self._held.ends[side] = end_of(self._memory, side, meta, device)
        return self._held.ends[side]

    def prefetch(self, ids: Sequence[SampleIds]) -> None:
        for end in self._held.ends.values():
            if end.fields:
                known = next(iter(end.fields.values())).known
                end.prefetch(self._memory.keys_to_come(each, known) for each in ids)

    def _adopt(self, meta: TensorMeta) -> None:
        sample = _sample_of(meta)
        if sample == self._held.sample:
            return
        if self._held.sample is not None and self._former is None:
            self._former = self._held
            if self._memory.by_sample:
                warnings.warn(
                    f"{self._memory}: samples of shape {list(sample.shape[1:])} come after those "
                    f"of {list(self._held.sample.shape[1:])}, so what was kept of all samples is "
                    "dropped and they go raw again; pad all batches to one length",
                    stacklevel=2,
                )
        self._held = _Held(sample)

    def commit(self) -> None:
        self._former = None
        for end in self._held.ends.values():
            end.commit()

    def discard(self, *, unused: bool = False) -> None:
        if self._former is not None:
            self._held, self._former = self._former, None
        for end in self._held.ends.values():
            end.discard()
        if unused:  # lets go of ends that keep nothing, as of those that were made for no message
            held = {side: end for side, end in self._held.ends.items() if end.num_slots}
            self._held = _Held(self._held.sample, held) if held else _Held()

    def copies(self, side: Side) -> Iterator[tuple[Sequence[str], Tensor]]:
        if side in self._held.ends:
            for keys, rows in self._held.ends[side].copies():
                yield [str(key[0] if len(key) == 1 else key) for key in keys], rows

    def state_size(self, side: Side, meta: TensorMeta, num_samples: int | None) -> list[StateSize]:
        # Without rows an end is the same on any device, and this one is never written to.
        end = end_of(self._memory, side, meta, torch.device("cpu"))
        if not end.fields:
            return []
        by_sample = num_samples is not None and self._memory.by_sample
        wanted = num_samples if by_sample else meta.num_rows
        assert wanted is not None
        rows = wanted if end.max_rows is None else min(wanted, end.max_rows)
        return [StateSize(rows, end.row_bytes, rows < wanted, end.location)]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for role, end in self.ends.items():
            state.update({f"{role}.{key}": value for key, value in end.state_dict().items()})
        if state:
            assert self._held.sample is not None
            sample = self._held.sample
            state["sample"] = {"shape": list(sample.shape), "channels_last": sample.channels_last}
        return state

    def load_state_dict(self, state: Mapping[str, Any], device: Mapping[str, torch.device]) -> None:
        self._held, self._former = _Held(), None
        if not state:
            return
        sample = state["sample"]
        meta = TensorMeta(tuple(sample["shape"]), torch.float32, sample["channels_last"])
        for side in Side:
            prefix = f"{side.value}."
            rows: dict[str, Tensor] = {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix)
            }
            if rows:
                self.end(side, meta, device[side.value]).load_state_dict(rows)


@functools.lru_cache(4096)
def _sample_of(meta: TensorMeta) -> TensorMeta:
    """One row of a tensor, whatever its dtype."""
    return replace(meta.with_rows(1), dtype=torch.float32)


class DensePlan(PlainPlan):
    """A message of training that goes as it is (warm-up, compression off), and tells the memory.

    It is whole, but what is kept for padded positions stays as it is.

    Args:
        end: what this end keeps.
        meta: the tensor.
        context: of the message.
        device: of the tensor.
    """

    def __init__(
        self, end: EndState, meta: TensorMeta, context: MessageContext, device: torch.device
    ) -> None:
        super().__init__(Identity(), meta, context, device)
        self._end = end
        self._all_padded = padded_positions(context.valid, meta, device)

    def encode(self, x: Tensor, *, asked: bool = False) -> Payload:
        payload = super().encode(x, asked=asked)
        self._observe(x)
        return payload

    def decode(self, payload: Payload) -> Tensor:
        x = super().decode(payload)
        self._observe(x)
        return x

    def _observe(self, x: Tensor) -> None:
        if not self._end.fields:
            return
        memory, context = self._end.memory, self.context
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
        device: torch.device,
    ) -> None:
        self.meta = meta
        self.context = context
        self._method = method
        self._end = end
        self._padded: Tensor | None = None
        if context.valid is not None:
            self._padded = padded_positions(context.valid, meta, device)
        self._device = device
        self._result: Tensor | None = None
        keys = method.slots(context, meta.num_rows)
        self._rows: list[_Rows] = []
        if end.estimate is None:
            self._add(False, keys, None)
        else:
            known = end.fields[end.estimate].known(keys)
            self.check = zlib.crc32(repr((list(keys), known)).encode()) ^ method.inner.check
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
        self.on_host = all(part.compressor.on_host for part in codings)

    def _add(self, first: bool, keys: Sequence[Key], rows: list[int] | None) -> None:
        """Plans the message of some rows, behind those that are planned already."""
        method, context = self._method, self.context
        meta, padded, index = self.meta, self._padded, None
        if rows is not None:
            meta, keys = meta.with_rows(len(rows)), [keys[row] for row in rows]
            index = to_device(torch.tensor(rows), self._device)
            padded = None if padded is None else padded[rows]
        coders = (method.first or Identity(),) if first else method.coders_of(keys, context, meta)
        parts = []
        for i, coder in enumerate(coders):
            coder = or_dense(coder, meta)
            name = "first" if first else str(i) if i or self._end.estimate is None else "later"
            parts.append(Coding(coder, meta, partial(context.draw, name), self._device))
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
        flat = self.meta.flatten(zero_padding(x, self._padded))
        payloads: list[Payload] = []
        results = []
        for rows in self._rows:
            own = rows.of(flat)
            encode = self._encode_first if rows.first else self._encode
            parts, result = encode(rows, own)
            payloads += parts
            results.append(result)
            if asked and self.context.sampled and self._method.by_sample and not rows.first:
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
        target = zero_padding(method.compensate(wide, state), rows.padded)
        payloads: list[Payload] = []
        said: list[Tensor] = []
        for i, part in enumerate(rows.parts):
            # Rounding to the tensor's dtype comes before compression, and what it takes away is
            # part of what is left, so that half precision loses nothing either.
            given = cast_saturating(method.part(i, x, target, said, state), x.dtype)
            given = rows.meta.unflatten(zero_padding(given, rows.padded))
            payload, decoded = part.round_trip(given, rows.meta.unflatten(x))
            said.append(rows.meta.flatten(decoded))
            payloads.append(payload)
        total = _sum(said)

        def positions() -> Tensor | None:
            return self._positions(rows, payloads)

        def without(y: Tensor) -> Tensor:
            return zero_padding(y - said_in_all, rows.padded)

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
        off = [zero_padding(x - each, rows.padded).flatten() for each in (before, now)]
        sums = [torch.dot(each, each) for each in (x.flatten(), *off)]
        stayed, there = before == now, torch.ones_like(now, dtype=torch.bool)
        counts = [zero_padding(each, rows.padded).sum() for each in (stayed, there)]
        return torch.stack([each.to(torch.float64) for each in (*sums, *counts)])

    def measured(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The target for ``x``, and the tensor that its error is compared with; both like it.

        A row without an estimate is taken for one with an estimate of zero, although it goes raw:
        that tells more of messages to come than that it leaves nothing out.
        """
        context = self.context
        state = self._end.open(
            self._method.slots(context, self.meta.num_rows),
            unit=context.unit,
            padded=self._padded,
            names=self._end.mirrored,
            stages=False,
        )
        x = zero_padding(x, self._padded)
        flat = self.meta.flatten(x).to(torch.float32)
        target = cast_saturating(self._method.compensate(flat, state), self.meta.dtype)
        target = self.meta.unflatten(zero_padding(target, self._padded))
        return target, target if self._end.estimate is None else x

    # -- the receiver ---------------------------------------------------------------------------

    def decode(self, payload: Payload) -> Tensor:
        payloads = iter(self._parts.parted(payload))
        results = []
        for rows in self._rows:
            results.append(self._decode(rows, [next(payloads) for _ in rows.parts]))
            rows.state.release()
        return zero_padding(self._tensor(self._joined(results)), self._padded)

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
        return zero_padding(self._tensor(self._result), self._padded)

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
        x = cast_saturating(flat, self.meta.dtype)
        return self.meta.unflatten(x.clone() if x is flat and self._end.fields else x)


def _sum(said: Sequence[Tensor]) -> Tensor:
    """Sum of decoded parts, in their dtype."""
    total = said[0]
    for part in said[1:]:
        wide = torch.promote_types(part.dtype, torch.float32)
        total = cast_saturating(total.to(wide) + part, part.dtype)
    return total
