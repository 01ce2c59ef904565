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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

import stages as staging
from mpcomp.comm.channels import Channel, LocalChannel
from mpcomp.core.spec import SpecValue
from mpcomp.core.step import Step
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.links.link import Link

__all__ = [
    "DIRECTIONS",
    "TiedWeights",
    "check_alike",
    "separate_gradients",
    "ties_of",
    "trained_and_frozen",
]

#: Which copy's gradient a link carries.
DIRECTIONS = ("tie_first", "tie_last")


class TiedWeights:
    """One tied parameter.

    Args:
        copies: stage and qualified name of both.
        links: of the first copy's gradient, and of the last one's.
    """

    def __init__(self, copies: Sequence[tuple[int, str]], links: tuple[Link, Link]) -> None:
        self.copies = tuple(copies)
        self.links = links
        self.failed = False  # as a boundary has it
        #: The copies on this rank: 0 is the first.
        self.here: dict[int, nn.Parameter] = {}
        self._channels: Sequence[Channel] = ()

    @property
    def name(self) -> str:
        """Name in reports: that of the first copy."""
        return self.copies[0][1]

    @property
    def stages(self) -> tuple[int, int]:
        """The stages that have the copies."""
        (first, _), (last, _) = self.copies
        return first, last

    def attach(
        self, stages: Mapping[int, nn.Module], channels: tuple[Channel, Channel] | None = None
    ) -> None:
        """Finds the copies on this rank.

        Args:
            stages: those of this rank, by number.
            channels: of both links, where the other copy is on another rank.
        """
        self.here = {
            i: stages[stage].get_parameter(name)
            for i, (stage, name) in enumerate(self.copies)
            if stage in stages
        }
        if len(self.here) == 2:
            assert channels is None
            channels = LocalChannel(self.here[1].device), LocalChannel(self.here[0].device)
        self._channels = channels or ()

    @contextmanager
    def crossed_anew(self) -> Iterator[None]:
        """Within it links that have sent nothing yet stand in for those here, and are then gone."""
        before, failed = self.links, self.failed
        first, last = before
        self.links = first.renewed(), last.renewed()
        try:
            yield
        finally:
            self.links, self.failed = before, failed

    @property
    def trains(self) -> bool:
        """Whether there is a copy here that gathers gradients."""
        return any(copy.requires_grad for copy in self.here.values())

    @property
    def rests(self) -> bool:
        """Whether there is a copy here that does not."""
        return not all(copy.requires_grad for copy in self.here.values())

    def take_gradients(self) -> dict[int, Tensor | None]:
        """Takes away what the copies here have gathered in earlier steps."""
        before = {i: copy.grad for i, copy in self.here.items()}
        for copy in self.here.values():
            copy.grad = None
        return before

    def add_up(self, before: Mapping[int, Tensor | None], step: Step) -> None:
        """Gives each copy here the sum of both gradients of this step, and what it had before."""
        # One message a step of each copy, whatever microbatches its gradient was gathered from.
        step = replace(step, num_microbatches=1, valid=())
        copy = next(iter(self.here.values()))
        meta = TensorMeta((1, copy.numel()), copy.dtype)
        for i, (link, channel) in enumerate(zip(self.links, self._channels, strict=True)):
            channel.release()  # ranks have met since the last step
            if i not in self.here:
                size = link.message_bytes(meta, step, 0, copy.device)
                channel.post(0, size, link.room(meta))
        messages: dict[int, Tensor] = {}
        for i, copy in self.here.items():
            if copy.grad is None:
                self.links[i].hand_over_nothing(meta, self._channels[i], step, 0)
                continue
            row = copy.grad.detach().reshape(1, -1)
            with step.during("encode", self.links[i].sender_stage, 0, self.links[i].name):
                messages[i] = self.links[i].encode(row, step, 0)
            self.links[i].hand_over(row, messages[i], self._channels[i], step, 0)
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
        message = link.take_any(self._channels[i], step, 0)
        if message is None:
            return None
        with step.during("decode", link.receiver_stage, 0, link.name):
            return link.decode(message, meta, step, 0)

    def finish_step(self, finite: bool) -> None:
        """Commits what both links noted if the step was finite, else discards it."""
        for link in self.links:
            if finite:
                link.commit()
            else:
                link.discard()
        self.failed = False


def trained_and_frozen(ties: Sequence[TiedWeights]) -> tuple[int, int]:
    """Two numbers: bit i says that tie i has a copy here that is trained, or one that is not."""
    trained = sum(tie.trains << i for i, tie in enumerate(ties))
    return trained, sum(tie.rests << i for i, tie in enumerate(ties))


def check_alike(ties: Sequence[TiedWeights], trained: int, frozen: int) -> None:
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
def separate_gradients(ties: Sequence[TiedWeights], step: Step) -> Iterator[None]:
    """Within it the copies of each tie gather their gradients apart; at its end they are added up.

    If it ends with an error, the copies have what they had before.
    """
    check_alike(ties, *trained_and_frozen(ties))
    training = [tie for tie in ties if tie.trains]
    before = [tie.take_gradients() for tie in training]
    try:
        yield
        for tie, held in zip(training, before, strict=True):
            tie.add_up(held, step)
    except BaseException:
        for tie, held in zip(training, before, strict=True):
            for i, grad in held.items():
                tie.here[i].grad = grad
        raise


def ties_of(
    cut: Sequence[staging.Stage],
    method: SpecValue,
    *,
    seed: int,
    replica: int,
    warmup_steps: int,
    checked: bool = False,
) -> list[TiedWeights]:
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
    if method.by_sample:
        raise ValueError(f"tie_comp={method}: a weight's gradient belongs to no sample; use ef+...")
    ties: list[TiedWeights] = []
    for copies in staging.ties(cut):
        if len(copies) != 2:
            raise ValueError(
                f"{' and '.join(name for _, name in copies)} are one parameter in {len(copies)} "
                "stages; two can share one: cut the model elsewhere"
            )
        number = len(cut) - 1 + len(ties)
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
