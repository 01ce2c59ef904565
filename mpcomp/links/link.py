"""One direction of one cut: turns a tensor into a message and a message into a tensor.

A `Link` owns the endpoint of its method, the policy (when to send dense), the meter and the
randomness. It asks the endpoint what becomes of a tensor (`mpcomp.links.endpoints`), and leaves
messages to a channel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcomp.comm.channels import Channel
from mpcomp.compressors.base import Identity, shrinks
from mpcomp.compressors.rows import InRows
from mpcomp.core.bit_sum import bit_sum
from mpcomp.core.checks import check_tensor, has_nonfinite, nonfinite_error
from mpcomp.core.randomness import generator_for
from mpcomp.core.side_effects import way_back
from mpcomp.core.spec import SpecValue
from mpcomp.core.step import MessageContext, SampleIds, Step
from mpcomp.core.tensor_meta import TensorMeta, padded_positions, zero_padding
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
from mpcomp.feedback.memory import Side
from mpcomp.feedback.state import EndState
from mpcomp.links.endpoints import Endpoint, Plan, endpoint_of
from mpcomp.links.nonfinite import NonfiniteNotes
from mpcomp.links.warnings import LinkWarnings

__all__ = ["ACT", "GRAD", "Link"]

ACT, GRAD = "act", "grad"


#: Tensors of which ranks compare the layouts of messages.
_METAS = (TensorMeta((2, 24)), TensorMeta((4, 16, 256), torch.bfloat16))


class Link:
    """One direction of one cut.

    Args:
        method: what is done to the tensor.
        boundary: number of the cut.
        direction: "act" or "grad", or that of tied weights (`mpcomp.links.tied_weights`), whose
            gradients it carries.
        seed: of the run; random choices follow from (seed, replica, boundary, direction, step,
            microbatch).
        replica: number of the replica.
        warmup_steps: training steps that go dense at first.
        ends: the stages that send and receive; those on both sides of the cut by default.
        name: for messages; by default of the form ``boundary 0 act``.
        checked: whether each message has a sum over its bits, which the receiver compares.
        num_rows: of tensors whose rows are left out where they are zero (`InRows`), if the method
            has no need of them; None for tensors that go whole.

    Attributes:
        endpoint: what the method keeps here.
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
        self._seed = (seed, replica, boundary, direction)
        self.endpoint = endpoint_of(method)
        #: Whether channels are open for messages that may be shorter than both ends know ahead.
        self._may_vary = self.endpoint.varies
        #: The word that ``auto`` became here; empty where it was not asked.
        self.chosen = ""
        #: The link of the cut's other direction.
        self._other: Link | None = None
        self._nonfinite = NonfiniteNotes()
        self._warnings = LinkWarnings(self.name, method)
        #: Microbatches of which the open step of training has coded a message here.
        self._coded: set[int] = set()
        #: Plans of the step under way, by side and microbatch.
        self._step: Step | None = None
        self._plans: dict[tuple[Side, int], Plan] = {}

    def pair_with(self, other: Link) -> None:
        """Makes two links the directions of one cut, whose endpoints may look at each other."""
        self._other, other._other = other, self
        self._introduce()

    def _introduce(self) -> None:
        if self._other is not None:
            self.endpoint.partner = self._other.endpoint
            self._other.endpoint.partner = self.endpoint

    def become(self, method: SpecValue, chosen: str) -> None:
        """Takes another method between two steps, which remembers nothing of those before.

        Args:
            method: to be taken, at both ends.
            chosen: the word that stands for it.
        """
        self._take(method, endpoint_of(method), chosen)

    def _take(self, method: SpecValue, endpoint: Endpoint, chosen: str) -> None:
        assert self._may_vary or not endpoint.varies, "channels are open for the other"
        if method != self.method:
            self.method, self._warnings = method, LinkWarnings(self.name, method)
        self.endpoint, self.chosen = endpoint, chosen
        self._forget_plans()
        self._introduce()

    def copy_placement(self, other: Link) -> None:
        """Takes the place of another link between two stages."""
        self.on_wire, self.defers_nonfinite = other.on_wire, other.defers_nonfinite

    def fresh_copy(self) -> Link:
        """A link like this one that has sent nothing yet, beyond its warm-up."""
        seed, replica, boundary, direction = self._seed
        return Link(
            self.method,
            boundary=boundary,
            direction=direction,
            seed=seed,
            replica=replica,
            ends=(self.sender_stage, self.receiver_stage),
            name=self.name,
            checked=self.checked,
            num_rows=self.num_rows,
        )

    @property
    def ends(self) -> Mapping[str, EndState]:
        """The ends made so far, by role; a method that remembers nothing has none."""
        return self.endpoint.ends

    def check_step(self, step: Step, sizes: Sequence[int]) -> None:
        """Raises what a message of this step would raise, before anything has run.

        Args:
            step: the step to come.
            sizes: rows of its microbatches.

        Raises:
            ValueError: the method needs sample ids of another form, or a learning rate.
        """
        if step.train:
            self.endpoint.check(partial(self._context, step), sizes)

    def encode(self, x: Tensor, step: Step, microbatch: int) -> Tensor:
        """The message for ``x``: uint8 [n] on its device, or on the host if it was coded there.

        A compressed message carries zeros where the step's batch is padded.

        Args:
            x: activation or gradient of one microbatch.
            step: the step it belongs to.
            microbatch: number of the microbatch.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: an empty tensor, or sample ids that the method needs are missing.
            FloatingPointError: NaN or Inf (in a gradient only without a loss scaler).
        """
        begin = time.perf_counter()
        if not (x.is_floating_point() and x.numel()):
            check_tensor(x, self.name)  # says what is wrong
        status = self._check_finite(x, step)
        meta = TensorMeta.of(x)
        plan = self._plan(Side.SENDER, meta, step, microbatch, x.device)
        self._note_coded(step, microbatch)
        compared = plan.context.sampled and self._compares(step)
        other = self._other  # which may ask what has arrived: this end knows it from encoding
        told = other is not None and other.endpoint.follows and other.endpoint.asks_arrived
        asked = compared or (told and step.train)
        payload = plan.encode(x, asked=asked and not plan.dense)
        header = self._header(plan, step)
        message = frame(header, payload, variable=plan.variable, checked=self.checked)
        if status is not None:
            set_status(message, status)
        self._seal(message)
        self.endpoint.observe(x, message.numel(), plan)
        arrived = partial(_arrived, plan, payload, status)
        self._tell_other(Side.SENDER, plan, payload, arrived, step, microbatch)
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
        device: torch.device | None = None,
    ) -> Tensor:
        """The tensor like ``meta`` that a message says; all NaN if the sender saw NaN or Inf.

        Unless the message is dense it is exactly zero where the step's batch is padded.

        Args:
            message: uint8 [n], on the tensor's device or on the host.
            meta: of the tensor.
            step: that it belongs to.
            microbatch: likewise.
            device: of the tensor; None for the message's.

        Raises:
            RuntimeError: the message is not one that this end expects.
        """
        begin = time.perf_counter()
        device = device or message.device
        plan = self._plan(Side.RECEIVER, meta, step, microbatch, device)
        self._note_coded(step, microbatch)
        put = None if plan.on_host or message.device.type == device.type else device
        with self._naming(step, microbatch):
            payload = self._payload(message, plan, put)
            # Elsewhere reading the header would stall the device.
            if message.device.type == "cpu" or self.checked:
                self._check_header(Header.of(message), plan, step)
            x = plan.decode(payload)
        self.endpoint.hear(payload, plan)
        if message.device.type != "cpu":
            x.masked_fill_(status_of(message).bool(), torch.nan)
        elif status_of(message):
            x.fill_(torch.nan)
        # Also where the sender saw nothing: a damaged message may say anything.
        nonfinite = _has_nonfinite(x)
        if nonfinite is not None:
            self._nonfinite.add(self._traffic(step), nonfinite, counts=False)
        self._tell_other(Side.RECEIVER, plan, payload, lambda: x, step, microbatch)
        self._traffic(step).seconds += time.perf_counter() - begin
        return x

    def _tell_other(
        self,
        side: Side,
        plan: Plan,
        payload: Payload,
        arrived: Callable[[], Tensor],
        step: Step,
        microbatch: int,
    ) -> None:
        """Tells the endpoint of the cut's other direction, if it follows what crosses this way."""
        other = self._other
        if other is not None and other.endpoint.follows:
            context = other._context(step, microbatch)
            other.endpoint.crossed(side, plan, payload, arrived, context)

    def way_back(self) -> Callable[[], None]:
        """A function that makes the meter forget a message that has been encoded and not sent."""
        ways = [way_back(each) for each in (vars(self.meter.train), self._nonfinite.notes)]

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

    def nothing_bytes(self, meta: TensorMeta, step: Step, microbatch: int, channel: Channel) -> int:
        """Length of the message that says that there is no tensor to send; no memory changes."""
        if not channel.equal_lengths:
            return HEADER_BYTES
        plan = self._plan(Side.SENDER, meta, step, microbatch, channel.device)
        self.forget(Side.SENDER, microbatch)
        return self._message_bytes(plan)

    def count_nothing(self, step: Step, microbatch: int) -> None:
        """Meters the header that stands for a message, unless a tensor was sent."""
        if self.on_wire and microbatch not in self._coded:
            self._traffic(step).wire_bytes += HEADER_BYTES

    def _note_coded(self, step: Step, microbatch: int) -> None:
        if step.train:
            self._coded.add(microbatch)

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
            meant, arrived = zero_padding(meta.flatten(x), padded), zero_padding(arrived, padded)
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
    ) -> int:
        """Length of the message for a tensor like ``meta``, the most where it varies.

        It is known before there is one.

        Args:
            meta: what will be received.
            step: the step it belongs to.
            microbatch: number of the microbatch.
            device: where it will be received.
        """
        plan = self._plan(Side.RECEIVER, meta, step, microbatch, device)
        return self._message_bytes(plan)

    def _message_bytes(self, plan: Plan) -> int:
        return message_bytes(plan.layout, variable=plan.variable, checked=self.checked)

    @property
    def varies(self) -> bool:
        """Whether a message may be shorter than both ends know ahead."""
        return self._may_vary or self.num_rows is not None

    def room(self, meta: TensorMeta) -> int:
        """Bytes that are kept for a message, as it may be another than the one that is due.

        A transport may die of a message that is longer than its buffer; where messages are
        checked, one up to a dense one is taken, and refused by name.
        """
        return message_bytes((meta,), checked=True) if self.checked else 0

    def found_nonfinite(self, train: bool = True) -> bool:
        """Whether training (or evaluation) saw a non-finite tensor here since the last call.

        On an accelerator this waits for it.
        """
        return self._nonfinite.found(lambda traffic: (traffic is self.meter.train) == train)

    def warn_of_error(self, traffic: Traffic) -> None:
        """Warns, once, if what arrives is further from what was meant than nothing would be.

        A residual is sent later, and an unbiased code is right on average: gradients may well
        arrive so. An activation is used as it arrives.

        Args:
            traffic: of training or evaluation, as metered here so far.
        """
        if self.direction == ACT or not self.endpoint.makes_good:
            self._warnings.of_error(traffic)

    def warn_of_lag(self, traffic: Traffic) -> None:
        """Warns, once, if a memory lags further behind its samples than their first messages did.

        Args:
            traffic: of training, as metered here so far.
        """
        self._warnings.of_lag(traffic)

    def prefetch(self, ids: Sequence[SampleIds]) -> None:
        """Begins to read what the ends here will need for a step with these ids.

        Args:
            ids: of each microbatch.

        Raises:
            OSError: reading ahead failed since the last call.
        """
        self.endpoint.prefetch(ids)

    def commit(self) -> None:
        """Keeps what the step has noted."""
        if not self._coded:  # messages were expected, and none was coded: all stays as it was
            self.discard()
            return
        self._coded.clear()
        self._forget_plans()
        self.endpoint.commit()

    def discard(self) -> None:
        """Forgets what the step has noted."""
        self.endpoint.discard(unused=not self._coded)
        self._coded.clear()
        self._forget_plans()

    # -- plans --------------------------------------------------------------------------------

    def enabled(self, step: Step) -> bool:
        """Whether this link compresses in a step; an adaptive one may send dense all the same."""
        on = step.compress_act if self.direction == ACT else step.compress_grad
        return on and not (step.train and step.index < self.warmup_steps)

    def _forget_plans(self) -> None:
        self._step = None
        self._plans.clear()

    def forget(self, side: Side, microbatch: int) -> None:
        """Takes back the plan of a message that there is not."""
        self._plans.pop((side, microbatch), None)

    def _planned(self, side: Side, step: Step, microbatch: int) -> Plan:
        """The plan of a message that was coded here in this step."""
        assert step is self._step, "a message is asked about in its own step"
        return self._plans[side, microbatch]

    def _plan(
        self, side: Side, meta: TensorMeta, step: Step, microbatch: int, device: torch.device
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
            plan = self.endpoint.plan(side, meta, self._context(step, microbatch), device)
        self._plans[key] = plan
        return plan

    def _context(self, step: Step, microbatch: int) -> MessageContext:
        kind = "train" if step.train else "eval"
        again = ("call", step.call) if step.call else ()
        seed = (*self._seed, kind, step.index, microbatch, *again)
        return MessageContext(
            step.index,
            microbatch,
            lambda part: generator_for(*seed, part),
            step.ids_of(microbatch),
            1.0 if self.direction == ACT else step.loss_scale,
            step.valid_of(microbatch),
            train=step.train,
            on=self.enabled(step),
            sampled=step.samples(microbatch),
            lr=step.lr,
            num_rows=self.num_rows,
        )

    @property
    def format(self) -> list[int]:
        """Numbers that two ranks have in common if they would send the same bytes for a tensor.

        The methods' names are not all of it: of one name there may be code of two dates. Of each
        part of a message, layouts of a small tensor and a large one, and what headers are like.
        """
        coders = [*self.endpoint.coders]
        if self.num_rows is not None:
            coders.append(InRows(Identity(), self.num_rows))
        return [
            *FORMAT,
            *(
                layout_check((coder if shrinks(coder, meta) else Identity()).layout(meta))
                for coder in coders
                for meta in _METAS
            ),
        ]

    # -- metering and checks ------------------------------------------------------------------

    def _traffic(self, step: Step) -> Traffic:
        return self.meter.of(step.train, self.enabled(step))

    def _check_finite(self, x: Tensor, step: Step) -> Tensor | None:
        """The status byte as a 0-d tensor, or None for an all-clear on the CPU."""
        nonfinite = _has_nonfinite(x)
        if nonfinite is None:
            return None
        at_once = x.device.type == "cpu" and not self.defers_nonfinite
        if at_once and (self.direction == ACT or not step.scaled):
            self._traffic(step).nonfinite += 1
            raise nonfinite_error(self.name, step.index)
        self._nonfinite.add(self._traffic(step), nonfinite, counts=True)
        return nonfinite.to(torch.uint8)

    def _header(self, plan: Plan, step: Step, *, status: int = 0, checked: bool = False) -> Header:
        kind = DENSE if plan.dense else COMPRESSED
        check = plan.check ^ layout_check(plan.layout)
        return Header(kind, status, check, step.index & 0xFFFFFFFF, plan.cf, checked=checked)

    def _payload(self, message: Tensor, plan: Plan, device: torch.device | None = None) -> Payload:
        return unframe(
            message, plan.layout, variable=plan.variable, checked=self.checked, device=device
        )

    def _check_header(self, got: Header, plan: Plan, step: Step) -> None:
        expected = self._header(plan, step, status=got.status, checked=self.checked)
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

        Of the open step's messages, as the steps before it have left that; zero of an end that is
        not here.
        """
        sums = [bit_sum(rows).cpu() for _, rows in self.endpoint.copies(side)]
        return bit_sum(torch.stack(sums)) if sums else torch.zeros((), dtype=torch.int64)

    def bits_by_slot(self, side: Side) -> dict[str, int]:
        """As `bits`, by the name of what is kept, such as a slot's key."""
        return {
            name: int(bit_sum(row))
            for names, rows in self.endpoint.copies(side)
            for name, row in zip(names, rows, strict=True)
        }

    # -- persistence --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the endpoint keeps."""
        return self.endpoint.state_dict()

    def load_state_dict(self, state: dict[str, Any], device: dict[str, torch.device]) -> None:
        """Restores `state_dict`; ``device`` says where each role's end lives."""
        self.restored(state, device)()

    def restored(
        self,
        state: dict[str, Any],
        device: dict[str, torch.device],
        going_on: tuple[SpecValue, str] | None = None,
    ) -> Callable[[], None]:
        """Makes a new endpoint from a `state_dict`; gives what puts it in the present one's place.

        Until that is called nothing has changed.

        Args:
            state: to be restored.
            device: where each role's end lives.
            going_on: the method, and its word, that take the place of the present ones.

        Raises:
            ValueError, KeyError: it is the state of another method or of other tensors.
        """
        method, chosen = going_on or (self.method, self.chosen)
        endpoint = endpoint_of(method)
        endpoint.load_state_dict(state, device)
        return partial(self._take, method, endpoint, chosen)


def _arrived(plan: Plan, payload: Payload, status: Tensor | None) -> Tensor:
    """The tensor that the other end has of a message that was encoded here."""
    x = plan.arrived(payload)
    return x if status is None else x.masked_fill(status.bool(), torch.nan)


def _has_nonfinite(x: Tensor) -> Tensor | None:
    """Whether there is NaN or Inf, bool []; None for an all-clear on the CPU."""
    if x.device.type != "cpu":
        return has_nonfinite(x.detach())
    low, high = x.detach().aminmax()  # NaN passes through both
    # Operations of torch on single numbers take longer than the scan of a small message.
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return None
    return torch.ones((), dtype=torch.bool)
