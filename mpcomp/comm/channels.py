"""Channels: what moves the messages of one direction of a cut or a tie.

Both ends know the length of every message before it is sent, so receives are posted ahead and a
message needs no announcement. Sends return at once, and nobody waits for one until something else
tells that it has arrived. All receives end with their connection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Channel", "LocalChannel"]


class Channel(ABC):
    """One direction of one cut, as this rank sees it."""

    #: Whether messages leave this rank.
    on_wire: bool
    #: Whether both ends must name one length for a message.
    equal_lengths: bool = False
    #: Whether a receive may be started before its message is waited for.
    posts_ahead: bool = False
    #: Of the tensors that messages say. Those lie there too, or in host memory.
    device: torch.device
    #: Seconds spent waiting for messages.
    waited_s: float = 0.0

    @abstractmethod
    def post(self, microbatch: int, num_bytes: int, room: int = 0) -> None:
        """Prepares for a message of this length.

        Args:
            microbatch: its number.
            num_bytes: of the message, the most where that varies.
            room: bytes for one that is longer than it should be, where a transport can tell.
        """

    @abstractmethod
    def send(self, microbatch: int, message: Tensor) -> None:
        """Hands a message to the transport, uint8 [n]; returns at once."""

    @abstractmethod
    def send_nothing(self, microbatch: int, num_bytes: int) -> None:
        """Says that there is nothing to send; as long as this where lengths must be equal."""

    @abstractmethod
    def receive(self, microbatch: int) -> Tensor:
        """Waits for a message that was posted: uint8 [n] on `device` or in host memory."""

    @abstractmethod
    def receive_any(self, microbatch: int) -> Tensor | None:
        """As `receive`, where there may be nothing to send, which gives None.

        From an accelerator's network (NCCL) this waits for the message on the host.
        """

    def arrive(self, microbatch: int) -> None:
        """Waits for a message that was posted, however long; then `receive` gives it at once.

        For a thread beside the one that takes the message; only where `posts_ahead`.

        Raises:
            RuntimeError: of the transport.
        """
        raise NotImplementedError

    def until(self, microbatch: int, arrived: Callable[[float], None]) -> None:
        """Waits while another thread does in `arrive`, by the time limit and errors of `receive`.

        Args:
            microbatch: number of the message.
            arrived: returns once it is there; given the seconds after which, or when `arrive`
                fails, it raises RuntimeError.
        """
        raise NotImplementedError

    @abstractmethod
    def release(self) -> None:
        """Lets go of the messages sent so far, which the other end is known to have received."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the connection."""


class LocalChannel(Channel):
    """Both stages are on this rank: a message goes to the device of the one that receives it.

    One that was coded on the host stays there.

    Args:
        device: that one.
    """

    on_wire = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._messages: dict[int, Tensor | None] = {}

    def post(self, microbatch: int, num_bytes: int, room: int = 0) -> None:
        pass

    def send(self, microbatch: int, message: Tensor) -> None:
        if message.device.type != "cpu":
            # To host memory without waiting, it would be read before it is there.
            waits = self.device.type == "cpu"
            message = message.to(self.device, non_blocking=not waits)
        self._messages[microbatch] = message

    def send_nothing(self, microbatch: int, num_bytes: int) -> None:
        self._messages[microbatch] = None

    def receive(self, microbatch: int) -> Tensor:
        message = self.receive_any(microbatch)
        assert message is not None
        return message

    def receive_any(self, microbatch: int) -> Tensor | None:
        return self._messages.pop(microbatch)

    def release(self) -> None:
        pass

    def close(self) -> None:
        self._messages.clear()
