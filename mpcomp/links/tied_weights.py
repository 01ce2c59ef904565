"""Tied weights: a parameter that the model has once, and two stages have equal copies of.

A language model's embedding is often its head as well. Cut apart, each copy gathers the gradient
of its own use in all microbatches; then the two gradients are exchanged and added up, once a step,
so that an optimizer changes both copies alike::

    stage 0   g_first ──┐ message ┌──> g_first + g_last
                        X                              the same sum, in the same order
    last      g_last  ──┘ message └──> g_first + g_last

Order of a step: all backwards, the sum over the tie, the mean over replicas, the norm (in which the
parameter counts once), the optimizer. The messages are metered like those of a cut, and may be
compressed; both ends then add up what the messages say, not what they were made from. A copy
without a gradient says so, and where neither has one both stay without.

An embedding's gradient has rows of the batch's tokens only, and these alone are sent, with their
numbers. Compressors are given them as a smaller tensor. Error feedback keeps the error of a row
until the token comes again; methods that keep an estimate of all rows send all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from torch import Tensor, nn

import stages as staging
from mpcomp.comm.channels import Channel, LocalChannel
from mpcomp.core.context import Step, TensorMeta
from mpcomp.core.spec import SpecValue
from mpcomp.links.boundary import Crossing, TwoLinks
from mpcomp.links.link import Link

__all__ = [
    "DIRECTIONS",
    "SharedWeight",
    "Tie",
    "TiedWeights",
    "check_alike",
    "fresh_copy",
    "separate_gradients",
    "ties_of",
    "trained_and_frozen",
]

#: Which copy's gradient a link carries.
DIRECTIONS = ("tie_first", "tie_last")


class Tie(ABC):
    """A parameter that the model has once, and two stages use.

    Args:
        uses: stage and qualified name of both.
    """

    def __init__(self, uses: Sequence[tuple[int, str]]) -> None:
        self.copies = tuple(uses)
        self._here: dict[int, tuple[nn.Module, str]] = {}

    @property
    def name(self) -> str:
        """Name in reports: the first one."""
        return self.copies[0][1]

    @property
    def stages(self) -> tuple[int, int]:
        """The stages that use it."""
        (first, _), (last, _) = self.copies
        return first, last

    def find(self, stages: Mapping[int, nn.Module]) -> None:
        """Finds the uses in the stages of this rank, which are given by number."""
        self._here = {
            i: (stages[stage], name)
            for i, (stage, name) in enumerate(self.copies)
            if stage in stages
        }

    @property
    def here(self) -> dict[int, nn.Parameter]:
        """Parameters that gather the gradients of the uses on this rank: 0 is the first."""
        return {i: stage.get_parameter(name) for i, (stage, name) in self._here.items()}

    def follow(self) -> None:  # noqa: B027  (copies are alike by what is done to both)
        """Before a pass: makes one weight of both uses, should one have been replaced or frozen."""

    @property
    def trains(self) -> bool:
        """Whether there is one here that gathers gradients."""
        return any(use.requires_grad for use in self.here.values())

    @property
    def rests(self) -> bool:
        """Whether there is one here that does not."""
        return not all(use.requires_grad for use in self.here.values())

    def take_gradients(self) -> dict[int, Tensor | None]:
        """Takes away what was gathered here in earlier steps."""
        before = {i: use.grad for i, use in self.here.items()}
        for use in self.here.values():
            use.grad = None
        return before

    def put_back(self, before: Mapping[int, Tensor | None]) -> None:
        """Gives back what `take_gradients` took."""
        for i, grad in before.items():
            self.here[i].grad = grad

    @abstractmethod
    def add_up(self, before: Mapping[int, Tensor | None], step: Step) -> None:
        """Makes of both gradients of this step, and of what there was before, their sum."""


class SharedWeight(Tie):
    """A weight whose both uses are on one rank, in stages that are together.

    The last stage's use gathers its gradient by itself, so that the order of additions is the same
    whatever runs when; beside that it is the weight. If replicas have pieces of it, it is one
    parameter for both until it is gathered.
    """

    def find(self, stages: Mapping[int, nn.Module]) -> None:
        super().find(stages)
        self.follow()

    @property
    def trains(self) -> bool:
        return bool(self._here) and self.here[0].requires_grad

    @property
    def rests(self) -> bool:
        return bool(self._here) and not self.trains

    def follow(self) -> None:
        if self._here:
            first, again = self.here[0], self.here[1]
            if again is first:
                self._separate(first)
                return
            again.data = first.data
            again.requires_grad_(first.requires_grad)

    def _separate(self, first: nn.Parameter) -> None:
        """Gives the second use a parameter with the memory of the first."""
        owner, leaf = staging.owner_of(*self._here[1])
        owner.register_parameter(leaf, nn.Parameter(first.detach(), first.requires_grad))

    def add_up(self, before: Mapping[int, Tensor | None], step: Step) -> None:
        first, again = self.here[0], self.here[1]
        parts = [grad for grad in (first.grad, again.grad) if grad is not None]
        again.grad = None
        if parts:
            total = parts[0] + parts[1] if len(parts) == 2 else parts[0]
            first.grad = total if before[0] is None else before[0] + total
        else:
            first.grad = before[0]


class TiedWeights(Tie, TwoLinks):
    """A weight of which two stages have copies, and exchange their gradients.

    Args:
        copies: stage and qualified name of both.
        links: of the first copy's gradient, and of the last one's.
    """

    def __init__(self, copies: Sequence[tuple[int, str]], links: tuple[Link, Link]) -> None:
        Tie.__init__(self, copies)
        TwoLinks.__init__(self, links)
        self._channels: Sequence[Channel] = ()

    def _crossing(self, i: int) -> Crossing:
        """The way of copy ``i``'s gradient."""
        return Crossing(self.links[i], self._channels[i])

    def attach(
        self, stages: Mapping[int, nn.Module], channels: tuple[Channel, Channel] | None = None
    ) -> None:
        """Finds the copies on this rank.

        Args:
            stages: those of this rank, by number.
            channels: of both links, where the other copy is on another rank.
        """
        self.find(stages)
        if len(self.here) == 2:
            assert channels is None
            channels = LocalChannel(self.here[1].device), LocalChannel(self.here[0].device)
        self._channels = channels or ()
        if any(channel.equal_lengths for channel in self._channels):
            for link in self.links:  # a message of few rows would be as long as one of all
                link.num_rows = None

    def add_up(self, before: Mapping[int, Tensor | None], step: Step) -> None:
        """Gives each copy here the sum of both gradients of this step, and what it had before."""
        # One message a step of each copy, whatever microbatches its gradient was gathered from.
        step = replace(step, num_microbatches=1, valid=())
        copy = next(iter(self.here.values()))
        meta = TensorMeta((1, copy.numel()), copy.dtype)
        for i, channel in enumerate(self._channels):
            channel.release()  # ranks have met since the last step
            if i not in self.here:
                self._crossing(i).post(meta, step, 0)
        messages: dict[int, Tensor] = {}
        for i, copy in self.here.items():
            if copy.grad is None:
                self._crossing(i).send_nothing(meta, step, 0)
                continue
            row = copy.grad.detach().reshape(1, -1)
            encoded = self._crossing(i).encode(row, meta, step, 0)
            messages[i] = encoded.message
            self._crossing(i).send_encoded(encoded)
        parts = [self._part(i, messages, meta, step) for i in range(2)]
        for i, copy in self.here.items():
            total = before[i]
            there = [part.to(copy.device) for part in parts if part is not None]
            if there:
                # A copy, as both copies may be here; and not in place: should a later tie fail,
                # `separate_gradients` gives back what there was.
                both = there[0] + there[1] if len(there) == 2 else there[0].clone()
                both = both.reshape(copy.shape)
                total = both if total is None else total + both
            copy.grad = total

    def _part(
        self, i: int, messages: Mapping[int, Tensor], meta: TensorMeta, step: Step
    ) -> Tensor | None:
        """The gradient of copy ``i`` as its message says, at both ends alike; None without one."""
        link = self.links[i]
        if 1 - i not in self.here:  # which would receive it
            return link.arrived(messages[i], step, 0) if i in messages else None
        return self._crossing(i).receive_any(meta, step, 0)


def fresh_copy(link: Link) -> Link:
    """A link like this one that has sent nothing yet, beyond its warm-up."""
    seed, replica, boundary, direction = link.seed
    return Link(
        link.method,
        boundary=boundary,
        direction=direction,
        seed=seed,
        replica=replica,
        ends=(link.sender_stage, link.receiver_stage),
        name=link.name,
        checked=link.checked,
        num_rows=link.num_rows,
    )


def trained_and_frozen(ties: Sequence[Tie]) -> tuple[int, int]:
    """Two numbers: bit i says that tie i has a copy here that is trained, or one that is not."""
    trained = sum(tie.trains << i for i, tie in enumerate(ties))
    return trained, sum(tie.rests << i for i, tie in enumerate(ties))


def check_alike(ties: Sequence[Tie], trained: int, frozen: int) -> None:
    """Raises ValueError if a tie has a copy that is trained and one that is not.

    Args:
        ties: all of them.
        trained: of `trained_and_frozen`, of all ranks that have copies.
        frozen: likewise.
    """
    for i, tie in enumerate(ties):
        if (trained & frozen) >> i & 1:
            names = " and ".join(name for _, name in tie.copies)
            raise ValueError(
                f"{names} are one parameter in two stages, but only one of them requires a "
                "gradient: freeze or train both, under both names, or before mpcomp.pipeline"
            )


@contextmanager
def separate_gradients(
    ties: Sequence[Tie], step: Step
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within it both uses of a tie gather their gradients apart; at its end they are added up.

    What it gives is a context for an update before the end, in which they are added up as well. If
    it ends with an error, they have what they had before.
    """
    check_alike(ties, *trained_and_frozen(ties))
    training = [tie for tie in ties if tie.trains]
    before = [tie.take_gradients() for tie in training]

    def follow() -> None:
        for tie in ties:
            tie.follow()

    def add_up() -> None:
        for tie, held in zip(training, before, strict=True):
            tie.add_up(held, step)

    @contextmanager
    def added_up() -> Iterator[None]:
        add_up()
        yield
        before[:] = [tie.take_gradients() for tie in training]
        follow()

    follow()
    try:
        yield added_up
        add_up()
    except BaseException:
        for tie, held in zip(training, before, strict=True):
            tie.put_back(held)
        raise


def ties_of(
    cut: Sequence[staging.Stage],
    method: SpecValue,
    *,
    seed: int,
    replica: int,
    warmup_steps: int,
    checked: bool = False,
) -> list[Tie]:
    """The ties of a cut model.

    Args:
        cut: all stages.
        method: what is done to the gradients that are exchanged.
        seed: of the run.
        replica: number of this pipeline.
        warmup_steps: training steps that go uncompressed at first.
        checked: whether each message has a sum over its bits.

    Raises:
        ValueError: more than two stages share a parameter, or a method that has no place here.
    """
    if cut[0].together:
        return [SharedWeight(uses) for uses in staging.ties(cut)]
    if method.by_sample:
        raise ValueError(f"tie_comp={method}: a weight's gradient belongs to no sample; use ef+...")
    ties: list[Tie] = []
    for copies in staging.ties(cut):
        if len(copies) != 2:
            raise ValueError(
                f"{' and '.join(name for _, name in copies)} are one parameter in {len(copies)} "
                "stages; two can share one: cut the model elsewhere"
            )
        number = len(cut) - 1 + len(ties)
        shape = cut[copies[0][0]].get_parameter(copies[0][1]).shape
        first, last = (
            Link(
                method,
                boundary=number,
                direction=direction,
                seed=seed,
                replica=replica,
                warmup_steps=warmup_steps,
                checked=checked,
                ends=(copies[i][0], copies[1 - i][0]),
                name=f"tied {copies[0][1]}, copy of stage {copies[i][0]}",
                num_rows=shape[0] if len(shape) > 1 else None,
            )
            for i, direction in enumerate(DIRECTIONS)
        )
        ties.append(TiedWeights(copies, (first, last)))
    if not ties and not method.sends_dense:
        raise ValueError(
            f"tie_comp={method}: no two stages share a parameter here, so there is nothing to "
            "compress; leave it out"
        )
    return ties
