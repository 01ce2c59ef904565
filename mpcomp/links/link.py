"""One direction of one cut: turns a tensor into a message and a message into a tensor.

A `Link` owns the endpoint of its method, the policy (when to send dense), the meter and the
randomness. It asks the endpoint what becomes of a tensor (`mpcomp.links.endpoints`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mpcomp.core.checks import check_tensor, has_nonfinite, nonfinite_error
from mpcomp.core.context import MessageContext, Step, TensorMeta
from mpcomp.core.spec import SpecValue
from mpcomp.core.traffic import Meter
from mpcomp.core.wire import HEADER_BYTES, Payload, apply_status
from mpcomp.feedback.memory import Side
from mpcomp.links.endpoints import Endpoint, Plan, Plans, endpoint_of
from mpcomp.links.nonfinite import NonfiniteNotes
from mpcomp.links.warnings import LinkWarnings

__all__ = ["ACT", "GRAD", "Link"]

ACT, GRAD = "act", "grad"


class Link:
    """One direction of one cut.

    Args:
        method: what is done to the tensor.
        boundary: number of the cut.
        direction: "act", "grad", or one of `mpcomp.links.tied_weights` for their gradients.
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
        nonfinite: what was seen of NaN and Inf, and not yet read.
        warnings: of messages that are no use.
        chosen: the word that ``auto`` became here; empty where it was not asked.
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
        across = (boundary, boundary + 1) if direction == ACT else (boundary + 1, boundary)
        self.sender_stage, self.receiver_stage = ends or across
        self.warmup_steps = warmup_steps
        self.checked = checked
        self.num_rows = num_rows
        self.meter = Meter()
        #: Whether messages leave the rank; if not they are coded all the same, but not counted.
        self.on_wire = True
        #: Whether NaN and Inf are noted for the end of the step also where an error could be
        #: raised at once: with several ranks, all of them must raise it.
        self.defers_nonfinite = False
        #: What random choices follow from, beside the message.
        self.seed = (seed, replica, boundary, direction)
        self.endpoint = endpoint_of(method)
        #: Whether channels are open for messages that may be shorter than both ends know ahead.
        self._may_vary = self.endpoint.varies
        self.chosen = ""
        #: The link of the cut's other direction.
        self._other: Link | None = None
        self.nonfinite = NonfiniteNotes(self.meter)
        self.warnings = self._new_warnings(method, self.endpoint)
        #: Microbatches of which the open step of training has coded a message here.
        self._coded: set[int] = set()
        self.plans = Plans(self._plan)

    def _new_warnings(self, method: SpecValue, endpoint: Endpoint) -> LinkWarnings:
        later = self.direction != ACT and endpoint.makes_good
        return LinkWarnings(self.name, method, makes_good=later)

    def pair_with(self, other: Link) -> None:
        """Makes two links the directions of one cut, whose endpoints may look at each other."""
        self._other, other._other = other, self
        self._introduce()

    def _introduce(self) -> None:
        if self._other is not None:
            self.endpoint.partner = self._other.endpoint
            self._other.endpoint.partner = self.endpoint

    def become(self, method: SpecValue, chosen: str, endpoint: Endpoint | None = None) -> None:
        """Takes another method between two steps.

        Args:
            method: to be taken, at both ends.
            chosen: the word that stands for it.
            endpoint: of the method; by default one that remembers nothing of the steps before.
        """
        endpoint = endpoint or endpoint_of(method)
        assert self._may_vary or not endpoint.varies, "channels are open for the other"
        if method != self.method:
            self.warnings = self._new_warnings(method, endpoint)
        self.method, self.endpoint, self.chosen = method, endpoint, chosen
        self._enter(None)
        self._introduce()

    def copy_placement(self, other: Link) -> None:
        """Takes the place of another link between two stages."""
        self.on_wire, self.defers_nonfinite = other.on_wire, other.defers_nonfinite

    def check_step(self, step: Step, sizes: Sequence[int]) -> None:
        """Raises the ValueError that a message of this step would, before anything has run.

        Args:
            step: the step to come.
            sizes: rows of its microbatches.
        """
        if step.train:
            self.endpoint.check(partial(self._context, step), sizes)

    def encode(self, x: Tensor, step: Step, microbatch: int) -> Tensor:
        """The message for ``x``: uint8 [n] on its device, or on the host if it was coded there.

        A compressed message carries zeros where the step's batch is padded.

        Args:
            x: activation or gradient of one microbatch.
            step: that it belongs to.
            microbatch: likewise.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: an empty tensor, or sample ids that the method needs are missing.
            FloatingPointError: NaN or Inf (in a gradient only without a loss scaler).
        """
        begin = time.perf_counter()
        if not (x.is_floating_point() and x.numel()):
            check_tensor(x, self.name)  # says what is wrong
        self._enter(step)
        status = self._check_finite(x, step)
        plan = self.plans.to_send(TensorMeta.of(x), microbatch, x.device)
        plan.status = status
        if step.train:
            self._coded.add(microbatch)
        other = self._other  # which may ask what has arrived: this end knows it from encoding
        told = other is not None and other.endpoint.follows and other.endpoint.asks_arrived
        asked = (plan.context.sampled and self._compares) or (told and step.train)
        payload = plan.encode(x, asked=asked and not plan.dense)
        message = plan.form.frame(plan.header, payload, status)
        self.endpoint.observe(x, message.numel(), plan)
        self._tell_other(Side.SENDER, plan, payload, partial(plan.as_told, payload), step)
        if self.on_wire:
            self._traffic.count(message.numel(), plan.meta.dense_bytes, plan.meta.numel)
        self._traffic.seconds += time.perf_counter() - begin
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
        self._enter(step)
        plan = self.plans.due(meta, microbatch, device)
        if step.train:
            self._coded.add(microbatch)
        put = None if plan.on_host or message.device.type == device.type else device
        try:
            payload = plan.form.payload(message, plan.header, put)
            x = plan.decode(payload)
        except (RuntimeError, ValueError, IndexError) as error:
            raise RuntimeError(
                f"{self.name}, step {step.index}, microbatch {microbatch}, from stage "
                f"{self.sender_stage}: {error}"
            ) from error
        self.endpoint.hear(payload, plan)
        apply_status(message, x)
        # Also where the sender saw nothing: a damaged message may say anything.
        if (nonfinite := _has_nonfinite(x)) is not None:
            self.nonfinite.add(self._traffic, nonfinite, counts=False)
        self._tell_other(Side.RECEIVER, plan, payload, lambda: x, step)
        self._traffic.seconds += time.perf_counter() - begin
        return x

    def _tell_other(
        self, side: Side, plan: Plan, payload: Payload, arrived: Callable[[], Tensor], step: Step
    ) -> None:
        """Tells the endpoint of the cut's other direction, if it follows what crosses this way."""
        other = self._other
        if other is not None and other.endpoint.follows:
            context = other._context(step, plan.context.microbatch)
            other.endpoint.crossed(side, plan, payload, arrived, context)

    def count_nothing(self, step: Step, microbatch: int) -> None:
        """Meters the header that stands for a message, unless a tensor was sent."""
        self._enter(step)
        if self.on_wire and microbatch not in self._coded:
            self._traffic.wire_bytes += HEADER_BYTES

    def compare_sent(self, x: Tensor, message: Tensor, step: Step, microbatch: int) -> None:
        """Meters the fidelity of what arrives for ``x``, which was just encoded, whoever decodes.

        Only positions that count are compared. Of a memory of samples, its lag is metered, too.
        """
        if self._compares:
            plan = self.plans.last_sent(step, microbatch)
            both = x, self.arrived(message, step, microbatch).to(x.device)
            self._traffic.compare(*map(plan.without_padding, both))
            if plan.lags is not None:
                self._traffic.follow(plan.lags)

    def arrived(self, message: Tensor, step: Step, microbatch: int) -> Tensor:
        """The other end's tensor for the last message that was encoded here, in this step."""
        plan = self.plans.last_sent(step, microbatch)
        return plan.arrived(plan.form.payload(message))

    def message_bytes(
        self,
        meta: TensorMeta,
        step: Step,
        microbatch: int,
        device: torch.device,
        side: Side = Side.RECEIVER,
    ) -> int:
        """Length of a message before there is one, the most where it varies.

        Args:
            meta: of its tensor.
            step: that it belongs to.
            microbatch: likewise.
            device: of the end that asks.
            side: the end.
        """
        self._enter(step)
        plan = self.plans.due if side is Side.RECEIVER else self.plans.to_send
        return plan(meta, microbatch, device).form.num_bytes

    @property
    def varies(self) -> bool:
        """Whether a message may be shorter than both ends know ahead."""
        return self._may_vary or self.num_rows is not None

    def commit(self) -> None:
        """Keeps what the step has noted."""
        if not self._coded:  # messages were expected, and none was coded: all stays as it was
            self.discard()
            return
        self._coded.clear()
        self._enter(None)
        self.endpoint.commit()

    def discard(self) -> None:
        """Forgets what the step has noted."""
        self.endpoint.discard(unused=not self._coded)
        self._coded.clear()
        self._enter(None)

    def enabled(self, step: Step) -> bool:
        """Whether this link compresses in a step; an adaptive one may send dense all the same."""
        on = step.compress_act if self.direction == ACT else step.compress_grad
        return on and not (step.train and step.index < self.warmup_steps)

    def _enter(self, step: Step | None) -> None:
        """Begins with a step, if it is another one."""
        if step is self.plans.step:
            return
        if step is not None:
            on = self.enabled(step)
            self._traffic = self.meter.of(step.train, on)
            # Whether messages may arrive as another tensor than they were made from.
            self._compares = on and not self.method.sends_dense
        self.plans.enter(step)

    def _plan(
        self, side: Side, meta: TensorMeta, step: Step, microbatch: int, device: torch.device
    ) -> Plan:
        return self.endpoint.plan(side, meta, self._context(step, microbatch), device)

    def _context(self, step: Step, microbatch: int) -> MessageContext:
        return step.message(
            microbatch,
            self.seed,
            on=self.enabled(step),
            unit=1.0 if self.direction == ACT else step.loss_scale,
            num_rows=self.num_rows,
            checked=self.checked,
        )

    def _check_finite(self, x: Tensor, step: Step) -> Tensor | None:
        """The status byte as a 0-d tensor, or None for an all-clear on the CPU."""
        if (nonfinite := _has_nonfinite(x)) is None:
            return None
        at_once = x.device.type == "cpu" and not self.defers_nonfinite
        if at_once and (self.direction == ACT or not step.scaled):
            self._traffic.nonfinite += 1
            raise nonfinite_error(self.name, step.index)
        self.nonfinite.add(self._traffic, nonfinite, counts=True)
        return nonfinite.to(torch.uint8)


def _has_nonfinite(x: Tensor) -> Tensor | None:
    """Whether there is NaN or Inf, bool []; None for an all-clear on the CPU."""
    if x.device.type != "cpu":
        return has_nonfinite(x.detach())
    low, high = x.detach().aminmax()  # NaN passes through both
    # Operations of torch on single numbers take longer than the scan of a small message.
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return None
    return torch.ones((), dtype=torch.bool)
