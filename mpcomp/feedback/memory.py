"""The contract of a memory: what is remembered from message to message, as formulas alone.

A tensor x is due, at each of one or more senders; what the receiver works with follows from the
mean of what their messages say. At a cut and on a tie there is one sender, between replicas each of
them is one, and each a receiver too::

    x ──compensate──> target ──compressor──> message ──mean of all──> received ──> result
            ^              └── left ──> sent                              ^
        sender's fields <───────────────┘                         receiver's fields

A memory is a frozen value: it names its fields and says how they change. Slots, precision and place
of what is kept, the loss scale, padding, skipped steps and checkpoints are `EndState`'s
(`mpcomp.feedback.state`), and formulas see none of them: the rows they are given are those of one
message's slots, in the units of its tensor, and what they set is kept once the step is known to be
finite everywhere.

A `FieldState` is what an end keeps of one field. A step *stages* what it would keep, in the units
of its messages; the end writes it, free of them, once the step is known to be finite.

The oldest one is here, as others are made of it: what a message leaves out is added to the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from mpcomp.core.context import Key, TensorMeta
from mpcomp.feedback.store import SlotStore, StoragePlan

__all__ = [
    "NO_MEMORY",
    "Draw",
    "ErrorMemory",
    "Field",
    "FieldState",
    "FieldStorage",
    "Memory",
    "Residual",
    "Sent",
    "Side",
    "Slots",
    "State",
]


class Side(Enum):
    """The end that keeps a field."""

    SENDER = "sender"
    RECEIVER = "receiver"

    @property
    def other(self) -> Side:
        """The other end."""
        return Side.RECEIVER if self is Side.SENDER else Side.SENDER


# -- a field --------------------------------------------------------------------------------------


#: Makes a fresh generator; ``alike`` says whether all senders draw the same from it.
Draw: TypeAlias = Callable[[bool], torch.Generator]


class Slots(NamedTuple):
    """The slots of one message.

    Attributes:
        keys: of the slots.
        unit: factor from what is kept to the units of the message.
        padded: of `mpcomp.core.context.padded_positions`.
        draw: for what is rounded at random to be kept.
    """

    keys: Sequence[Key]
    unit: float = 1.0
    padded: Tensor | None = None
    draw: Draw | None = None


class FieldState(ABC):
    """One field at one end, slot by slot.

    Attributes:
        numel: numbers kept of a slot; 0 where they are not one tensor.
        store: the rows; None where they are not kept in a `SlotStore`.
    """

    numel: int = 0
    store: SlotStore | None = None

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes kept of a slot."""

    @abstractmethod
    def known(self, keys: Sequence[Key]) -> list[bool]:
        """Whether anything was ever written of each slot."""

    @abstractmethod
    def read(self, slots: Slots) -> Tensor:
        """Committed rows [keys, n] in units of the message, zero where padded or unknown."""

    @abstractmethod
    def stage(self, slots: Slots, value: Tensor, change: Tensor | None) -> tuple[Any, Tensor]:
        """Argument of `write` for new rows ``value`` [keys, n], and the rows to be read then.

        Args:
            slots: theirs.
            value: the rows; of no meaning where padded.
            change: of the rows since what was committed, for what is kept of changes alone.
        """

    @abstractmethod
    def cleared(self, slots: Slots) -> Any:
        """Argument of `write` for rows of zeros; what is padded stays."""

    @abstractmethod
    def write(self, keys: Sequence[Key], staged: Any) -> None:
        """Keeps what was staged."""

    @abstractmethod
    def state_dict(self, name: str) -> dict[str, Tensor]:
        """The only slot of a parameter, under ``name`` and ``name:...``; nothing if unknown."""

    @abstractmethod
    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state_dict` gave under this name.

        Raises:
            ValueError: it is not of this size.
        """


class FieldStorage(ABC):
    """A way to keep a field that is not one number an element."""

    @abstractmethod
    def state(self, plan: StoragePlan, device: torch.device) -> FieldState:
        """A new state, which knows no slot yet."""


#: Ways to merge a field over replicas, see `Field`.
MERGES: Final = ("mean", "same", "owed")


@dataclass(frozen=True)
class Field:
    """One tensor a slot that an end keeps.

    Attributes:
        side: the end that keeps it.
        mirrors: of a sender's field, the receiver's field that is the same wherever there is one
            sender. The sender then advances it by `Memory.received`, so that the two ends stay
            equal bit for bit; a slot that has none yet is sent by itself first.
        kept: how it is kept in fewer numbers than the tensor has; None for one an element.
        merge: what every replica goes on with where a run goes on with more or fewer of them.
            "mean": the mean over those that were saved. "same": what any of them had, as all have
            the same. "owed": the mean, and what is still to be sent of means that one replica
            formed for all (the "owed" fields of `Memory.second_stage_memory`). None for "same" at
            a receiver, where all receive the same, and for "mean" at a sender. A field that mirrors
            another becomes that one's.

    Raises:
        ValueError: another way to merge.
    """

    side: Side
    mirrors: str | None = None
    kept: FieldStorage | None = None
    merge: str | None = None

    def __post_init__(self) -> None:
        if self.merge not in (None, *MERGES):
            raise ValueError(f"merge={self.merge!r}: expected {', '.join(MERGES)}, or None")

    @property
    def merges(self) -> str:
        """`merge`, or its default."""
        return self.merge or ("same" if self.side is Side.RECEIVER else "mean")


@dataclass(frozen=True)
class Sent:
    """A message, as the formulas of its sender see it.

    Attributes:
        x: what `Memory.compensate` was given, [rows, n] or [n].
        target: what was compressed, likewise.
        without: takes what the message says from a tensor like these; gives a new one.
        find_positions: finds `positions`, for whom asks.
        alone: whether the target is what `Memory.compensate` gave. Between replicas it may hold
            besides what another memory has kept of the tensor.
    """

    x: Tensor
    target: Tensor
    without: Callable[[Tensor], Tensor]
    find_positions: Callable[[], Tensor | None] = lambda: None
    alone: bool = True

    @property
    def left(self) -> Tensor:
        """The part of the target that the message left out."""
        return self.without(self.target)

    def missing(self, added: Tensor) -> Tensor:
        """The part of what was due that the message left out.

        Args:
            added: by the memory itself, to form the target.
        """
        return self.without(self.x) if self.alone else self.left - added

    @property
    def positions(self) -> Tensor | None:
        """Ascending int64, of the elements that the message carries; None for all of them."""
        return self.find_positions()


class State(Protocol):
    """The fields of one message's slots, by name, as formulas read and set them.

    ``state[name]`` is what was committed, fp32 [rows, n] or [n], zeros where nothing was; setting
    it says what is kept instead. ``name in state`` is whether anything is kept of any of the slots.
    """

    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> Tensor: ...
    def __setitem__(self, name: str, value: Tensor) -> None: ...

    def new(self, name: str) -> Tensor:
        """The value that this message has set."""

    def put(self, name: str, value: Tensor, change: Tensor | None) -> Tensor:
        """Sets ``value``; returns what will be read of it, where a field is kept with a loss.

        Args:
            name: of the field.
            value: new rows.
            change: how they differ from what was committed; a sketch is kept by this alone.
        """

    def clear(self, name: str) -> None:
        """Sets zeros for those slots of which anything is kept."""


class Memory:
    """A memory; as it stands here it remembers nothing.

    Formulas are given tensors [rows, n], a row a slot, or [n] of a parameter.
    """

    #: Whether state is kept in units of learning rate times gradient.
    lr_scaled: bool = False

    @property
    def storage_plan(self) -> StoragePlan:
        """Precision and place of what is kept."""
        return StoragePlan()

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        """Fields of a slot, by name.

        Args:
            slot: one row of a tensor at a cut, [1, n]; a whole parameter as a matrix between
                replicas.
        """
        return {}

    def compensate(self, x: Tensor, state: State) -> Tensor:
        """The target: what is compressed in place of ``x``, at a sender."""
        return x

    def sent(self, sent: Sent, state: State) -> None:
        """Updates the sender's fields once a message is coded."""

    def received(self, mean: Tensor, state: State) -> Tensor:
        """The receiver's result, from the mean of what messages say; updates its fields."""
        return mean

    def dense(self, x: Tensor, state: State) -> None:
        """Updates the fields of an end after ``x`` itself has crossed a cut."""

    def second_stage_memory(self) -> Memory:
        """The memory of a mean that one replica forms for all, and compresses once more."""
        return self

    # -- derived --------------------------------------------------------------------------------

    def mirrors(self, slot: TensorMeta) -> dict[str, str]:
        """The sender's fields that mirror a receiver's, by the latter's names."""
        fields = self.fields(slot).items()
        return {field.mirrors: name for name, field in fields if field.mirrors is not None}


#: The gradient itself is sent, and the mean of all is the result.
NO_MEMORY = Memory()


class ErrorMemory(Memory):
    """w = x + d e; e <- w - sent. Seide et al. 2014; Stich et al. 2018, d = 1 in both.

    Attributes:
        decay: d, the part of the residual that is still due when the next message is.
    """

    decay: float = 1.0

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        return {"residual": Field(Side.SENDER, merge="owed")}

    def compensate(self, x: Tensor, state: State) -> Tensor:
        return x + self.due(state) if "residual" in state else x

    def due(self, state: State) -> Tensor:
        """The part of the residual that goes into the next message."""
        residual = state["residual"]
        return residual if self.decay == 1 else self.decay * residual

    def sent(self, sent: Sent, state: State) -> None:
        state["residual"] = sent.left

    def dense(self, x: Tensor, state: State) -> None:
        state.clear("residual")


@dataclass(frozen=True)
class Residual(ErrorMemory):
    """Error feedback as a memory alone, for methods that choose compressors themselves.

    Args:
        plan: precision and place of the residual.
    """

    plan: StoragePlan = field(default_factory=StoragePlan)

    @property
    def storage_plan(self) -> StoragePlan:
        return self.plan
