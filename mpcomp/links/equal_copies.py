"""Copies that must stay equal: both ends of links, tied weights, the weights of replicas.

Nothing that a step computes shows it when two of them have come apart, by a bit that memory or the
network has turned, by an optimizer that steps by other gradients, or by a processor that rounds
otherwise. So every `PERIOD` steps each rank sums the bits of its copies, and the sums go into the
one that ends the step (`mpcomp.api.training_steps`), with weights that add up to zero::

    a link      + sender's estimates     - receiver's        in each replica
    a tie       + first copy             - last copy
    replicas    - (R - 1) first's        + each other's

What is not zero in the end are copies that differ. Then, and only then, ranks tell each other
which of them. Of a link the slots of the step's own messages are compared, so that the cost follows
from what a step sends, and not from what is kept of all samples.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from mpcomp.comm.mesh import Mesh
from mpcomp.core.bit_sum import bit_sum
from mpcomp.core.context import Step
from mpcomp.core.sketch import sketch, sketches_agree
from mpcomp.feedback.memory import Side
from mpcomp.links.link import Link
from mpcomp.links.tied_weights import TiedWeights

__all__ = ["PERIOD", "EqualCopies", "bits_by_slot", "bits_of"]

#: Steps between two comparisons. Mistakes of a script show in its first steps, so steps whose
#: numbers are powers of two, and the first, have one too until then.
PERIOD: Final = 100
#: Sums of so many bits times a number of replicas are exact in fp64.
_BITS: Final = 40
_SHOWN: Final = 3


class EqualCopies:
    """All copies of a pipeline, as one rank has them.

    Args:
        mesh: the ranks.
        links: all links.
        ties: the tied weights.
        stages: of this rank, if its replicas have equal weights; none if they need not.
        enabled: whether anything is compared.
    """

    def __init__(
        self,
        mesh: Mesh,
        links: Sequence[Link],
        ties: Sequence[TiedWeights],
        stages: Sequence[nn.Module],
        *,
        enabled: bool,
    ) -> None:
        self._mesh = mesh
        self._links = list(links)
        self._ties = list(ties)
        self._stages = list(stages) if mesh.num_replicas > 1 else []
        self._enabled = enabled
        self._warned = False

    def due(self, step: Step) -> bool:
        """Whether copies are compared at the end of a step."""
        early = step.index < PERIOD and step.index & (step.index - 1) == 0
        return self._enabled and step.train and (early or step.index % PERIOD == 0)

    def figures(self, step: Step) -> list[float]:
        """A number for each thing that has copies; summed over all ranks, zero of those alike."""
        if not self.due(step):
            return []
        of_links = [
            _folded(bits_of(link, Side.SENDER)) - _folded(bits_of(link, Side.RECEIVER))
            for link in self._links
        ]
        of_ties = [
            sum((1 - 2 * i) * _folded(bit_sum(copy)) for i, copy in tie.here.items())
            for tie in self._ties
        ]
        of_places = [0] * self._mesh.pp_size
        if self._stages:
            bits = torch.stack([bit_sum(weight).cpu() for weight in self._weights().values()])
            others = self._mesh.num_replicas - 1
            sign = 1 if self._mesh.replica else -others
            of_places[self._mesh.place] = sign * _folded(bit_sum(bits))
        return [float(number) for number in (*of_links, *of_ties, *of_places)]

    def check(self, step: Step, sums: Sequence[float]) -> None:
        """Compares what all ranks have found.

        Args:
            step: the step.
            sums: of `figures`, over all ranks.

        Raises:
            RuntimeError: copies differ, on every rank; those of weights by more than rounding, or
                on like processors.
        """
        if not any(sums):
            return
        links, ties = len(self._links), len(self._ties)
        for link, differs in zip(self._links, sums, strict=False):
            if differs:
                raise RuntimeError(self._of_link(link, step))
        for tie, differs in zip(self._ties, sums[links:], strict=False):
            if differs:
                self._of_weights(
                    {tie.copies[i][1]: copy for i, copy in tie.here.items()},
                    step,
                    "tied weights have come apart",
                    f"the two copies of {tie.name}",
                )
        if any(sums[links + ties :]):
            self._of_weights(self._weights(), step, "replicas have come apart", "")

    # -- what differs -------------------------------------------------------------------------

    def _of_link(self, link: Link, step: Step) -> str:
        """The slots in which the ends of a link differ, in words."""
        own = {side.value: bits_by_slot(link, side) for side in Side}
        found = self._mesh.all_gather_object(own, f"what differs at {link.name}")
        row = self._mesh.pp_size
        differing: dict[str, None] = {}
        for replica in range(self._mesh.num_replicas):
            ends: dict[str, dict[str, int]] = {side.value: {} for side in Side}
            for of_rank in found[row * replica : row * (replica + 1)]:
                for side, slots in of_rank.items():
                    ends[side].update(slots)
            sender, receiver = ends.values()
            where = f" of replica {replica}" if self._mesh.num_replicas > 1 else ""
            differing |= {
                f"{slot}{where}": None
                for slot in {**sender, **receiver}
                if sender.get(slot) != receiver.get(slot)
            }
        return (
            f"{link.name}, step {step.index}: the two ends no longer keep the same of "
            f"{_listed('slot', list(differing))} ({link.method}), so what arrives is not what was "
            "sent: go on from the last checkpoint; checks='message' finds a damaged message at once"
        )

    def _of_weights(self, own: dict[str, Tensor], step: Step, what: str, which: str) -> None:
        """Raises RuntimeError for weights that differ, or warns where it may be of rounding."""
        told: list[Any] = [
            _processor(self._mesh.device),
            {name: [int(bit_sum(weight)), *sketch([weight])] for name, weight in own.items()},
        ]
        found = self._mesh.all_gather_object(told, f"weights that differ: {what}")
        alike = len({processor for processor, _ in found}) == 1
        row = self._mesh.pp_size
        differing, rounding = [], True
        if which:  # of each replica the two copies, under their own names
            differing = [which]
            for replica in range(self._mesh.num_replicas):
                both = [
                    of_name
                    for _, weights in found[row * replica : row * (replica + 1)]
                    for of_name in weights.values()
                ]
                rounding &= sketches_agree(both[0][1:], both[-1][1:])
        else:
            for rank, (_, weights) in enumerate(found):
                first = found[rank % row][1]
                for name, (bits, *sketched) in weights.items():
                    if bits != first[name][0]:
                        differing.append(f"{name} (rank {rank} and rank {rank % row})")
                        rounding &= sketches_agree(sketched, first[name][1:])
        named = f"{what} at step {step.index}: {_listed('', differing)} are not the same"
        if alike or not rounding:
            raise RuntimeError(
                f"{named}. Give all ranks the same weights, by torch.manual_seed with one number "
                "before the model is made or by one file, and build the optimizer, the same on all "
                "ranks, over pipe.parameters(): it has both copies of a tied weight, of which the "
                "model's own parameters() has one. If that is so, go on from the last checkpoint"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{named}, by no more than rounding, as their processors are of different kinds: "
                f"{'; '.join(sorted({processor for processor, _ in found}))}",
                stacklevel=2,
            )

    def _weights(self) -> dict[str, Tensor]:
        return {
            name: weight.detach()
            for stage in self._stages
            for name, weight in stage.named_parameters()
        }


def bits_of(link: Link, side: Side) -> Tensor:
    """A sum over the bits of what an end here has kept, as the other end has; int64 [].

    Of the open step's messages, as the steps before it have left that; zero of an end that is not
    here.
    """
    sums = [bit_sum(rows).cpu() for _, rows in link.endpoint.copies(side)]
    return bit_sum(torch.stack(sums)) if sums else torch.zeros((), dtype=torch.int64)


def bits_by_slot(link: Link, side: Side) -> dict[str, int]:
    """As `bits_of`, by the name of what is kept, such as a slot's key."""
    return {
        name: int(bit_sum(row))
        for names, rows in link.endpoint.copies(side)
        for name, row in zip(names, rows, strict=True)
    }


def _folded(bits: Tensor) -> int:
    """Low bits of a sum."""
    return int(bits) & ((1 << _BITS) - 1)


def _processor(device: torch.device) -> str:
    """The kind of processor that a rank's numbers come from."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{models[0] if models else platform.machine()} ({capability})"


def _listed(kind: str, names: Sequence[str]) -> str:
    shown = [f"{kind} {name}".strip() for name in names[:_SHOWN]]
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*shown, *more])
