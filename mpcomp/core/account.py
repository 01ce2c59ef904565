"""The account of a step: all that goes over links for it, by what it is for.

Bytes at the cuts are a part of what a link carries. A step also exchanges the gradients of tied
weights, averages gradients between replicas, and begins and ends with an agreement of all ranks.
Every figure of a whole step is made here; docs/guide/counting.md has the definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite, nan
from typing import Any, Final

from mpcomp.core.sent import Sent, below_bf16_text

__all__ = ["Account", "agreed_in_step"]

NOTHING: Final = Sent()
#: Numbers of a record at the start of a step (`mpcomp.comm.handshake.StepFingerprint`), and of one
#: at its end (`mpcomp.api.training_steps`) beside a number for each link; of 8 bytes.
_AT_START: Final = 9
_AT_END: Final = 6
_NUMBER_BYTES: Final = 8
#: Directions of links that carry gradients of tied weights (`mpcomp.links.tied_weights`).
_OF_TIES: Final = ("tie_first", "tie_last")
#: Of a part that goes nearly as it is, what makes it smaller; of any, where to read on.
_REMEDIES: Final[Mapping[str, tuple[str, str]]] = {
    "cuts": ("compress them with act_comp= and grad_comp=", "docs/start/which_setting.md"),
    "ties": ("compress them with tie_comp=", "docs/guide/language_models.md"),
    "replicas": ("compress them with dp_comp=", "docs/guide/replicas.md"),
    "agreements": ("give a step more rows", "docs/guide/asynchronous.md"),
}
#: Times below bf16 from which on a part counts as compressed.
_COMPRESSED: Final = 1.5


@dataclass(frozen=True)
class Account:
    """Totals of what was sent in some steps, or their mean, by part; headers are in each part.

    Attributes:
        cuts: activations and their gradients, between stages.
        ties: gradients of weights that two stages have copies of.
        replicas: gradients, or parameters, between replicas; a message to several counts once.
        agreements: of all ranks, at both ends of a step; it stands for no elements.
    """

    cuts: Sent = NOTHING
    ties: Sent = NOTHING
    replicas: Sent = NOTHING
    agreements: Sent = NOTHING

    @classmethod
    def of_links(
        cls,
        links: Iterable[tuple[str, Sent]],
        *,
        replicas: Sent = NOTHING,
        agreements: Sent = NOTHING,
    ) -> Account:
        """The account of links.

        Args:
            links: of each its direction, and what it has sent.
            replicas: as the attribute, as are ``agreements``.
        """
        cuts = ties = NOTHING
        for direction, sent in links:
            if direction in _OF_TIES:
                ties += sent
            else:
                cuts += sent
        return cls(cuts, ties, replicas, agreements)

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any] | None) -> Account:
        """From the ``parts`` of `to_dict`; None is for runs that did not count them."""
        if figures is None:
            return cls(*(Sent(nan, nan, nan) for _ in fields(cls)))
        return cls(**{name: Sent.from_dict(each) for name, each in figures.items()})

    def to_dict(self) -> dict[str, Any]:
        """All figures under their names, as JSON can hold them: what is not known is None."""
        return {
            "parts": {
                name: {**part.to_dict(), "below_bf16": part.below_bf16}
                for name, part in self.parts.items()
            },
            **self.whole.to_dict(),
            "below_bf16": self.below_bf16,
            "cuts_below_bf16": self.cuts.below_bf16,
            "largest": self.largest,
        }

    @property
    def parts(self) -> dict[str, Sent]:
        """The parts under their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def whole(self) -> Sent:
        """The sum of all parts."""
        return sum(self.parts.values(), NOTHING)

    @property
    def below_bf16(self) -> float | None:
        """Times fewer bytes than the same steps send with nothing compressed, all in bf16."""
        return self.whole.below_bf16

    @property
    def largest(self) -> str | None:
        """Name of the part with most bytes; None where nothing was sent, or not all is known."""
        name, part = max(self.parts.items(), key=lambda item: item[1].wire_bytes)
        return name if isfinite(self.whole.wire_bytes) and part.wire_bytes else None

    def summary(self) -> list[str]:
        """Two sentences on a step: its bytes, and what most of them are for; none of nothing."""
        whole, largest = self.whole, self.largest
        if largest is None:
            return []
        said = f"a step sends {_megabytes(whole)} in all"
        if self.below_bf16 is not None:
            said += f", {below_bf16_text(self.below_bf16)} times below bf16"
        if self.cuts.below_bf16 is not None:
            said += f"; at the cuts alone {_megabytes(self.cuts)}, "
            said += f"{below_bf16_text(self.cuts.below_bf16)} times below bf16"
        part = self.parts[largest]
        share = part.wire_bytes / whole.wire_bytes
        remedy, page = _REMEDIES[largest]
        if (part.below_bf16 or 0) >= _COMPRESSED:
            remedy = "what they cost, and milder and stronger methods"
        return [said, f"most of it: {largest}, {_megabytes(part)} ({share:.0%}): {remedy} ({page})"]

    def __add__(self, other: Account) -> Account:
        return Account(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: Account) -> Account:
        return Account(*(a - b for a, b in zip(self, other, strict=True)))

    def __rmul__(self, factor: float) -> Account:
        return Account(*(factor * each for each in self))

    def __iter__(self) -> Iterator[Sent]:
        return iter(self.parts.values())


def agreed_in_step(num_ranks: int, num_links: int) -> Sent:
    """The bytes of a step's two agreements: each rank's records go to all others.

    What adaptive links have measured, and sums over copies that are compared every hundred steps,
    come on top of that and are not counted.

    Args:
        num_ranks: of all replicas.
        num_links: of the pipeline.
    """
    numbers = _AT_START + _AT_END + num_links
    return Sent(num_ranks * (num_ranks - 1) * _NUMBER_BYTES * numbers)


def _megabytes(sent: Sent) -> str:
    return f"{sent.wire_bytes / 1e6:.3g} MB"
