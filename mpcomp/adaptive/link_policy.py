"""The state of an adaptive link, and what it sees of the open step.

A state is on every rank, and equal on all: it changes at the end of a step, by sums over all ranks
alone. What it *notes* in a step is noted where the link sends, and is zero elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpcomp.adaptive.gain import base_energy, gain_of, rest_energy
from mpcomp.adaptive.method import Adaptive
from mpcomp.adaptive.search import Branch, Search
from mpcomp.compressors.base import Compressor, Identity
from mpcomp.core.context import TensorMeta
from mpcomp.feedback.base import Feedback

__all__ = ["LinkState", "Searching"]


class LinkState(ABC):
    """The state of one link.

    Args:
        method: its settings.

    Attributes:
        cf: what training sends with; 1 where that is dense.
        changes: how often that has changed.
    """

    def __init__(self, method: Adaptive) -> None:
        self.method = method
        self.cf = 1.0
        self.changes = 0
        self._coder: Compressor | Feedback = Identity()
        self._due = True  # whether a gain that is measured once a window has to be
        self._forget()

    def _forget(self) -> None:
        self._base: Tensor | float = 0.0
        self._rests: list[Tensor | float] = [0.0] * self._num_rests

    @property
    @abstractmethod
    def _num_rests(self) -> int:
        """Number of CFs that may be measured in a step."""

    @property
    def num_figures(self) -> int:
        """Length of `figures`."""
        return 1 + self._num_rests

    @property
    @abstractmethod
    def cfs(self) -> tuple[float, ...]:
        """The CFs whose gains are looked at, ascending."""

    @property
    def dense(self) -> bool:
        """Whether training sends dense."""
        return self._coder.sends_dense

    @property
    def coder(self) -> Compressor | Feedback:
        """The coder of a message of training: the method at `cf`, or `Identity`."""
        return self._coder

    def fresh(self) -> LinkState:
        """A state as this one was before the first step."""
        return type(self)(self.method)

    def _send_with(self, cf: float | None) -> None:
        """Sets what is sent from now on; None is dense."""
        coder = Identity() if cf is None else self.method.at(cf)
        if coder != self._coder:
            self.changes += 1
        self._coder = coder
        self.cf = 1.0 if cf is None else cf

    # -- what is noted in a step ----------------------------------------------------------------

    @property
    def measures_energies(self) -> bool:
        """Whether this step wants the tensor of `note_energies`."""
        return self.method.budget is None or self._due

    def note_energies(
        self,
        wanted: Tensor,
        against: Tensor,
        padded: Tensor | None,
        draw: Callable[[str], torch.Generator],
    ) -> None:
        """Measures how much each CF would leave out.

        Args:
            wanted: what is compressed, of one microbatch; zero where it is padded.
            against: what its energy is compared with.
            padded: of `mpcomp.core.context.padded_positions`.
            draw: a fresh generator for a part of the message.
        """
        self._base = base_energy(against, padded, centred=self.method.gain == "centred")
        for i, cf in enumerate(self.cfs):
            self._rests[i] = rest_energy(self.method.compressor(cf), wanted, padded, draw)

    @abstractmethod
    def note_message(self, num_bytes: int, meta: TensorMeta) -> None:
        """Counts a message of training that was sent while compression was on."""

    def figures(self) -> list[float]:
        """This rank's notes, to be summed up over all; forgets them (and waits for them)."""
        figures = [float(self._base), *map(float, self._rests)]
        self._forget()
        return figures

    def discard(self) -> None:
        """Forgets what was noted."""
        self._forget()

    # -- the end of a step ----------------------------------------------------------------------

    @abstractmethod
    def finish_step(
        self, sums: Sequence[float], *, finite: bool, on: bool, seconds: float, replicas: int
    ) -> dict[str, Any]:
        """Ends a step, and decides for the next.

        Args:
            sums: of `figures`, over all ranks.
            finite: whether the step was; else it counts, and nothing else.
            on: whether this link was to be compressed in it.
            seconds: that it took.
            replicas: number of pipelines.

        Returns:
            For the history: cf, branch and gain of what was sent, as numbers and words.
        """

    @abstractmethod
    def gains(self) -> dict[float, float]:
        """The average gain of each CF, as far as it is known."""

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON can hold it: enough to go on exactly."""
        return {"cf": None if self.dense else self.cf, "changes": self.changes, "due": self._due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave.

        Raises:
            ValueError: it is the state of another method.
        """
        self._send_with(state["cf"])
        self.changes = state["changes"]
        self._due = state["due"]
        self._forget()


class Searching(LinkState):
    """The state of a link that follows GraVAC's rule.

    Attributes:
        search: the rule.
    """

    def __init__(self, method: Adaptive) -> None:
        self.search = Search(
            method.cf,
            eps=method.eps,
            window=method.window,
            omega=method.omega,
            policy=method.policy,
            smoothing=method.weight,
        )
        super().__init__(method)
        self._clock = method.clock()
        self._branch: Branch = "dense"

    def _forget(self) -> None:
        super()._forget()
        self._bytes = 0
        self._messages = 0

    @property
    def _num_rests(self) -> int:
        return 2

    @property
    def num_figures(self) -> int:
        return super().num_figures + 2

    @property
    def cfs(self) -> tuple[float, ...]:
        search = self.search
        if search.cf_min == search.cf_candidate:
            return (search.cf_min,)
        return search.cf_min, search.cf_candidate

    def note_message(self, num_bytes: int, meta: TensorMeta) -> None:
        self._bytes += num_bytes
        self._messages += 1

    def figures(self) -> list[float]:
        traffic = [float(self._bytes), float(self._messages)]
        return [*super().figures(), *traffic]

    def finish_step(
        self, sums: Sequence[float], *, finite: bool, on: bool, seconds: float, replicas: int
    ) -> dict[str, Any]:
        base, rest_min, rest_candidate, num_bytes, num_messages = sums
        search = self.search
        entry: dict[str, Any] = {"cf": self.cf, "branch": self._branch if on else "off"}
        if on and finite:
            gains = gain_of(base, (rest_min, rest_candidate)[: len(self.cfs)])
            if gains is not None:
                search.average(gains[0], gains[-1])
                self._due = False
            if self._clock is not None:
                seconds = self._clock.lap(num_bytes / replicas, round(num_messages / replicas))
            if num_messages:
                search.record(self._branch, seconds)
        entry["gain"] = self.gains().get(self.cf) if self._branch != "dense" else 1.0
        entry["gain_min"], entry["gain_candidate"] = search.gain_min, search.gain_candidate
        if not on:
            entry["cf"], entry["gain"] = 1.0, 1.0
        if search.end_step() is not None:
            self._due = True
        self._branch = search.branch()
        self._send_with(None if self._branch == "dense" else search.cf_of(self._branch))
        return entry

    def gains(self) -> dict[float, float]:
        search = self.search
        known = {search.cf_candidate: search.gain_candidate, search.cf_min: search.gain_min}
        return {cf: gain for cf, gain in sorted(known.items()) if gain is not None}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "search": self.search.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "search" not in state:
            raise ValueError(
                f"the state is of a link with a budget, this one has {self.method}: resume with "
                "the same method"
            )
        self.search.load_state_dict(state["search"])
        super().load_state_dict(state)
        self._branch = self.search.branch()
