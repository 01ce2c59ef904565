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
from mpcomp.core.wire import Header
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
        act.pair_with(grad)
        #: Whether the open step broke off here, so that it must not be stored.
        self.failed = False

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
        return self.act.encode(x, step, microbatch)

    def receive_activation(
        self, message: Tensor, meta: TensorMeta, step: Step, microbatch: int
    ) -> Tensor:
        """The activation from its message (later stage's side)."""
        return self.act.decode(message, meta, step, microbatch)

    def send_gradient(self, x: Tensor, step: Step, microbatch: int) -> Tensor:
        """The message for a gradient (later stage's side)."""
        return self.grad.encode(x, step, microbatch)

    def receive_gradient(
        self, message: Tensor, meta: TensorMeta, step: Step, microbatch: int
    ) -> Tensor:
        """The gradient from its message (earlier stage's side)."""
        return self.grad.decode(message, meta, step, microbatch)

    def finish_step(self, finite: bool) -> None:
        """Commits what both links noted if the step was finite, else discards it."""
        for link in self.links:
            if finite:
                link.commit()
            else:
                link.discard()
        self.failed = False


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
        size = self.boundary.act.message_bytes(meta, step, microbatch, self.act.device)
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
        size = self.boundary.grad.message_bytes(meta, step, microbatch, self.grad.device)
        self.grad.post(microbatch, size, self.boundary.grad.room(meta))

    def send_gradient(
        self, x: Tensor | None, meta: TensorMeta, step: Step, microbatch: int
    ) -> None:
        """Sends a gradient, in its activation's memory order, or says that there is none.

        It is called by the later stage.
        """
        if x is None:
            self.boundary.grad.hand_over_nothing(meta, self.grad, step, microbatch)
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


def _no_autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)
