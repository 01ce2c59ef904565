"""A cut between two stages: a link each way, and how each is crossed.

All engines carry tensors over a cut by a `Crossing` each way; only channels differ::

    x ──send──> encode, channel, fidelity            channel, decode ──receive──> y
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mpcomp.comm.channels import Channel
from mpcomp.core.context import Step, TensorMeta
from mpcomp.core.wire import HEADER_BYTES, Form, says_constant, set_constant
from mpcomp.feedback.memory import Side
from mpcomp.links.link import Link

__all__ = ["Boundary", "ConnectedBoundary", "Crossing", "Encoded", "TwoLinks"]

_NOTHING: Final = nullcontext()


class TwoLinks:
    """Two links whose steps end together: both directions of a cut, or both copies of a weight.

    Args:
        links: both.

    Attributes:
        links: as given.
        failed: whether the open step broke off here, so that it must not be stored.
    """

    def __init__(self, links: tuple[Link, Link]) -> None:
        self.links = links
        self.failed = False

    @contextmanager
    def swapped_links(self, links: tuple[Link, Link]) -> Iterator[None]:
        """Within it other links, which are used up, carry what crosses here.

        No step may be open, here or at the end of it.
        """
        for new, own in zip(links, self.links, strict=True):
            new.copy_placement(own)
        before = self.links, self.failed
        self.links, self.failed = links, False
        try:
            yield
        finally:
            self.links, self.failed = before

    def finish_step(self, finite: bool) -> None:
        """Commits what both links noted if the step was finite, else discards it."""
        for link in self.links:
            if finite:
                link.commit()
            else:
                link.discard()
        self.failed = False


class Boundary(TwoLinks):
    """The two links of a cut.

    Args:
        act: the link of activations.
        grad: the link of their gradients.
    """

    def __init__(self, act: Link, grad: Link) -> None:
        super().__init__((act, grad))
        act.pair_with(grad)

    @property
    def act(self) -> Link:
        """The link of activations."""
        return self.links[0]

    @property
    def grad(self) -> Link:
        """The link of their gradients."""
        return self.links[1]


class Encoded(NamedTuple):
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


class Crossing(NamedTuple):
    """One direction over a cut, as one rank sees it: a link, and how its messages move.

    Links compute in the dtypes they choose themselves, whatever the caller's autocast.
    """

    link: Link
    channel: Channel

    # -- where the link sends -------------------------------------------------------------------

    def encode(self, x: Tensor, meta: TensorMeta, step: Step, microbatch: int) -> Encoded:
        """The message of a tensor, which has not left yet.

        Args:
            x: the tensor.
            meta: as both ends know it; its memory order is that of the message.
            step: that it belongs to.
            microbatch: likewise.
        """
        link = self.link
        with _no_autocast(x.device):
            x = meta.arrange(x)
            with step.during("encode", link.sender_stage, microbatch, link.name):
                message = link.encode(x, step, microbatch)
        return Encoded(x, message, step, microbatch)

    def send_encoded(self, encoded: Encoded, *, constant: bool = False) -> None:
        """Sends a message, and meters its fidelity.

        That is done in one microbatch a step, as it takes a decoding, and once the message is on
        its way, as nobody waits for it.

        Args:
            encoded: the last message of this step that was encoded here.
            constant: whether no gradient of its tensor is wanted.
        """
        x, message, step, microbatch = encoded
        link = self.link
        at = link.sender_stage, microbatch
        with _no_autocast(x.device):
            if constant:
                set_constant(message, checked=link.checked)
            with step.during("send", *at, link.name, message.numel()):
                self.channel.send(microbatch, message)
            if step.samples(microbatch):
                with step.during("fidelity", *at, link.name):
                    link.compare_sent(x, message, step, microbatch)

    def send(self, x: Tensor | None, meta: TensorMeta, step: Step, microbatch: int) -> None:
        """Sends a tensor like ``meta``, or says that there is none."""
        if x is None:
            self.send_nothing(meta, step, microbatch)
        else:
            self.send_encoded(self.encode(x, meta, step, microbatch))

    def send_nothing(self, meta: TensorMeta, step: Step, microbatch: int) -> None:
        """Says that there is no tensor to send, of which a header is metered."""
        link = self.link
        num_bytes = HEADER_BYTES
        if self.channel.equal_lengths:
            device = self.channel.device
            num_bytes = link.message_bytes(meta, step, microbatch, device, Side.SENDER)
        with step.during("send", link.sender_stage, microbatch, link.name, HEADER_BYTES):
            self.channel.send_nothing(microbatch, num_bytes)
        link.count_nothing(step, microbatch)

    # -- where it receives ----------------------------------------------------------------------

    def post(self, meta: TensorMeta, step: Step, microbatch: int) -> None:
        """Prepares for a tensor like ``meta`` to come.

        A transport may die of a message that is longer than its buffer. Where messages are checked,
        there is room for one up to a dense one, which is refused by name.
        """
        size = self.link.message_bytes(meta, step, microbatch, self.channel.device)
        room = Form((meta,), checked=True).num_bytes if self.link.checked else 0
        self.channel.post(microbatch, size, room)

    def receive(
        self, meta: TensorMeta, step: Step, microbatch: int, *, arrived: bool = False
    ) -> tuple[Tensor, bool]:
        """Waits for a tensor that was posted.

        Args:
            meta: of the tensor.
            step: that it belongs to.
            microbatch: likewise.
            arrived: whether its message is known to be there, so that nothing is waited for.

        Returns:
            The tensor, and whether it wants no gradient. A message that lies on an accelerator is
            not waited for to find out; then a gradient is sent that nobody uses.
        """
        link = self.link
        with (
            _NOTHING
            if arrived
            else step.during("receive", link.receiver_stage, microbatch, link.name)
        ):
            message = self.channel.receive(microbatch)
        x = self._decoded(message, meta, step, microbatch)
        return x, message.device.type == "cpu" and says_constant(message)

    def receive_any(
        self, meta: TensorMeta, step: Step, microbatch: int, *, arrived: bool = False
    ) -> Tensor | None:
        """As `receive`, where the sender may have nothing to send, which gives None."""
        link = self.link
        with (
            _NOTHING
            if arrived
            else step.during("receive", link.receiver_stage, microbatch, link.name)
        ):
            message = self.channel.receive_any(microbatch)
        if message is None:
            self.link.plans.forget(microbatch)
            return None
        return self._decoded(message, meta, step, microbatch)

    def _decoded(self, message: Tensor, meta: TensorMeta, step: Step, microbatch: int) -> Tensor:
        device = self.channel.device
        with (
            _no_autocast(device),
            step.during("decode", self.link.receiver_stage, microbatch, self.link.name),
        ):
            return self.link.decode(message, meta, step, microbatch, device)


class ConnectedBoundary:
    """A boundary and how its messages move, as one rank sees it: two crossings.

    Args:
        boundary: the cut.
        act: carries activations.
        grad: carries their gradients.
    """

    def __init__(self, boundary: Boundary, act: Channel, grad: Channel) -> None:
        self.boundary = boundary
        self._channels = act, grad

    # Of the links that the boundary has now: for a time it may have others (`swapped_links`).
    @property
    def act(self) -> Crossing:
        """The way of activations."""
        return Crossing(self.boundary.act, self._channels[0])

    @property
    def grad(self) -> Crossing:
        """The way of their gradients."""
        return Crossing(self.boundary.grad, self._channels[1])


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Within it the caller's autocast has no effect; where there is none, nothing happens."""
    if not torch.is_autocast_enabled(device.type):
        return _NOTHING
    return torch.autocast(device.type, enabled=False)
