"""What each rank announces before a step: ranks that mean different things must not begin it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpcomp.comm.handshake import fingerprint
from mpcomp.core.step import Step

__all__ = ["Announced", "check_announced", "named"]


class Announced(NamedTuple):
    """What a rank is about to do, in whole numbers.

    Attributes:
        data: hash of what all ranks of a replica were handed.
        settings: hash of what all ranks were told.
        rows: of the batch, or terms of the loss.
        trained: the first stage there with something to train, or the number of stages.
        tied_trained: of `mpcomp.links.tied_weights.trained_and_frozen`.
        tied_frozen: likewise.
    """

    data: int
    settings: int
    rows: int
    trained: int
    tied_trained: int
    tied_frozen: int

    @classmethod
    def of(
        cls,
        step: Step,
        everywhere: tuple[Any, ...],
        same: tuple[Any, ...],
        *,
        rows: int,
        trained: int,
        tied: tuple[int, int],
    ) -> Announced:
        """That of this rank.

        Args:
            step: the step to come.
            everywhere: what all ranks have to agree in besides.
            same: what the ranks of a replica have to agree in.
            rows: as the attribute, as are ``trained`` and ``tied``.
        """
        on = (step.compress_act, step.compress_grad, step.compress_dp)
        settings = (step.index, step.train, *on, step.loss_scale)
        return cls(
            fingerprint(*same), fingerprint(settings, step.lr, *everywhere), rows, trained, *tied
        )


def named(step: Step) -> str:
    """For messages."""
    return f"step {step.index} ({'training' if step.train else 'evaluation'})"


def check_announced(said: Sequence[Announced], step: Step, ranks_per_pipeline: int) -> None:
    """Compares what all ranks have said.

    Raises:
        ValueError: ranks were handed other data, or take another step; on every rank.
    """
    for rank, one in enumerate(said):
        if one.settings != said[0].settings:
            raise ValueError(
                f"rank {rank} and rank 0 do not take the same step: they differ in its number, "
                "training or evaluation, compression on or off, loss scale, learning rate, "
                f"autocast or arguments of generate (this rank is at {named(step)}). Run the same "
                "calls on every rank, in the same order"
            )
        first = rank - rank % ranks_per_pipeline
        if one.data != said[first].data:
            raise ValueError(
                f"rank {rank} and rank {first} were given different data in {named(step)}: the "
                "batch, target or sample ids differ. Seed the loader's shuffle and augmentation "
                "alike on all ranks of a replica"
            )
