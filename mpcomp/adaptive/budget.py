"""Bytes shared out among links: most of them where the gain falls fastest without.

Each link of a group has a ladder of CFs, and at each of them a gain and a number of bytes. From
the highest CF everywhere, the link that gains most a byte steps down, as long as the bytes of all
stay within the budget; over several CFs at once where the next one gains less (in a small tensor
some send the same)::

    link   gain at CF 50, 32, 8     KB        steps: a to 32 (0.3 for 1 KB), a to 8 (0.1 for 4 KB),
    a      0.5   0.8   0.9      2   3   7     b to 32 (0.01 for 1 KB) ... until the budget is spent
    b      0.97  0.98  0.99     2   3   7

Gains are relative to each link's own tensors, and links weigh the same. A step that fits no more
does not keep others from being taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpcomp.adaptive.gain import gain_of
from mpcomp.adaptive.link_policy import LinkState
from mpcomp.adaptive.method import Adaptive
from mpcomp.compressors.base import Identity, shrinks
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import Form

__all__ = ["Budgeted", "Ladder", "bytes_at", "share_out"]


@dataclass(frozen=True)
class Ladder:
    """Gain and bytes of a link at each of its CFs, ascending.

    Attributes:
        gains: of the CFs.
        num_bytes: likewise, of all messages of a step.
        dense_bytes: of these, uncompressed.
    """

    gains: Sequence[float]
    num_bytes: Sequence[float]
    dense_bytes: float


def share_out(ladders: Sequence[Ladder], budget: float) -> list[int]:
    """The rung of each link.

    Args:
        ladders: of a group.
        budget: part of all dense bytes that may be sent; the highest CFs are taken also where they
            do not fit.
    """
    rungs = [len(ladder.gains) - 1 for ladder in ladders]
    spent = sum(ladder.num_bytes[-1] for ladder in ladders)
    allowed = budget * sum(ladder.dense_bytes for ladder in ladders)
    while True:
        best: tuple[float, int, int] | None = None
        for link, (ladder, rung) in enumerate(zip(ladders, rungs, strict=True)):
            for lower in range(rung - 1, -1, -1):
                rise = ladder.gains[lower] - ladder.gains[rung]
                more = ladder.num_bytes[lower] - ladder.num_bytes[rung]
                if rise <= 0 or spent + more > allowed:
                    continue
                slope = rise / more if more > 0 else float("inf")
                if best is None or slope > best[0]:
                    best = slope, link, lower
        if best is None:
            return rungs
        _, link, lower = best
        spent += ladders[link].num_bytes[lower] - ladders[link].num_bytes[rungs[link]]
        rungs[link] = lower


def bytes_at(method: Adaptive, meta: TensorMeta) -> list[float]:
    """Bytes of a message for a tensor like ``meta``: dense, then at each CF."""
    sizes = [float(meta.dense_bytes)]
    for cf in method.rungs:
        compressor = method.compressor(cf)
        coder = compressor if shrinks(compressor, meta) else Identity()
        sizes.append(float(Form(coder.layout(meta)).num_bytes))
    return sizes


class Budgeted(LinkState):
    """The state of a link that shares a budget with others.

    Its CF comes from outside: before gains are known the same for the whole group.
    """

    def __init__(self, method: Adaptive) -> None:
        self._rungs = method.rungs
        super().__init__(method)
        self._known: list[float] | None = None  # average gains
        self._steps = 0
        #: What it has measured in the step that has just ended; None if that is not known.
        self.ladder: Ladder | None = None

    def _forget(self) -> None:
        super()._forget()
        self._sizes = [0.0] * (1 + len(self._rungs))

    @property
    def _num_rests(self) -> int:
        return len(self._rungs)

    @property
    def num_figures(self) -> int:
        return super().num_figures + 1 + len(self._rungs)

    @property
    def cfs(self) -> tuple[float, ...]:
        return self._rungs

    def begin(self, rung: int) -> None:
        """Sends with the CF of this number at first."""
        self._send_with(self._rungs[rung])
        self.changes = 0

    def choose(self, rung: int) -> None:
        """Sends with the CF of this number until the next decision."""
        self._send_with(self._rungs[rung])
        self._due = self._steps % self.method.window == 0

    def note_message(self, num_bytes: int, meta: TensorMeta) -> None:
        if self._due:
            sizes = bytes_at(self.method, meta)
            self._sizes = [a + b for a, b in zip(self._sizes, sizes, strict=True)]

    def figures(self) -> list[float]:
        sizes = self._sizes
        return [*super().figures(), *sizes]

    def finish_step(
        self, sums: Sequence[float], *, finite: bool, on: bool, seconds: float, replicas: int
    ) -> dict[str, Any]:
        base, *rest = sums
        rests, (dense_bytes, *sizes) = rest[: len(self._rungs)], rest[len(self._rungs) :]
        self.ladder = None
        if on and finite and self._due:
            # Bytes are worth what a gain rises by, also where it is below 0.
            self._average(gain_of(base, rests, clamped=False))
            gains = self._known or [1.0] * len(self._rungs)  # of nothing but zeros
            self.ladder = Ladder(tuple(gains), tuple(sizes), dense_bytes)
        self._steps += 1
        if self._steps % self.method.window == 0:
            self._due = True
        return {
            "cf": self.cf if on else 1.0,
            "branch": "budget" if on else "off",
            "gain": self.gains().get(self.cf) if on else 1.0,
        }

    def _average(self, gains: Sequence[float] | None) -> None:
        if gains is None:
            return
        weight = self.method.weight
        before = self._known or gains
        self._known = [(1 - weight) * a + weight * b for a, b in zip(before, gains, strict=True)]

    def gains(self) -> dict[float, float]:
        return dict(zip(self._rungs, self._known or (), strict=False))

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "rungs": list(self._rungs),
            "gains": self._known,
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("rungs") != list(self._rungs):
            raise ValueError(
                f"the state is of a link with the CFs {state.get('rungs')} to share a budget by, "
                f"this one has {list(self._rungs)}: resume with the same method"
            )
        super().load_state_dict(state)
        self._known = state["gains"]
        self._steps = state["steps"]
        self.ladder = None
