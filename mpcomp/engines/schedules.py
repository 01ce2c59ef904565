"""Schedules by name: which stages a rank has, and what must hold for the number of microbatches.

All of torch's come from `torch.distributed.pipelining`. The engine's own, ``None``, is 1F1B with a
depth that can be chosen. A slow link is like one more stage: it takes as long as a stage or longer
to get a microbatch across. With the 1F1B warm-up, one microbatch for each stage that follows, both
neighbours of such a link spend that time waiting::

    in_flight=2   F0 F1 ......... B0 F2 ......... B1 F3        (dots: waiting for the link)
    in_flight=4   F0 F1 F2 F3 ... B0 F4 B1 F5 B2               more in flight, less to wait for

The order of backwards does not depend on the depth, so neither does the result, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from mpcomp.core.spec import closest
from mpcomp.engines.updates import Updates, behind_of, in_flight_of

__all__ = [
    "DEFAULT_SCHEDULE",
    "InFlight1F1B",
    "Ring1F1B",
    "Schedule",
    "ring_order",
    "schedule_named",
    "warmup_of",
]


@dataclass(frozen=True)
class Schedule:
    """A schedule, as far as the engine knows it.

    Attributes:
        name: torch's, or `DEFAULT_SCHEDULE`'s.
        stages_per_rank: exactly so many; None for any number.
        default_stages_per_rank: where the number of stages is not given.
        v_shaped: stages go down the ranks and up again, so that the last is on the first rank.
        splits_backward: gradients of inputs and of weights are computed apart.
    """

    name: str
    stages_per_rank: int | None = None
    default_stages_per_rank: int = 1
    v_shaped: bool = False
    splits_backward: bool = False

    def place_of(self, stage: int, num_ranks: int) -> int:
        """The place in the pipeline, 0 to ``num_ranks`` - 1, that has a stage."""
        lap, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self.v_shaped and lap % 2 else place

    def check_stages(self, num_stages: int, num_ranks: int) -> None:
        """Raises ValueError unless so many stages can be placed on so many ranks.

        A last stage that is together with the first is not counted.
        """
        per_rank, rest = divmod(num_stages, num_ranks)
        wanted = self.stages_per_rank
        if rest or per_rank == 0 or (wanted is not None and per_rank != wanted):
            takes = "the same number of stages on each rank, at least one"
            fix = f"split={num_ranks} or a multiple of it"
            if wanted is not None:
                takes = f"{wanted} stage{'s' if wanted > 1 else ''} on each rank"
                fix = f"split={wanted * num_ranks}"
            raise ValueError(
                f"{num_stages} stages on {num_ranks} ranks: {self.name} takes {takes}; "
                f"pass {fix}, or start another number of processes"
            )

    def make(self, stages: Sequence[Any], chunks: int, loss_fn: Any) -> Any:
        """torch's schedule object for the stages of this rank.

        Raises:
            ValueError: the schedule cannot run with so many microbatches.
        """
        if self is DEFAULT_SCHEDULE:
            own = InFlight1F1B if len(stages) == 1 else Ring1F1B
            schedule = own(stages[0], chunks, loss_fn=loss_fn, scale_grads=False)
            schedule.last = stages[-1]
            return schedule
        of_name = get_schedule_class(self.name)
        single = issubclass(of_name, PipelineScheduleSingle)
        try:
            return of_name(
                stages[0] if single else list(stages), chunks, loss_fn=loss_fn, scale_grads=False
            )
        except ValueError as error:
            raise ValueError(f"schedule={self.name!r} with chunks={chunks}: {error}") from error


DEFAULT_SCHEDULE = Schedule("in-flight 1F1B", stages_per_rank=1)

_TORCH = (
    Schedule("GPipe", stages_per_rank=1),
    Schedule("1F1B", stages_per_rank=1),
    Schedule("Interleaved1F1B", default_stages_per_rank=2),
    Schedule("LoopedBFS", default_stages_per_rank=2),
    Schedule("InterleavedZeroBubble", default_stages_per_rank=2, splits_backward=True),
    Schedule(
        "ZBVZeroBubble",
        stages_per_rank=2,
        default_stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
    ),
    Schedule(
        "DualPipeV",
        stages_per_rank=2,
        default_stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
    ),
)


def schedule_named(name: str | None) -> Schedule:
    """The schedule of that name, in any case; None for the engine's own.

    Raises:
        ValueError: there is none.
    """
    if name is None:
        return DEFAULT_SCHEDULE
    for schedule in _TORCH:
        if schedule.name.lower() == name.lower():
            return schedule
    names = [schedule.name for schedule in _TORCH]
    raise ValueError(
        f"schedule={name!r}{closest(name, names)}: expected {', '.join(names)}, or None for the "
        "engine's own"
    )


def warmup_of(stage: int, num_stages: int, in_flight: int) -> int:
    """Forwards of a stage before its first backward: ``in_flight`` on the first, 1 on the last."""
    if num_stages < 2:
        return 1
    following = num_stages - 1 - stage
    return 1 - (-(in_flight - 1) * following // (num_stages - 1))


class InFlight1F1B(PipelineScheduleSingle):  # type: ignore[misc, unused-ignore]
    """1F1B whose first stage has ``in_flight`` microbatches on their way.

    Attributes:
        in_flight: microbatches, where weights do not change in between.
        updates: of the step under way; None where they do not.
        last: the last stage of this rank.
    """

    in_flight: int = 1
    updates: Updates | None = None
    last: Any = None

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        args, _ = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._run_in_order(args, target_mbs, losses)

    def _run_in_order(self, args: Any, targets: Any, losses: list[Any] | None) -> None:
        """Runs all microbatches, whose arguments and targets these are."""
        stage, torchs = cast(Any, self._stage), cast(Any, self)
        count = self._n_microbatches
        updates, depth = self.updates, self.in_flight
        if updates is not None:
            depth = in_flight_of(updates.microbatches, stage.num_stages)
        warmup = min(count, warmup_of(stage.stage_index, stage.num_stages, depth))

        def forward(i: int) -> None:
            output = stage.forward_one_chunk(i, args[i])
            torchs._maybe_compute_loss(stage, output, targets, i)

        for i in range(warmup):
            forward(i)
        for i in range(count):
            stage.backward_one_chunk(i, loss=torchs._maybe_get_loss(stage, i))
            if updates is not None and updates.follows(i):
                stage.update(updates, i)
            if warmup + i < count:
                forward(warmup + i)
        torchs._update_losses(stage, losses)
        stage.perform_reduce_grad(1)


def ring_order(
    count: int, in_flight: int, num_ranks: int, behind: int | None = None
) -> Iterator[tuple[str, int]]:
    """Work of the rank with the first stage and the last: ("F", "L", "B" or "U", microbatch) each.

    F and B are forward and backward of the first stage, L is both of the last. All others wait for
    it, so that L comes as soon as its activation may be there: a round behind F where links are
    fast, and half of what is in flight behind it where these are slow. B makes room for the next
    F; when there is none, B comes a round behind L, as nobody waits for it. U is where weights may
    change: when L is done, with the B of that round, and for the last one when all are.

    Args:
        count: microbatches.
        in_flight: of them, between F and B.
        num_ranks: of the pipeline.
        behind: of them, between L and B, from the first to the last; None for what is said here,
            and no U. On it depends by which weights gradients are made.
    """
    ahead = max(num_ranks, -(-in_flight // 2)) if behind is None else in_flight - behind
    ahead = min(in_flight, ahead, count)
    yield from (("F", i) for i in range(ahead))
    # As many of its gradients are on their way back as activations may not be on their way up.
    steady = in_flight - ahead if behind is None else behind
    drained = max(steady, num_ranks) if behind is None else behind
    forward, back = ahead, 0
    for last in range(count):
        yield "L", last
        if last - back == (steady if forward < count else drained):
            yield "B", back
            back += 1
        if behind is not None and last < count - 1:
            yield "U", last
        if forward < count:
            yield "F", forward
            forward += 1
    yield from (("B", i) for i in range(back, count))
    if behind is not None:
        yield "U", count - 1


class Ring1F1B(InFlight1F1B):
    """In-flight 1F1B on the rank that has the first stage and the last one; see `ring_order`."""

    def _run_in_order(self, args: Any, targets: Any, losses: list[Any] | None) -> None:
        first, last, torchs = cast(Any, self._stage), self.last, cast(Any, self)
        num_stages, updates = first.num_stages, self.updates
        depth, behind = self.in_flight, None
        if updates is not None:
            depth = in_flight_of(updates.microbatches, num_stages)
            behind = behind_of(updates.microbatches, num_stages)
        for what, i in ring_order(self._n_microbatches, depth, num_stages - 1, behind):
            if what == "F":
                first.forward_one_chunk(i, args[i])
            elif what == "L":
                output = last.forward_one_chunk(i, args[i])
                torchs._maybe_compute_loss(last, output, targets, i)
                last.backward_one_chunk(i, loss=torchs._maybe_get_loss(last, i))
            elif what == "B":
                with nullcontext() if updates is None else first.stashed.gathering(i):
                    first.backward_one_chunk(i)
            elif updates is not None and updates.follows(i):
                first.update(updates, i)
        torchs._update_losses([first, last], losses)
