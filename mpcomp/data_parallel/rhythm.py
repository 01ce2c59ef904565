"""When replicas that train alone meet: which part of the model they average after which step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Rhythm"]


@dataclass(frozen=True)
class Rhythm:
    """A period, in which each part of a model has its turn once, at equal distances.

    With several parts a message is that much smaller and as many times more frequent: Streaming
    DiLoCo, Douillard et al. 2025.

    Args:
        period: steps between two turns of the same part.
        parts: how many.

    Raises:
        ValueError: a period below one step, or more parts than it has steps.
    """

    period: int
    parts: int = 1

    def __post_init__(self) -> None:
        if type(self.period) is not int or self.period < 1:
            raise ValueError(f"period={self.period!r}: expected a number of steps, 1 or more")
        if type(self.parts) is not int or not 1 <= self.parts <= self.period:
            raise ValueError(
                f"parts={self.parts!r}: each has a step of its own in a period of {self.period}; "
                f"expected 1 to {self.period}"
            )

    def due(self, step: int) -> int | None:
        """The part whose turn comes after a step, or None.

        Args:
            step: number of steps before it.
        """
        for part in range(self.parts):
            turn = (part + 1) * self.period // self.parts
            if (step + 1 - turn) % self.period == 0:
                return part
        return None

    def shares(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The part that each parameter belongs to: neighbours together, of about equal sizes.

        A parameter that is larger than a share leaves fewer, or none, to a part beside it.

        Args:
            sizes: elements of each parameter, in the model's order.
        """
        total, before, found = max(1, sum(sizes.values())), 0, {}
        for name, size in sizes.items():
            middle = before + size / 2
            found[name] = min(self.parts - 1, int(middle * self.parts / total))
            before += size
        return found
