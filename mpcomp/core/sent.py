"""Totals of what was sent and what it was made from, and the one factor that all figures are in.

Tensors of one run have several dtypes, so the bytes of the uncompressed tensors are no common unit.
Elements are: *below bf16* is how many times fewer bytes were sent than 2 for each element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Sent", "below_bf16", "below_bf16_text"]


def below_bf16(wire_bytes: float, num_elements: float) -> float | None:
    """The factor by which fewer bytes were sent than the elements have in bf16: higher is better.

    Args:
        wire_bytes: of whole messages.
        num_elements: of the tensors that they were made from; NaN where nobody counted them.

    Returns:
        The factor: 1 is bf16, 0.5 uncompressed fp32. None where it is not known, or nothing was
        sent.
    """
    if not wire_bytes or not num_elements > 0:  # NaN is not
        return None
    return 2 * num_elements / wire_bytes


def below_bf16_text(factor: float | None) -> str:
    """A factor as tables have it; nothing where it is not known."""
    return "" if factor is None else f"{factor:.1f}"


@dataclass(frozen=True)
class Sent:
    """Totals of messages, and of the tensors that they were made from.

    Attributes:
        wire_bytes: of the messages, headers included.
        dense_bytes: of the tensors in their own dtypes.
        num_elements: of the tensors; NaN where a file of a time before they were counted is part
            of the sum.
    """

    wire_bytes: float = 0
    dense_bytes: float = 0
    num_elements: float = 0

    @classmethod
    def of(cls, sums: Iterable[float]) -> Sent:
        """Of three whole numbers that were added up as floats."""
        return cls(*(int(each) if math.isfinite(each) else each for each in sums))

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> Sent:
        """From the figures of `to_dict`, among others; old ones have no number of elements."""
        counts = (figures[n] for n in ("wire_bytes", "dense_bytes"))
        return cls(*(math.nan if n is None else n for n in (*counts, figures.get("num_elements"))))

    def to_dict(self) -> dict[str, float | None]:
        """All counts under their names, as JSON can hold them: what is not known is None."""
        names = ("wire_bytes", "dense_bytes", "num_elements")
        return {n: None if math.isnan(v) else v for n, v in zip(names, self, strict=True)}

    def __iter__(self) -> Iterator[float]:
        return iter((self.wire_bytes, self.dense_bytes, self.num_elements))

    def __add__(self, other: Sent) -> Sent:
        return Sent(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: Sent) -> Sent:
        return Sent(*(a - b for a, b in zip(self, other, strict=True)))

    def __rmul__(self, factor: float) -> Sent:
        return Sent(*(factor * each for each in self))

    @property
    def wire_ratio(self) -> float:
        """Bytes sent over those of the tensors: lower is better; NaN where there were none."""
        return self.wire_bytes / self.dense_bytes if self.dense_bytes else math.nan

    @property
    def below_bf16(self) -> float | None:
        """See `below_bf16`."""
        return below_bf16(self.wire_bytes, self.num_elements)
