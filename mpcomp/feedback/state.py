"""The state of a memory at one end: all of its fields, read for a message, staged, committed.

State changes in two strokes. While a step runs, messages read what the step before left and stage
what they would keep; once the step is known to be finite on every stage and replica, all ends
`commit`, else all `discard`. So a skipped step leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpcomp.core.context import Key, TensorMeta, keep_padded, zero_padding
from mpcomp.feedback.memory import Draw, FieldState, Memory, Side, Slots
from mpcomp.feedback.store import SlotStore, StoragePlan

__all__ = ["BOTH", "SINGLE_SLOT", "EndState", "Rows", "SlotState", "as_rows"]

#: A replica sends and receives.
BOTH = (Side.SENDER, Side.RECEIVER)


#: The slot of what is kept of a parameter.
SINGLE_SLOT: list[Key] = [(0,)]


class EndState:
    """State of one end, by field and slot.

    Args:
        memory: names the fields.
        slot: one row at a cut [1, n]; a parameter as a matrix between replicas.
        device: of the tensors that are read and staged.
        sides: whose fields are kept here.
        capped: whether the plan's cap holds: it is one on samples, of which parameters are none.

    Attributes:
        fields: their states, by name.
        location: where they are kept.
        mirrored: at a sender, its fields that mirror a receiver's, by the latter's names.
        estimate: the field whose slots both ends hold alike, if there is one.
        row_bytes: bytes of all that is kept of one slot.
        max_rows: slots that the plan's cap admits; None without a cap. Both ends admit as many,
            whichever keeps more of a slot.

    Raises:
        ValueError: the cap holds not even one slot.
    """

    def __init__(
        self,
        memory: Memory,
        slot: TensorMeta,
        device: torch.device,
        sides: Collection[Side] = BOTH,
        *,
        capped: bool = True,
    ) -> None:
        plan = memory.storage_plan
        if not capped:
            plan = replace(plan, cap_bytes=None)
        self.memory = memory
        self.location = plan.location
        declared = memory.fields(slot)
        made = {
            name: as_rows(slot.numel, plan, device)
            if field.kept is None
            else field.kept.state(plan, device)
            for name, field in declared.items()
        }
        self.max_rows = _max_rows(
            plan,
            {
                side: sum(made[name].row_bytes for name, f in declared.items() if f.side is side)
                for side in Side
            },
            slot,
        )
        self.fields: dict[str, FieldState] = {
            name: state for name, state in made.items() if declared[name].side in sides
        }
        mirrors = memory.mirrors(slot)
        self.mirrored = {} if Side.RECEIVER in sides else mirrors
        estimates = mirrors if Side.RECEIVER in sides else mirrors.values()
        self.estimate: str | None = next(iter(estimates), None)
        #: Whether formulas of a sender set anything here that `Memory.received` does not.
        self.keeps = len(self.fields) > len(self.mirrored) and Side.SENDER in sides
        for state in self.fields.values():
            if state.store is not None:
                state.store.max_rows = self.max_rows
        self.row_bytes = sum(state.row_bytes for state in self.fields.values())
        self._staged: list[_Staged] = []

    def open(
        self,
        keys: Sequence[Key] = SINGLE_SLOT,
        *,
        unit: float = 1.0,
        order: int = 0,
        padded: Tensor | None = None,
        draw: Draw | None = None,
        flat: bool = False,
        names: Mapping[str, str] | None = None,
        stages: bool = True,
    ) -> SlotState:
        """The state of one message's slots, for the formulas of its memory.

        Args:
            keys: its slots.
            unit: factor from what is kept to the units of the message.
            order: its microbatch, in the order of which is committed.
            padded: of `mpcomp.core.context.padded_positions`.
            draw: for what is rounded at random to be kept.
            flat: whether formulas see the only slot as [n], and not as [1, n].
            names: other names for fields.
            stages: whether what formulas set is for `commit`, and not for themselves alone.
        """
        slots = Slots(keys, unit, padded, draw)
        return SlotState(self, slots, order, flat, names or {}, stages)

    def estimates(self, keys: Sequence[Key]) -> Tensor:
        """The rows of slots that both ends hold, as the steps before left them: fp32 [slots, n].

        Zeros of a slot that is not known. Only where there is an `estimate`.
        """
        assert self.estimate is not None
        return self.fields[self.estimate].read(Slots(keys))

    def copies(self) -> Iterator[tuple[Sequence[Key], Tensor]]:
        """Slots of the open step's messages, and their rows that both ends hold, of `estimates`."""
        for staged in self._in_order():
            if staged.name == self.estimate:
                yield staged.keys, self.estimates(staged.keys)

    def prefetch(self, batch: Iterable[Sequence[Key]]) -> None:
        """Begins to read the slots of a batch to come, of each of its microbatches.

        Raises:
            OSError: reading ahead failed since the last call.
        """
        microbatches = list(batch)
        for state in self.fields.values():
            if state.store is not None:
                state.store.prefetch(microbatches)

    # -- two strokes ----------------------------------------------------------------------------

    def stage(self, staged: _Staged) -> None:
        """Takes down what `commit` will write."""
        self._staged.append(staged)

    @property
    def open_slots(self) -> int:
        """Number of things staged and not yet committed."""
        return len(self._staged)

    def commit(self) -> None:
        """Keeps what was staged, in ascending order of microbatches on every rank."""
        for staged in self._in_order():
            self.fields[staged.name].write(staged.keys, staged.value)
        self._staged.clear()

    def _in_order(self) -> list[_Staged]:
        return sorted(self._staged, key=lambda staged: staged.order)

    def discard(self) -> None:
        """Forgets what was staged."""
        self._staged.clear()

    # -- what is held ---------------------------------------------------------------------------

    @property
    def known(self) -> bool:
        """Whether anything is kept of a parameter."""
        return any(any(state.known(SINGLE_SLOT)) for state in self.fields.values())

    @property
    def num_slots(self) -> int:
        """Slots held."""
        stores = [state.store for state in self.fields.values()]
        return max((len(store) for store in stores if store is not None), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots held."""
        return self.num_slots * self.row_bytes

    def state_dict(self) -> dict[str, Tensor]:
        """The rows of all slots: keys [n, width] and stored tensors.

        Of one field under ``keys`` and ``rows0`` ..., of several each under its name as well. To be
        used before the next commit.
        """
        state: dict[str, Tensor] = {}
        for name, field in self.fields.items():
            assert field.store is not None
            prefix = f"{name}." if len(self.fields) > 1 else ""
            state.update({prefix + key: rows for key, rows in field.store.state_dict().items()})
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state_dict`."""
        for name, field in self.fields.items():
            assert field.store is not None
            prefix = f"{name}." if len(self.fields) > 1 else ""
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            field.store.load_state_dict(own)


class _Staged:
    """A write to one field that waits for the commit; the last value that its message has set."""

    def __init__(self, name: str, order: int, keys: Sequence[Key], value: Any) -> None:
        self.name = name
        self.order = order
        self.keys = keys
        self.value = value


class SlotState:
    """A `mpcomp.feedback.memory.State`.

    It reads zeros also where the batch is padded, and leaves what is kept there. What formulas set
    of the other end's fields is left to that end.
    """

    def __init__(
        self,
        end: EndState,
        slots: Slots,
        order: int,
        flat: bool,
        names: Mapping[str, str],
        stages: bool,
    ) -> None:
        self._end = end
        self._slots = slots
        self._order = order
        self._flat = flat
        self._names = names
        self._stages = stages
        self._read: dict[str, Tensor] = {}
        self._staged: dict[str, _Staged] = {}
        self._new: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        """Whether anything is kept of any of the slots."""
        return any(self._field(name).known(self._slots.keys))

    def __getitem__(self, name: str) -> Tensor:
        name = self._names.get(name, name)
        if name not in self._read:  # a formula may ask twice, and a read may be one from disk
            field = self._end.fields[name]
            self._read[name] = field.read(self._slots)
        rows = self._read[name]
        return rows[0] if self._flat else rows

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.put(name, value, None)

    def new(self, name: str) -> Tensor:
        """The value that this message has set."""
        return self._new[self._names.get(name, name)]

    def release(self) -> None:
        """Lets go of what was read: the message is coded."""
        self._read.clear()
        self._new.clear()

    def put(self, name: str, value: Tensor, change: Tensor | None) -> Tensor:
        """Stages ``value``; returns what will be read of it, where it is kept with a loss.

        Args:
            name: of the field.
            value: new rows.
            change: how they differ from what was committed; a sketch is kept by this alone.
        """
        if self._flat:
            value = value[None]
            change = None if change is None else change[None]
        if (field := self._field_here(name)) is None:
            return value
        staged, known = field.stage(self._slots, value, change)
        self._stage(name, self._slots.keys, staged)
        known = known[0] if self._flat else known
        self._new[self._names.get(name, name)] = known
        return known

    def clear(self, name: str) -> None:
        """Stages zeros for those slots of which anything is kept."""
        if (field := self._field_here(name)) is None:
            return
        keys, padded = self._slots.keys, self._slots.padded
        rows = [row for row, known in enumerate(field.known(keys)) if known]
        if rows:
            keys, padded = [keys[row] for row in rows], None if padded is None else padded[rows]
            slots = self._slots._replace(keys=keys, padded=padded)
            self._stage(name, keys, field.cleared(slots))

    def _field(self, name: str) -> FieldState:
        return self._end.fields[self._names.get(name, name)]

    def _field_here(self, name: str) -> FieldState | None:
        return self._end.fields.get(self._names.get(name, name))

    def _stage(self, name: str, keys: Sequence[Key], value: Any) -> None:
        if not self._stages:
            return
        name = self._names.get(name, name)
        if name in self._staged:
            self._staged[name].value = value
            return
        self._staged[name] = _Staged(name, self._order, keys, value)
        self._end.stage(self._staged[name])


def _max_rows(plan: StoragePlan, row_bytes: Mapping[Side, int], slot: TensorMeta) -> int | None:
    if plan.cap_bytes is None:
        return None
    largest = max(row_bytes.values())
    rows = plan.cap_bytes // max(1, largest)
    if rows == 0:
        raise ValueError(
            f"cap_bytes={plan.cap_bytes}: one sample's state takes {largest} bytes "
            f"({slot.numel} elements as {plan.storage}); raise the cap"
        )
    return rows


# -- rows that are kept as they are ----------------------------------------------------------------


def as_rows(numel: int, plan: StoragePlan, device: torch.device) -> FieldState:
    """The state of a field that is kept as it is, one number an element."""
    return Rows(SlotStore(numel, plan, device))


class Rows(FieldState):
    """One number an element, in the precision of the storage plan."""

    def __init__(self, store: SlotStore) -> None:
        self.store: SlotStore = store
        self.numel = store.row_numel

    @property
    def row_bytes(self) -> int:
        return self.store.row_bytes

    def known(self, keys: Sequence[Key]) -> list[bool]:
        return self.store.known(keys)

    def recall(self, slots: Slots) -> Tensor:
        """Committed rows in units of the message."""
        rows = self.store.read(slots.keys)
        return rows if slots.unit == 1 else rows * slots.unit

    def read(self, slots: Slots) -> Tensor:
        return zero_padding(self.recall(slots), slots.padded)

    def stage(self, slots: Slots, value: Tensor, change: Tensor | None) -> tuple[Any, Tensor]:
        value = value.to(torch.float32)
        if slots.padded is not None:
            value = keep_padded(value, self.recall(slots), slots.padded)
        return (value if slots.unit == 1 else value / slots.unit), value

    def cleared(self, slots: Slots) -> Any:
        shape = len(slots.keys), self.numel
        zeros = torch.zeros(shape, dtype=torch.float32, device=self.store.device)
        return self.stage(slots, zeros, None)[0]

    def write(self, keys: Sequence[Key], staged: Any) -> None:
        self.store.write(keys, staged)

    def state_dict(self, name: str) -> dict[str, Tensor]:
        if not len(self.store):
            return {}
        # Bits would be rounded again when that is stored, so they are under ``name:0`` ... as well.
        state = {name: self.store.read(SINGLE_SLOT)[0]}
        if self.store.rounds:
            rows = self.store.state_dict()
            state |= {f"{name}:{k.removeprefix('rows')}": v for k, v in rows.items() if k != "keys"}
        return state

    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        found = state[name].numel()
        if found != self.numel:
            raise ValueError(
                f"{name} is of {found} elements, here it has {self.numel}: use the same model"
            )
        rows = {
            f"rows{k.partition(':')[2]}": v for k, v in state.items() if k.startswith(name + ":")
        }
        if rows and self.store.rounds:
            self.store.load_state_dict({**rows, "keys": torch.tensor(SINGLE_SLOT)})
        else:
            self.store.write(SINGLE_SLOT, state[name].to(torch.float32)[None])
