"""The contract of what a link learns from its messages, by which later ones are coded.

Both ends learn, each from what it has: the sender from what it sends, the receiver from what
arrives. In a step everything is coded by what was known before it; what the step has taught is kept
at its end, or forgotten if it is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import Payload
from mpcomp.feedback.memory import Side

__all__ = ["Learned", "Sent", "Visit", "by_end"]


@dataclass(frozen=True)
class Visit:
    """One message, as those who learn from it see it.

    Attributes:
        meta: the tensor.
        microbatch: its number.
        learns: whether it is one of training.
        looks: whether what takes time may be done for it, once a step.
        tokens: int64 [rows, positions] on the CPU, the tokens of a language model; None of others.
        counts: bool [rows, positions] on the CPU, False where padded; None where all count.
    """

    meta: TensorMeta
    microbatch: int
    learns: bool
    looks: bool
    tokens: Tensor | None = None
    counts: Tensor | None = None


#: Makes the other end's tensor for a message that was encoded here.
Sent: TypeAlias = Callable[[], Tensor]


class Learned(Protocol):
    """Both ends of one link, where they are on this rank."""

    def coder(self, side: Side, visit: Visit) -> Compressor:
        """The compressor of a message."""

    def sent(self, coder: Compressor, x: Tensor, arrived: Sent, visit: Visit) -> None:
        """Notes a message of training at its sender.

        Args:
            coder: of the message, of `coder`.
            x: what is compressed, zero where it is padded.
            arrived: makes the other end's tensor.
            visit: the message.
        """

    def heard(self, coder: Compressor, payload: Payload, x: Tensor, visit: Visit) -> None:
        """Notes a message of training at its receiver, and the tensor that it says."""

    def kept(self, side: Side, meta: TensorMeta, vocabulary: int) -> Iterator[tuple[int, int, str]]:
        """Rows, bytes of one, and where: what an end keeps at most, for tensors like ``meta``."""

    def commit(self) -> None:
        """Keeps what was noted in a step."""

    def discard(self) -> None:
        """Forgets what was noted in a step."""

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, by role, as the ends of feedback methods have it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""


def by_end(state: Mapping[str, Any]) -> dict[tuple[Side, int], dict[str, Tensor]]:
    """Tensors of a `Learned.state_dict`, ``role.width. ... .name``, by side and width."""
    found: dict[tuple[Side, int], dict[str, Tensor]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            role, width, *_, name = key.split(".")
            found.setdefault((Side(role), int(width)), {})[name] = value
    return found
