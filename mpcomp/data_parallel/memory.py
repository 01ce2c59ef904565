"""What a replica remembers of a parameter from one step to the next.

All tensors are flat fp32 in the parameter's memory order. State changes in two strokes, as it does
at the cuts: a step notes what it would keep, and `commit` keeps it once the step is known to be
finite everywhere. State is free of the loss scale: ``unit`` is the factor from kept values to those
of a step (the loss scale, over the learning rate for a method that follows it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from mpcomp.feedback.slots import SlotStore, StoragePlan

__all__ = ["Draw", "Estimate", "Memory", "Residual", "State", "StateTensor"]

#: Makes a fresh generator; ``alike`` says whether all replicas draw the same from it.
Draw: TypeAlias = Callable[[bool], torch.Generator]


class State(ABC):
    """One thing that is remembered: noted in a step, then committed or discarded.

    Attributes:
        numel: elements of the tensor that `state_dict` has under the name itself, if it has one.
    """

    numel: int = 0

    @property
    @abstractmethod
    def known(self) -> bool:
        """Whether anything was ever committed."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of what is held, once it is."""

    @abstractmethod
    def commit(self) -> None:
        """Keeps what was noted."""

    @abstractmethod
    def discard(self) -> None:
        """Forgets what was noted."""

    @abstractmethod
    def state_dict(self, name: str) -> dict[str, Tensor]:
        """What was committed, under ``name`` and ``name:...``; nothing if nothing was."""

    @abstractmethod
    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state_dict` gave under this name.

        Raises:
            ValueError: it is not of this size.
        """


class StateTensor(State):
    """One fp32 vector in the precision and place of a `StoragePlan`; zeros until written."""

    def __init__(self, numel: int, plan: StoragePlan, device: torch.device) -> None:
        self.numel = numel
        self._store = SlotStore(numel, plan, device)
        self._rounds = isinstance(plan.storage, int)
        self._noted: Tensor | None = None

    def read(self, unit: float) -> Tensor:
        """A copy of what was committed, times ``unit``."""
        x = self._store.read([(0,)])[0]
        return x if unit == 1 else x * unit

    def note(self, x: Tensor, unit: float) -> None:
        """What `commit` will keep."""
        self._noted = x if unit == 1 else x / unit

    def commit(self) -> None:
        if self._noted is not None:
            self._store.write([(0,)], self._noted[None])
        self._noted = None

    def discard(self) -> None:
        self._noted = None

    @property
    def known(self) -> bool:
        """Whether anything was ever committed."""
        return len(self._store) > 0

    @property
    def num_bytes(self) -> int:
        return self._store.row_bytes

    def state_dict(self, name: str) -> dict[str, Tensor]:
        if not self.known:
            return {}
        # Bits would be rounded again when that is stored, so they are under ``name:0`` ... as well.
        state = {name: self.read(1.0)}
        if self._rounds:
            rows = self._store.state_dict()
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
        if rows and self._rounds:
            self._store.load_state_dict({**rows, "keys": torch.zeros(1, 1, dtype=torch.int64)})
        else:
            self.note(state[name].to(torch.float32), 1.0)
            self.commit()


class Memory:
    """Remembers nothing: the gradient itself is sent, and the mean of all is the result."""

    #: Whether `keep` wants to know what a message left out.
    keeps: bool = False

    def __init__(self) -> None:
        self._state: dict[str, State] = {}

    def wanted(self, gradient: Tensor, unit: float) -> Tensor:
        """What is to be sent for a gradient [n]; a new tensor, or the gradient itself."""
        return gradient

    def keep(self, rest: Tensor, positions: Tensor | None, unit: float, draw: Draw) -> None:
        """Notes what the message left out.

        Args:
            rest: [n], what was wanted less what was sent.
            positions: of the elements that were sent, ascending; None for all of them.
            unit: of this step.
            draw: for what is rounded at random to be kept.
        """

    def result(self, mean: Tensor, unit: float) -> Tensor:
        """The gradient for the optimizer, from the mean of what the replicas sent."""
        return mean

    @property
    def known(self) -> bool:
        """Whether anything was ever kept."""
        return any(state.known for state in self._state.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of what it keeps, once it does."""
        return sum(state.num_bytes for state in self._state.values())

    def commit(self) -> None:
        """Keeps what was noted."""
        for tensor in self._state.values():
            tensor.commit()

    def discard(self) -> None:
        """Forgets what was noted."""
        for tensor in self._state.values():
            tensor.discard()

    @property
    def sizes(self) -> dict[str, int]:
        """Of what can be kept the number of elements, by name."""
        return {name: state.numel for name, state in self._state.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """What has been kept, by name."""
        state: dict[str, Tensor] = {}
        for name, tensor in self._state.items():
            state |= tensor.state_dict(name)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state_dict` gave.

        Raises:
            ValueError: it is not of this size.
        """
        for name in dict.fromkeys(field.partition(":")[0] for field in state):
            self._state[name].load_state_dict(name, state)


class Residual(Memory):
    """Error feedback: w = g + e; e <- w - sent. Seide et al. 2014; Stich et al. 2018."""

    keeps = True

    def __init__(self, numel: int, plan: StoragePlan, device: torch.device) -> None:
        super().__init__()
        self._residual = self._state["residual"] = StateTensor(numel, plan, device)

    def wanted(self, gradient: Tensor, unit: float) -> Tensor:
        return gradient + self._residual.read(unit) if self._residual.known else gradient

    def keep(self, rest: Tensor, positions: Tensor | None, unit: float, draw: Draw) -> None:
        self._residual.note(rest, unit)


class Estimate(Memory):
    """EF21: d = C(g - h); h <- h + d at the sender; H <- H + mean of all d, which is the result.

    Richtarik et al. 2021, algorithm 2. Every replica holds its own estimate h, and H, the mean of
    all of them, which is the same on all.
    """

    keeps = True

    def __init__(self, numel: int, plan: StoragePlan, device: torch.device) -> None:
        super().__init__()
        self._own = self._state["own"] = StateTensor(numel, plan, device)
        self._mean = self._state["mean"] = StateTensor(numel, plan, device)
        self._gradient: Tensor | None = None

    def wanted(self, gradient: Tensor, unit: float) -> Tensor:
        self._gradient = gradient
        return gradient - self._own.read(unit)

    def keep(self, rest: Tensor, positions: Tensor | None, unit: float, draw: Draw) -> None:
        assert self._gradient is not None
        self._own.note(self._gradient - rest, unit)
        self._gradient = None

    def result(self, mean: Tensor, unit: float) -> Tensor:
        total = mean + self._mean.read(unit)
        self._mean.note(total, unit)
        return total
