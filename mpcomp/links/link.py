"""One direction of one cut: turns a tensor into a message and a message into a tensor.

A `Link` owns its method, the ends of it that live on this rank, the policy (when to send dense),
the meter and the randomness. Moving messages is left to a channel.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpcomp.comm.channels import Channel
from mpcomp.compressors.base import Compressor
from mpcomp.compressors.identity import Identity, or_dense, shrinks
from mpcomp.compressors.rows import InRows
from mpcomp.core.bit_sum import bit_sum
from mpcomp.core.checks import check_tensor, nonfinite_error
from mpcomp.core.padding import blanked, padded_positions
from mpcomp.core.randomness import generator_for
from mpcomp.core.side_effects import way_back
from mpcomp.core.spec import SpecValue
from mpcomp.core.step import Key, MessageContext, SampleIds, Step
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.traffic import Meter, Traffic
from mpcomp.core.wire import (
    COMPRESSED,
    DENSE,
    FORMAT,
    HEADER_BYTES,
    Header,
    Payload,
    frame,
    layout_check,
    message_bytes,
    seal,
    set_constant,
    set_status,
    status_of,
    unframe,
)
from mpcomp.feedback.base import Feedback
from mpcomp.feedback.ends import Ends
from mpcomp.feedback.memory import Side
from mpcomp.feedback.state import EndState
from mpcomp.links.endpoints.basis import Bases
from mpcomp.links.endpoints.memory import MemoryPlan, PlainPlan, Plan
from mpcomp.links.policy import Policy

__all__ = ["ACT", "GRAD", "Link"]

ACT, GRAD = "act", "grad"


#: Lag of a memory over the error of first messages, above which it is spoken of. Where elements
#: move slowly their error is even over a step, from -1/2 to 1/2 without a dead zone, as at first:
#: 1. With one of 0.7 it is so from -0.3 to 0.7: 1.2.
_MOST_LAG = 1.1
#: Elements that must have come again before it is: of few, chance decides.
_ENOUGH_ELEMENTS = 100_000
#: Tensors of which ranks compare the layouts of messages.
_METAS = (TensorMeta((2, 24)), TensorMeta((4, 16, 256), torch.bfloat16))


class _Note(NamedTuple):
    """A flag of the end of a step.

    Attributes:
        traffic: whose message it is.
        flag: whether there was NaN or Inf, bool [].
        counts: whether this is the sender's, which is counted.
    """

    traffic: Traffic
    flag: Tensor
    counts: bool


class Link:
    """One direction of one cut.

    Args:
        method: what is done to the tensor; SameIndices is resolved by the boundary.
        boundary: number of the cut.
        direction: "act" or "grad", or that of tied weights (`mpcomp.links.tied_weights`), whose
            gradients it carries.
        seed: of the run; random choices follow from (seed, replica, boundary, direction, step,
            microbatch).
        replica: number of the replica.
        warmup_steps: training steps that go dense at first.
        ends: the stages that send and receive; those on both sides of the cut by default.
        name: for messages; by default of the form ``boundary 0 act``.
        adaptive: what chooses the ratio of an adaptive method; None of others.
        checked: whether each message has a sum over its bits, which the receiver compares.
        num_rows: of tensors whose rows are left out where they are zero (`InRows`), if the method
            has no need of them; None for tensors that go whole.
    """

    def __init__(
        self,
        method: SpecValue,
        *,
        boundary: int,
        direction: str,
        seed: int = 0,
        replica: int = 0,
        warmup_steps: int = 0,
        ends: tuple[int, int] | None = None,
        name: str | None = None,
        adaptive: Policy | None = None,
        checked: bool = False,
        num_rows: int | None = None,
    ) -> None:
        self.method = method
        self.boundary = boundary
        self.direction = direction
        self.name = name or f"boundary {boundary} {direction}"
        across = (boundary, boundary + 1)
        self.sender_stage, self.receiver_stage = ends or (
            across if direction == ACT else across[::-1]
        )
        self.warmup_steps = warmup_steps
        self.checked = checked
        self.num_rows = num_rows
        self.meter = Meter()
        #: Whether messages leave the rank; if not they are coded all the same, but not counted.
        self.on_wire = True
        #: Whether NaN and Inf are noted for the end of the step also where an error could be
        #: raised at once: with several ranks, all of them must raise it.
        self.defers_nonfinite = False
        #: Whether this step notes whose slots its messages belong to, for `bits`.
        self.notes_slots = False
        self._noted: dict[Side, dict[int, tuple[EndState, list[Key]]]] = {}
        #: Of activations whose method looks at their gradients: the link that remembers these.
        self.gradients: Link | None = None
        self.adaptive = adaptive
        inner = method if adaptive is None else method.inner  # type: ignore[attr-defined]
        #: The feedback method, also of an adaptive link, whose ratio then is not the present one.
        self.feedback = inner if isinstance(inner, Feedback) else None
        self._seed = (seed, replica, boundary, direction)
        self._ends = Ends(self.feedback) if self.feedback is not None else None
        #: Of a method that learns a basis, what it has learned here, and how that begins.
        self._new_bases = partial(Bases, inner) if inner.learns_basis else None  # type: ignore[arg-type]
        self.bases = self._new_bases() if self._new_bases is not None else None
        self._nonfinite: list[_Note] = []
        self._has_warned = self._has_warned_of_lag = False
        #: Microbatches of which the open step of training has coded a message here.
        self._coded: set[int] = set()
        #: Plans of the step under way, by side and microbatch.
        self._step: Step | None = None
        self._plans: dict[tuple[Side, int], Plan] = {}

    def stand_where(self, other: Link) -> None:
        """Takes the place of another link between two stages."""
        self.on_wire, self.defers_nonfinite = other.on_wire, other.defers_nonfinite

    def renewed(self) -> Link:
        """A link like this one that has sent nothing yet, beyond its warm-up."""
        seed, replica, boundary, direction = self._seed
        link = Link(
            self.method,
            boundary=boundary,
            direction=direction,
            seed=seed,
            replica=replica,
            ends=(self.sender_stage, self.receiver_stage),
            name=self.name,
            adaptive=None if self.adaptive is None else self.adaptive.fresh(),
            checked=self.checked,
            num_rows=self.num_rows,
        )
        link.stand_where(self)
        return link

    @property
    def ends(self) -> dict[str, EndState]:
        """The ends made so far, by role; a method that remembers nothing has none."""
        return self._ends.by_role if self._ends is not None else {}

    def check_step(self, step: Step, sizes: Sequence[int]) -> None:
        """Raises what a message of this step would raise, before anything has run.

        Args:
            step: the step to come.
            sizes: rows of its microbatches.

        Raises:
            ValueError: the method needs sample ids of another form, or a learning rate.
        """
        if step.train and self.feedback is not None:
            for microbatch, num_rows in enumerate(sizes):
                self.feedback.slots(self._context(step, microbatch), num_rows)

    def encode(
        self, x: Tensor, step: Step, microbatch: int, positions: Tensor | None = None
    ) -> Tensor:
        """The message for ``x``: uint8 [n] on its device.

        A compressed message carries zeros where the step's batch is padded.

        Args:
            x: activation or gradient of one microbatch.
            step: the step it belongs to.
            microbatch: number of the microbatch.
            positions: for SameIndices, the elements that the activation's message carried.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: an empty tensor, or sample ids that the method needs are missing.
            FloatingPointError: NaN or Inf (in a gradient only without a loss scaler).
        """
        begin = time.perf_counter()
        check_tensor(x, self.name)
        status = self._check_finite(x, step)
        meta = TensorMeta.of(x)
        plan = self._plan(Side.SENDER, meta, step, microbatch, x.device, positions)
        self._note_coded(step, microbatch)
        compared = step.samples(microbatch) and self._compares(step)
        payload = plan.encode(x, asked=compared and not plan.dense)
        if self.adaptive is not None:
            self._measure(x, plan, step, microbatch)
        if self.bases is not None and self._learns(step):
            announces = self._announces(step, microbatch)
            self.bases.count(meta, announces=announces)
            if announces:
                self.bases.observe(self._blanked(x, step, microbatch))
        header = self._header(plan, step)
        message = frame(header, payload, variable=plan.variable, checked=self.checked)
        if status is not None:
            set_status(message, status)
        self._seal(message)
        if self.adaptive is not None and step.train and self.enabled(step):
            self.adaptive.note_message(message.numel(), meta)
        traffic = self._traffic(step)
        if self.on_wire:
            traffic.count(message.numel(), meta.dense_bytes, meta.numel)
        traffic.seconds += time.perf_counter() - begin
        return message

    def decode(
        self,
        message: Tensor,
        meta: TensorMeta,
        step: Step,
        microbatch: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The tensor like ``meta`` that a message says; all NaN if the sender saw NaN or Inf.

        Unless the message is dense it is exactly zero where the step's batch is padded.

        Raises:
            RuntimeError: the message is not one that this end expects.
        """
        begin = time.perf_counter()
        plan = self._plan(Side.RECEIVER, meta, step, microbatch, message.device, positions)
        self._note_coded(step, microbatch)
        with self._naming(step, microbatch):
            payload = self._payload(message, plan)
            # Elsewhere reading the header would stall the device.
            if message.device.type == "cpu" or self.checked:
                self._check_header(Header.of(message), plan, step)
            x = plan.decode(payload)
        if self.bases is not None and self._announces(step, microbatch):
            self.bases.hear(payload, meta)
        if message.device.type != "cpu":
            x.masked_fill_(status_of(message).bool(), torch.nan)
        elif status_of(message):
            x.fill_(torch.nan)
        # Also where the sender saw nothing: a damaged message may say anything.
        nonfinite = _has_nonfinite(x)
        if nonfinite is not None:
            self._nonfinite.append(_Note(self._traffic(step), nonfinite, counts=False))
        self._traffic(step).seconds += time.perf_counter() - begin
        return x

    def way_back(self) -> Callable[[], None]:
        """A function that makes the meter forget a message that has been encoded and not sent."""
        ways = [way_back(each) for each in (vars(self.meter.train), self._nonfinite)]

        def back() -> None:
            for each in ways:
                assert each is not None  # there is one for a dict, and for a list
                each()

        return back

    def mark_constant(self, message: Tensor) -> None:
        """Says in a message that was just encoded that no gradient of it is wanted."""
        set_constant(message)
        self._seal(message)

    def _seal(self, message: Tensor) -> None:
        if self.checked:
            seal(message)

    def weigh(self, gradient: Tensor, step: Step, microbatch: int) -> None:
        """Notes what came back for an activation that was sent here, where a basis follows it."""
        if self.method.weighs_by_gradients and self._announces(step, microbatch):
            assert self.bases is not None
            self.bases.weigh(self._blanked(gradient, step, microbatch))

    def _blanked(self, x: Tensor, step: Step, microbatch: int) -> Tensor:
        """A microbatch with zeros where it is padded."""
        padded = padded_positions(step.valid_of(microbatch), TensorMeta.of(x), x.device)
        return blanked(x.detach(), padded)

    def hand_over(
        self, x: Tensor, message: Tensor, channel: Channel, step: Step, microbatch: int
    ) -> None:
        """Sends the message that was just encoded for ``x``, and meters its fidelity.

        That is done in one microbatch a step, as it takes a decoding, and once the message is on
        its way, as nobody waits for it.
        """
        at = self.sender_stage, microbatch
        with step.during("send", *at, self.name, message.numel()):
            channel.send(microbatch, message)
        if step.samples(microbatch):
            with step.during("fidelity", *at, self.name):
                self.compare_sent(x, message, step, microbatch)

    def hand_over_nothing(
        self,
        meta: TensorMeta,
        channel: Channel,
        step: Step,
        microbatch: int,
        positions: Tensor | None = None,
    ) -> None:
        """Says that there is no tensor to send: no memory changes, and a header is metered."""
        num_bytes = HEADER_BYTES
        if channel.equal_lengths:
            plan = self._plan(Side.SENDER, meta, step, microbatch, channel.device, positions)
            num_bytes = self._message_bytes(plan)
            self._forget_plan(Side.SENDER, microbatch)
        with step.during("send", self.sender_stage, microbatch, self.name, HEADER_BYTES):
            channel.send_nothing(microbatch, num_bytes)
        self.count_nothing(step, microbatch)

    def count_nothing(self, step: Step, microbatch: int) -> None:
        """Meters the header that stands for a message, unless a tensor was sent."""
        if self.on_wire and microbatch not in self._coded:
            self._traffic(step).wire_bytes += HEADER_BYTES

    def _note_coded(self, step: Step, microbatch: int) -> None:
        if step.train:
            self._coded.add(microbatch)

    def take(self, channel: Channel, step: Step, microbatch: int) -> Tensor:
        """Waits for a message that was posted."""
        with step.during("receive", self.receiver_stage, microbatch, self.name):
            return channel.receive(microbatch)

    def take_any(self, channel: Channel, step: Step, microbatch: int) -> Tensor | None:
        """As `take`, where the sender may have nothing to send, which gives None."""
        with step.during("receive", self.receiver_stage, microbatch, self.name):
            message = channel.receive_any(microbatch)
        if message is None:
            self._forget_plan(Side.RECEIVER, microbatch)
        return message

    def compare(
        self, x: Tensor, arrived: Tensor, step: Step, microbatch: int | None = None
    ) -> None:
        """Meters the fidelity of what arrived for ``x``; dense messages arrive as they are.

        Only positions that count are compared, given the number of the microbatch.
        """
        if self._compares(step):
            meta = TensorMeta.of(x)  # memory order, which spares a transposition
            arrived = meta.flatten(arrived.to(x.device))
            valid = None if microbatch is None else step.valid_of(microbatch)
            padded = padded_positions(valid, meta, x.device)
            meant, arrived = blanked(meta.flatten(x), padded), blanked(arrived, padded)
            self._traffic(step).compare(meant, arrived)

    def _compares(self, step: Step) -> bool:
        """Whether messages of a step may arrive as another tensor than they were made from."""
        return self.enabled(step) and not self.method.sends_dense

    def compare_sent(self, x: Tensor, message: Tensor, step: Step, microbatch: int) -> None:
        """As `compare`, where ``x`` was just encoded here, whoever decodes it.

        Of a memory of samples, meters as well how far it lags behind them.
        """
        if self._compares(step):
            self.compare(x, self.arrived(message, step, microbatch), step, microbatch)
            if (lags := self._planned(Side.SENDER, step, microbatch).lags) is not None:
                self._traffic(step).follow(lags)

    def arrived(self, message: Tensor, step: Step, microbatch: int) -> Tensor:
        """The other end's tensor for a message that was encoded here in this step."""
        plan = self._planned(Side.SENDER, step, microbatch)
        return plan.arrived(self._payload(message, plan))

    def message_bytes(
        self,
        meta: TensorMeta,
        step: Step,
        microbatch: int,
        device: torch.device,
        positions: Tensor | None = None,
    ) -> int:
        """Length of the message for a tensor like ``meta``, the most where it varies.

        It is known before there is one.

        Args:
            meta: what will be received.
            step: the step it belongs to.
            microbatch: number of the microbatch.
            device: where it will be received.
            positions: for SameIndices, as in `encode`.
        """
        plan = self._plan(Side.RECEIVER, meta, step, microbatch, device, positions)
        return self._message_bytes(plan)

    def _message_bytes(self, plan: Plan) -> int:
        return message_bytes(plan.layout, variable=plan.variable, checked=self.checked)

    @property
    def varies(self) -> bool:
        """Whether a message may be shorter than both ends know ahead."""
        # Of a method that is neither, such as one whose ratio changes, nothing is known.
        return any(getattr(coder, "variable_length", True) for coder in self._coders)

    @property
    def _coders(self) -> tuple[Any, ...]:
        """Compressors of the parts of a message."""
        coders: tuple[Any, ...] = (self.method,)
        if self.feedback is not None:
            coders = (*self.feedback.coders, self.feedback.first or Identity())
        if self.num_rows is not None:
            coders = (*coders, InRows(Identity(), self.num_rows))
        return coders

    def room(self, meta: TensorMeta) -> int:
        """Bytes that are kept for a message, as it may be another than the one that is due.

        A transport may die of a message that is longer than its buffer; where messages are
        checked, one up to a dense one is taken, and refused by name.
        """
        return message_bytes((meta,), checked=True) if self.checked else 0

    def carried(self, side: Side, message: Tensor, step: Step, microbatch: int) -> Tensor | None:
        """Positions of the elements in a message, for SameIndices; None if it is dense."""
        plan = self._planned(side, step, microbatch)
        return plan.positions(self._payload(message, plan))

    def found_nonfinite(self, train: bool = True) -> bool:
        """Whether training (or evaluation) saw a non-finite tensor here since the last call.

        On an accelerator this waits for it.
        """
        noted: list[_Note] = []
        kept: list[_Note] = []
        for note in self._nonfinite:
            (noted if (note.traffic is self.meter.train) == train else kept).append(note)
        self._nonfinite = kept
        if not noted:
            return False
        flags = torch.stack([note.flag.to(noted[0].flag.device) for note in noted]).tolist()
        for note, flag in zip(noted, flags, strict=True):
            note.traffic.nonfinite += flag and note.counts
        return any(flags)

    def warn_of_error(self, traffic: Traffic) -> None:
        """Warns, once, if what arrives is further from what was meant than nothing would be.

        A residual is sent later, and an unbiased code is right on average: gradients may well
        arrive so. An activation is used as it arrives.

        Args:
            traffic: of training or evaluation, as metered here so far.
        """
        made_good = self.feedback is not None or getattr(self.method, "is_unbiased", False)
        if self._has_warned or (made_good and self.direction != ACT):
            return
        error = traffic.relative_error
        if error > 1.01:  # not for rounding's sake
            self._has_warned = True
            warnings.warn(
                f"{self.name}: with {self.method} what arrives is wrong by {error:.3g} of its norm "
                "(zeros would be wrong by 1): the model gets noise here. "
                "Outliers take a scale that all elements share: give each token or group one "
                "(quant:8:scale=token, step:0.3), use more bits or a larger share, or send this "
                "link uncompressed (None)",
                stacklevel=2,
            )

    def warn_of_lag(self, traffic: Traffic) -> None:
        """Warns, once, if a memory lags further behind its samples than their first messages did.

        A message of a sample that comes again may leave out half a step of an element, as its first
        one did: then both are as near. With a dead zone more is left out, and the same each time.

        Args:
            traffic: of training, as metered here so far.
        """
        if self._has_warned_of_lag or traffic.lags is None or traffic.lags[-1] < _ENOUGH_ELEMENTS:
            return
        lag, first = traffic.lag, traffic.first_error
        if not lag or not first or lag <= _MOST_LAG * first:
            return
        self._has_warned_of_lag = True
        assert traffic.stayed is not None
        warnings.warn(
            f"{self.name}: with {self.method} what is remembered lags {lag:.3g} of its norm behind "
            f"samples that come again, and their first messages were wrong by {first:.3g}: "
            f"messages left {traffic.stayed:.2%} of it as it was, so stages are trained on what "
            "samples were, which validation never sees. Leave the dead zone out of the step "
            "(dead_zone=0.5), or take a finer one",
            stacklevel=2,
        )

    def prefetch(self, ids: Sequence[SampleIds]) -> None:
        """Begins to read what the ends here will need for a step with these ids.

        Args:
            ids: of each microbatch.

        Raises:
            OSError: reading ahead failed since the last call.
        """
        if self._ends is not None:
            self._ends.prefetch(ids)

    def commit(self) -> None:
        """Keeps what the ends have staged."""
        if not self._coded:  # messages were expected, and none was coded: all stays as it was
            self.discard()
            return
        self._coded.clear()
        self._forget_plans()
        for kept in self._kept():
            kept.commit()

    def discard(self) -> None:
        """Forgets what the ends have staged."""
        for kept in self._kept():
            kept.discard()
        if not self._coded and self._ends is not None:
            self._ends.drop_empty()
        self._coded.clear()
        self._forget_plans()

    def _kept(self) -> list[Ends | Bases]:
        """All that is kept from step to step."""
        return [kept for kept in (self._ends, self.bases) if kept is not None]

    # -- plans --------------------------------------------------------------------------------

    def enabled(self, step: Step) -> bool:
        """Whether this link compresses in a step; an adaptive one may send dense all the same."""
        on = step.compress_act if self.direction == ACT else step.compress_grad
        return on and not (step.train and step.index < self.warmup_steps)

    def _forget_plans(self) -> None:
        self._step = None
        self._plans.clear()
        self._noted.clear()

    def _forget_plan(self, side: Side, microbatch: int) -> None:
        """Takes back the plan of a message that there is not."""
        self._plans.pop((side, microbatch), None)
        self._noted.get(side, {}).pop(microbatch, None)

    def _planned(self, side: Side, step: Step, microbatch: int) -> Plan:
        """The plan of a message that was coded here in this step."""
        assert step is self._step, "a message is asked about in its own step"
        return self._plans[side, microbatch]

    def _plan(
        self,
        side: Side,
        meta: TensorMeta,
        step: Step,
        microbatch: int,
        device: torch.device,
        positions: Tensor | None,
    ) -> Plan:
        """The plan of a message, made once: by a receiver when it posts its buffer."""
        if step is not self._step:
            self._forget_plans()
            self._step = step
        key = side, microbatch
        plan = self._plans.pop(key, None)
        if plan is None or plan.meta != meta or side is Side.SENDER:
            if side is Side.SENDER:  # of what was sent only the last message is asked about
                for sent in [sent for sent in self._plans if sent[0] is side]:
                    del self._plans[sent]
            plan = self._new_plan(side, meta, step, microbatch, device, positions)
        self._plans[key] = plan
        return plan

    def _new_plan(
        self,
        side: Side,
        meta: TensorMeta,
        step: Step,
        microbatch: int,
        device: torch.device,
        positions: Tensor | None,
    ) -> Plan:
        context = self._context(step, microbatch)
        padded = padded_positions(context.valid, meta, device)
        end = None
        if self._ends is not None and step.train:
            end = self._ends.end(side, meta, device)
            if self.gradients is not None:
                # What an activation's sender knows of gradients is what it has received.
                known = partial(self.gradients.remembered, side.other, meta, device)
                context = replace(context, gradients=known)
            if self.notes_slots and end.estimate is not None:
                assert self.feedback is not None
                keys = list(self.feedback.slots(context, meta.num_rows))
                self._noted.setdefault(side, {})[microbatch] = end, keys
        coder = self._in_rows(self._coder(side, meta, step, microbatch, positions))
        if isinstance(coder, Feedback):
            if end is not None:
                return MemoryPlan(coder, end, meta, context, padded, device)
            coder = coder.evaluation
        return PlainPlan(or_dense(coder, meta), meta, context, padded, end)

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
        assert self._ends is not None
        return self._ends.end(side, meta, device).estimates(keys)

    def _coder(
        self, side: Side, meta: TensorMeta, step: Step, microbatch: int, positions: Tensor | None
    ) -> Compressor | Feedback:
        """Coder of a message."""
        if not self.enabled(step):
            return Identity()
        if self.adaptive is not None:
            return self.adaptive.coder
        if self.bases is not None:
            return self.bases.coder(side, meta, announces=self._announces(step, microbatch))
        method: Any = self.method
        if method.reuses_selection:
            method = Identity() if positions is None else method.at(positions)
        assert isinstance(method, Compressor | Feedback)
        return method

    def _in_rows(self, coder: Compressor | Feedback) -> Compressor | Feedback:
        """A coder that leaves out rows that are zero, where there may be any."""
        if self.num_rows is None:
            return coder
        if isinstance(coder, Compressor):
            return InRows(coder, self.num_rows)
        if coder.rows_wait:
            inner = InRows(coder.inner, self.num_rows)
            return replace(coder, inner=inner)  # type: ignore[type-var]
        return coder

    def _learns(self, step: Step) -> bool:
        """Whether a basis is learned from the messages of a step."""
        return step.train and self.enabled(step)

    def _announces(self, step: Step, microbatch: int) -> bool:
        """Whether a message is looked at for that, and may bring a new one."""
        return self._learns(step) and step.samples(microbatch)

    def _context(self, step: Step, microbatch: int) -> MessageContext:
        kind = "train" if step.train else "eval"
        again = ("call", step.call) if step.call else ()
        seed = (*self._seed, kind, step.index, microbatch, *again)
        unit = 1.0 if self.direction == ACT else step.loss_scale
        if self.feedback is not None and self.feedback.lr_scaled and step.train:
            if not step.lr:
                raise ValueError(
                    f"{self.method} keeps its residual in units of the learning rate, which this "
                    f"pipeline does not know (lr={step.lr}): call pipe.follow(optimizer)"
                )
            unit /= step.lr
        return MessageContext(
            step.index,
            microbatch,
            lambda part: generator_for(*seed, part),
            step.ids_of(microbatch),
            unit,
            step.valid_of(microbatch),
        )

    @property
    def format(self) -> list[int]:
        """Numbers that two ranks have in common if they would send the same bytes for a tensor.

        The methods' names are not all of it: of one name there may be code of two dates. Of each
        part of a message, layouts of a small tensor and a large one, and what headers are like.
        """
        plain = [coder for coder in self._coders if isinstance(coder, Compressor)]
        return [
            *FORMAT,
            *(
                layout_check((coder if shrinks(coder, meta) else Identity()).layout(meta))
                for coder in plain
                for meta in _METAS
            ),
        ]

    # -- metering and checks ------------------------------------------------------------------

    def _traffic(self, step: Step) -> Traffic:
        return self.meter.of(step.train, self.enabled(step))

    def _measure(self, x: Tensor, plan: Plan, step: Step, microbatch: int) -> None:
        """Measures what compression would leave out of ``x``, in one microbatch of a step."""
        policy = self.adaptive
        assert policy is not None
        if not (step.train and self.enabled(step) and policy.measures_energies):
            return
        if not step.samples(microbatch):
            return
        context = self._context(step, microbatch)
        padded = padded_positions(context.valid, plan.meta, x.device)
        x = blanked(x.detach(), padded)
        target = against = x
        if self._ends is not None:
            assert self.feedback is not None
            if not isinstance(
                plan, MemoryPlan
            ):  # the step sends dense, and is measured all the same
                end = self._ends.end(Side.SENDER, plan.meta, x.device)
                plan = MemoryPlan(self.feedback, end, plan.meta, context, padded, x.device)
            target, against = plan.measured(x)
        policy.note_energies(target, against, padded, context.draw)

    def _check_finite(self, x: Tensor, step: Step) -> Tensor | None:
        """The status byte as a 0-d tensor, or None for an all-clear on the CPU."""
        nonfinite = _has_nonfinite(x)
        if nonfinite is None:
            return None
        at_once = x.device.type == "cpu" and not self.defers_nonfinite
        if at_once and (self.direction == ACT or not step.scaled):
            self._traffic(step).nonfinite += 1
            raise nonfinite_error(self.name, step.index)
        self._nonfinite.append(_Note(self._traffic(step), nonfinite, counts=True))
        return nonfinite.to(torch.uint8)

    def _header(self, plan: Plan, step: Step) -> Header:
        """The header of a message without a status."""
        cf = 0.0
        if self.adaptive is not None and not plan.dense:
            cf = self.adaptive.cf
        kind = DENSE if plan.dense else COMPRESSED
        check = plan.check ^ layout_check(plan.layout)
        return Header(kind, 0, check, step.index & 0xFFFFFFFF, cf)

    def _payload(self, message: Tensor, plan: Plan) -> Payload:
        return unframe(message, plan.layout, variable=plan.variable, checked=self.checked)

    def _check_header(self, got: Header, plan: Plan, step: Step) -> None:
        expected = replace(self._header(plan, step), status=got.status, checked=self.checked)
        if got != expected:
            raise RuntimeError(
                f"the two ends disagree (message says {got}, this end expects {expected})"
            )

    @contextmanager
    def _naming(self, step: Step, microbatch: int) -> Iterator[None]:
        """Names the message in errors that are raised of it."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            raise RuntimeError(
                f"{self.name}, step {step.index}, microbatch {microbatch}, from stage "
                f"{self.sender_stage}: {error}"
            ) from error

    # -- copies of both ends --------------------------------------------------------------------

    def bits(self, side: Side) -> Tensor:
        """A sum over the bits of what an end here has kept, as the other end has; int64 [].

        Of the slots of the open step's messages, as the steps before it have left them, if
        `notes_slots` was set before it; zero of an end that is not here.
        """
        sums = [bit_sum(rows) for rows in self._kept_rows(side)]
        if self.bases is not None:
            sums.append(torch.tensor(self.bases.check(side)))
        if not sums:
            return torch.zeros((), dtype=torch.int64)
        return bit_sum(torch.stack([each.cpu() for each in sums]))

    def bits_by_slot(self, side: Side) -> dict[str, int]:
        """As `bits`, by the slot's key; "basis" for a basis."""
        found: dict[str, int] = {}
        slots = (keys for _, (_, keys) in sorted(self._noted.get(side, {}).items()))
        for keys, rows in zip(slots, self._kept_rows(side), strict=True):
            found |= {
                str(key[0] if len(key) == 1 else key): int(bit_sum(row))
                for key, row in zip(keys, rows, strict=True)
            }
        if self.bases is not None:
            found["basis"] = self.bases.check(side)
        return found

    def _kept_rows(self, side: Side) -> Iterator[Tensor]:
        """Estimates of each microbatch's slots at an end, fp32 [rows, n]."""
        for _, (end, keys) in sorted(self._noted.get(side, {}).items()):
            yield end.estimates(keys)

    # -- persistence --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that each end keeps, the sample shape that rows belong to, and what is adapted."""
        state: dict[str, Any] = {}
        for kept in self._kept():
            state |= kept.state_dict()
        if self.adaptive is not None:
            state["adaptive"] = self.adaptive.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], device: dict[str, torch.device]) -> None:
        """Restores `state_dict`; ``device`` says where each role's end lives."""
        self.restored(state, device)()

    def restored(
        self, state: dict[str, Any], device: dict[str, torch.device]
    ) -> Callable[[], None]:
        """Makes new ends from a `state_dict`; gives what puts them in place of the present ones.

        Until that is called nothing has changed.

        Args:
            state: to be restored.
            device: where each role's end lives.

        Raises:
            ValueError, KeyError: it is the state of another method or of other tensors.
        """
        rows = {name: value for name, value in state.items() if name != "adaptive"}
        ends = Ends(self.feedback) if self.feedback is not None else None
        if ends is not None:
            ends.load_state_dict(rows, device)
        bases = self._new_bases() if self._new_bases is not None else None
        if bases is not None:
            bases.load_state_dict(rows)
        adaptive = self.adaptive.fresh() if self.adaptive is not None else None
        if adaptive is not None and "adaptive" in state:
            adaptive.load_state_dict(state["adaptive"])

        def put() -> None:
            self._forget_plans()
            self._ends, self.bases, self.adaptive = ends, bases, adaptive

        return put


def _has_nonfinite(x: Tensor) -> Tensor | None:
    """Whether there is NaN or Inf, bool []; None for an all-clear on the CPU."""
    low, high = x.detach().aminmax()  # NaN passes through both
    if x.device.type != "cpu":
        return ~(low.isfinite() & high.isfinite())
    # Operations of torch on single numbers take longer than the scan of a small message.
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return None
    return torch.ones((), dtype=torch.bool)
