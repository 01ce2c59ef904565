"""PowerSGD: matrices travel as two thin factors, each of which is summed over the replicas."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.lowrank import orthonormal_, times, transposed_times
from mpcomp.core.context import TensorMeta
from mpcomp.core.randomness import normal
from mpcomp.data_parallel.base import (
    Controller,
    Factored,
    ReplicaMethod,
    RunInfo,
    Static,
    matrix_of,
)
from mpcomp.data_parallel.network import Works
from mpcomp.data_parallel.paths import PATH_OF, Path
from mpcomp.data_parallel.plan import Context, GradientPlan
from mpcomp.feedback.memory import NO_MEMORY, Memory, Residual
from mpcomp.feedback.store import StoragePlan

__all__ = ["PowerSGD"]


@dataclass(frozen=True)
class PowerSGD(ReplicaMethod, Factored):
    """Rank-r approximation by one step of a warm-started power iteration. Spec ``powersgd:2``.

    For the error-corrected gradient M_i [n, m] of replica i and Q [m, r] from the step before,
    at first i.i.d. standard normal and the same on all replicas:
    P = orthonormal(mean M_i Q), Q <- mean M_i^T P, result P Q^T. Both means are sums over the
    network, so traffic does not grow with the number of replicas. What replica i keeps for the next
    step is M_i - P (M_i^T P)^T; its mean over the replicas is that of M_i less the result.

    * Source: Vogels et al., NeurIPS 2019, algorithms 1 and 2.
    * State: Q of each matrix, the same on all replicas, and a residual of each on each replica
      (none with ``feedback=False``).
    * Theory: P P^T M is a projection, so no error is larger than its matrix, as error feedback's
      theorem for SGD asks; that a warm start makes it smaller in each step is a heuristic, and so
      is momentum after the exchange, as the paper trains.

    Args:
        rank: of the approximation, at least 1; a smaller matrix is approximated by its own rank.
        min_saving: send as it is what factors would not make so many times smaller.
        feedback: keep what was not sent (error feedback); without it training mostly fails.
        storage: "fp32", "fp16", "bf16" or bits (1-8) of what is kept.

    Raises:
        ValueError: a setting outside those; a rank above that of every matrix of the model.
    """

    rank: int
    min_saving: float = 2.0
    feedback: bool = True
    storage: str | int = "fp32"
    spec: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank={self.rank}: expected a whole number, 1 or more")
        if not self.min_saving >= 1:
            raise ValueError(f"min_saving={self.min_saving}: expected a factor, 1 or more")
        self._plan  # noqa: B018  (raises for a bad storage)

    @property
    def _plan(self) -> StoragePlan:
        return StoragePlan(self.storage)

    def worthwhile(self, meta: TensorMeta) -> bool:
        rows, columns = meta.shape
        rank = min(self.rank, rows, columns)
        return (rows + columns) * rank * self.min_saving <= rows * columns

    def check(self, run: RunInfo) -> None:
        ranks = [min(meta.shape) for meta in run.metas.values()]
        if ranks and self.rank > max(ranks):
            raise ValueError(
                f"rank={self.rank} is above that of every matrix here (the largest is "
                f"{max(ranks)}): choose a smaller one, such as 2"
            )

    def controller(self, run: RunInfo) -> Controller:
        return Static(self)

    def memory(self, *, compressed: bool) -> Memory:
        return Residual(self._plan) if compressed and self.feedback else NO_MEMORY


def factored_sum(plans: Sequence[GradientPlan], context: Context) -> Path:
    """The path of matrices that are sent as factors."""
    matrices, lefts, rights = [], [], []
    for plan in plans:
        codec = context.controller.codec(plan.name)
        assert isinstance(codec, Factored)
        meta = matrix_of(plan.meta)
        rank = min(codec.rank, *meta.shape)
        matrix = plan.target.reshape(meta.shape)
        matrices.append(matrix)
        rights.append(_start(plan, meta.shape[1], rank, context))
        lefts.append(times(matrix, rights[-1]).contiguous())
    lefts = yield from _mean(lefts, context)
    lefts = [orthonormal_(left.clone()) for left in lefts]
    rights = [transposed_times(m, left) for m, left in zip(matrices, lefts, strict=True)]
    for plan, left, right in zip(plans, lefts, rights, strict=True):
        if plan.end.keeps:
            # The replica's own right factor, not the mean: both leave the same sum over replicas.
            own = (left @ right.T).reshape(-1)
            plan.sent(partial(torch.sub, other=own))
    rights = yield from _mean(rights, context)
    for plan, left, right in zip(plans, lefts, rights, strict=True):
        context.new_factors[plan.name] = right
        plan.finish((left @ right.T).reshape(-1))


PATH_OF["factors"] = factored_sum


def _start(plan: GradientPlan, columns: int, rank: int, context: Context) -> Tensor:
    """The right factor of the step before; a random one, the same on all replicas, at first."""
    held = context.state.factors.get(plan.name)
    # A gradient of zeros leaves nothing to go on from.
    if held is not None and held.shape == (columns, rank) and bool(held.any()):
        return held
    numbers = normal(context.draw(plan.name, 0)(True), columns * rank, plan.target.device)
    return numbers.reshape(columns, rank)


def _mean(factors: list[Tensor], context: Context) -> Generator[Works, None, list[Tensor]]:
    """The means of all factors over the replicas, in one collective."""
    flat = torch.cat([factor.reshape(-1) for factor in factors]).div_(context.peers.size)
    context.traffic.count_part(flat.nbytes, flat.numel())
    yield [context.peers.all_reduce(flat)]
    parts = torch.split(flat, [factor.numel() for factor in factors])
    return [part.reshape(f.shape) for part, f in zip(parts, factors, strict=True)]
