"""A cut between two stages: a link each way, what the two share, and how both are crossed.

All engines carry tensors over a cut by a `ConnectedBoundary`; only channels differ::

    x ──send──> encode, channel, fidelity            channel, decode ──receive──> y
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mpcomp.comm.channels import Channel
from mpcomp.core.step import Step
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import Header, status_of
from mpcomp.feedback.memory import Side
from mpcomp.links.link import Link

__all__ = ["Boundary", "ConnectedBoundary", "EncodedActivation"]


class Boundary:
    """The two links of a cut.

    Args:
        act: the link of activations.
        grad: the link of their gradients.
    """

    def __init__(self, act: Link, grad: Link) -> None:
        self.act = act
        self.grad = grad
        if act.method.looks_at_gradients:
            act.gradients = grad
        #: Whether the open step broke off here, so that it must not be stored.
        self.failed = False
        self._shares = grad.method.reuses_selection
        self._of_nonzero = grad.method.reuses_nonzero
        # Selections of each side's activation, which gradients reuse, by (step, microbatch).
        self._sent: dict[tuple[int, int], Tensor | None] = {}
        self._received: dict[tuple[int, int], Tensor | None] = {}

    @property
    def links(self) -> tuple[Link, Link]:
        """Activations, gradients."""
        return self.act, self.grad

    @contextmanager
    def crossed_by(self, other: Boundary) -> Iterator[None]:
        """Within it the links of another boundary, which is used up, carry what crosses this one.

        No step may be open, here or at the end of it.
        """
        for new, own in zip(other.links, self.links, strict=True):
            new.stand_where(own)
        before = vars(self).copy()
        vars(self).update(vars(other))
        try:
            yield
        finally:
            vars(self).update(before)

    def send_activation(self, x: Tensor, step: Step, microbatch: int) -> Tensor:
        """The message for an activation (earlier stage's side)."""
        message = self.act.encode(x, step, microbatch)
        if self._shares and step.train:
            self._sent[step.index, microbatch] = (
                _nonzero(self.act.arrived(message, step, microbatch), status_of(message))
                if self._of_nonzero
                else self.act.carried(Side.SENDER, message, step, microbatch)
            )
        return message

    def receive_activation(
        self, message: Tensor, meta: TensorMeta, step: Step, microbatch: int
    ) -> Tensor:
        """The activation from its message (later stage's side)."""
        x = self.act.decode(message, meta, step, microbatch)
        if self._shares and step.train:
            self._received[step.index, microbatch] = (
                _nonzero(x)
                if self._of_nonzero
                else self.act.carried(Side.RECEIVER, message, step, microbatch)
            )
        return x

    def send_gradient(self, x: Tensor, step: Step, microbatch: int) -> Tensor:
        """The message for a gradient (later stage's side)."""
        positions = self._received.get((step.index, microbatch))
        return self.grad.encode(x, step, microbatch, positions)

    def send_no_gradient(
        self, meta: TensorMeta, channel: Channel, step: Step, microbatch: int
    ) -> None:
        """Says that a gradient like ``meta`` is not there (later stage's side)."""
        positions = self._received.get((step.index, microbatch))
        self.grad.hand_over_nothing(meta, channel, step, microbatch, positions)

    def activation_bytes(
        self, meta: TensorMeta, step: Step, microbatch: int, device: torch.device
    ) -> int:
        """Length of the activation's message, known to both sides from the step's beginning."""
        return self.act.message_bytes(meta, step, microbatch, device)

    def gradient_bytes(
        self, meta: TensorMeta, step: Step, microbatch: int, device: torch.device
    ) -> int:
        """Length of the gradient's message, known to both sides once the activation has gone."""
        positions = self._sent.get((step.index, microbatch))
        return self.grad.message_bytes(meta, step, microbatch, device, positions)

    def receive_gradient(
        self, message: Tensor, meta: TensorMeta, step: Step, microbatch: int
    ) -> Tensor:
        """The gradient from its message (earlier stage's side)."""
        positions = self._sent.get((step.index, microbatch))
        gradient = self.grad.decode(message, meta, step, microbatch, positions)
        self.act.weigh(gradient, step, microbatch)
        return gradient

    def finish_step(self, finite: bool) -> None:
        """Commits what both links noted if the step was finite, else discards it."""
        for link in self.links:
            if finite:
                link.commit()
            else:
                link.discard()
        self.failed = False
        self._sent.clear()
        self._received.clear()


class EncodedActivation(NamedTuple):
    """A message that has not left.

    Attributes:
        x: what it says, as it crosses.
        message: uint8 [n].
        step: that it belongs to.
        microbatch: likewise.
    """

    x: Tensor
    message: Tensor
    step: Step
    microbatch: int


@dataclass(frozen=True)
class ConnectedBoundary:
    """A boundary and how its messages move, as one rank sees it.

    Links compute in the dtypes they choose themselves, whatever the caller's autocast.
    """

    boundary: Boundary
    act: Channel
    grad: Channel

    def post_activation(self, meta: TensorMeta, step: Step, microbatch: int) -> None:
        """Prepares for an activation to come (later stage's side)."""
        size = self.boundary.activation_bytes(meta, step, microbatch, self.act.device)
        self.act.post(microbatch, size, self.boundary.act.room(meta))

    def send_activation(self, x: Tensor, meta: TensorMeta, step: Step, microbatch: int) -> None:
        """Sends an activation (earlier stage's side)."""
        self.hand_over_activation(self.encode_activation(x, meta, step, microbatch))

    def encode_activation(
        self, x: Tensor, meta: TensorMeta, step: Step, microbatch: int
    ) -> EncodedActivation:
        """The message of an activation, which has not left yet (earlier stage's side)."""
        with _no_autocast(x.device):
            x = meta.arrange(x)
            link = self.boundary.act
            with step.during("encode", link.sender_stage, microbatch, link.name):
                message = self.boundary.send_activation(x, step, microbatch)
        return EncodedActivation(x, message, step, microbatch)

    def hand_over_activation(self, encoded: EncodedActivation, *, constant: bool = False) -> None:
        """Sends an encoded activation, which may want no gradient (earlier stage's side)."""
        link = self.boundary.act
        x, message, step, microbatch = encoded
        with _no_autocast(x.device):
            if constant:
                link.mark_constant(message)
            link.hand_over(x, message, self.act, step, microbatch)

    def receive_activation(
        self, meta: TensorMeta, step: Step, microbatch: int
    ) -> tuple[Tensor, bool]:
        """Waits for an activation (later stage's side).

        Returns:
            The activation, and whether it wants no gradient. An accelerator is not waited for to
            find out; then a gradient is sent that nobody uses.
        """
        link = self.boundary.act
        message = link.take(self.act, step, microbatch)
        with (
            _no_autocast(message.device),
            step.during("decode", link.receiver_stage, microbatch, link.name),
        ):
            constant = message.device.type == "cpu" and Header.of(message).constant
            return self.boundary.receive_activation(message, meta, step, microbatch), constant

    def post_gradient(self, meta: TensorMeta, step: Step, microbatch: int) -> None:
        """Prepares for the gradient of an activation that was sent (earlier stage's side)."""
        size = self.boundary.gradient_bytes(meta, step, microbatch, self.grad.device)
        self.grad.post(microbatch, size, self.boundary.grad.room(meta))

    def send_gradient(
        self, x: Tensor | None, meta: TensorMeta, step: Step, microbatch: int
    ) -> None:
        """Sends a gradient, in its activation's memory order, or says that there is none.

        It is called by the later stage.
        """
        if x is None:
            self.boundary.send_no_gradient(meta, self.grad, step, microbatch)
            return
        with _no_autocast(x.device):
            x = meta.arrange(x)
            link = self.boundary.grad
            with step.during("encode", link.sender_stage, microbatch, link.name):
                message = self.boundary.send_gradient(x, step, microbatch)
            link.hand_over(x, message, self.grad, step, microbatch)

    def receive_gradient(self, meta: TensorMeta, step: Step, microbatch: int) -> Tensor | None:
        """Waits for a gradient (earlier stage's side); None says that there is none."""
        link = self.boundary.grad
        message = link.take_any(self.grad, step, microbatch)
        if message is None:
            return None
        with (
            _no_autocast(message.device),
            step.during("decode", link.receiver_stage, microbatch, link.name),
        ):
            return self.boundary.receive_gradient(message, meta, step, microbatch)


def _nonzero(x: Tensor, status: Tensor | None = None) -> Tensor:
    """Ascending int64 positions, in memory order, of what is not zero.

    Args:
        x: what arrived, or is about to.
        status: of the message, where ``x`` does not show yet that NaN or Inf was seen.
    """
    flat = TensorMeta.of(x).flatten(x).reshape(-1)
    if status is not None:
        flat = flat.masked_fill(status.bool(), torch.nan)
    return flat.nonzero().squeeze(1)


def _no_autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)
