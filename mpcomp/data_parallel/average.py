"""A pipeline's replicas: all stages of a rank exchange their gradients once, after backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from mpcomp.comm.mesh import ProcessMesh
from mpcomp.core.sent import Sent
from mpcomp.core.step import Step
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.groups import in_groups
from mpcomp.data_parallel.replica_sync import (
    ReplicaSync,
    check_unchanged,
    parameter_ids,
    trained_in,
)

__all__ = ["CompressedAverage"]


class CompressedAverage(ReplicaSync):
    """Replaces the gradients of a rank's stages by what a method makes of all replicas' ones.

    It runs when all microbatches are done, and so under every schedule alike; there is no reducer
    of DDP that would have to notice a backward that was split.

    Args:
        stages: of this rank.
        mesh: the connected ranks.
        exchange: of their parameters.
        tied: names of parameters that another rank may have a copy of.
    """

    counts_on = True

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: ProcessMesh,
        exchange: Exchange,
        tied: Collection[str] = (),
    ) -> None:
        super().__init__(stages, mesh)
        self._known = [parameter_ids(stage) for stage in stages]
        self._tied = frozenset(tied)
        self.exchange: Exchange | None = exchange

    @property
    def sent(self) -> Sent:
        return Sent() if self.exchange is None else self.exchange.totals.sent

    def reduce(self, step: Step) -> None:
        self._mesh.where = f"step {step.index}, exchanging gradients with other replicas"
        if not self.enabled:
            return
        for stage, known in zip(self._stages, self._known, strict=True):
            check_unchanged(stage, known)
        exchange = self.exchange
        assert exchange is not None
        exchange.begin(loss_scale=step.loss_scale, lr=step.lr, compress=step.compress_dp)
        trained = trained_in(self._stages)
        with self._completed(trained, exchange.averaged_over) as unused:
            gradients = ((name, p.grad) for name, p in trained.items() if p.grad is not None)
            for group in in_groups(gradients, alone=self._tied):
                exchange.add(group)
            exchange.finish()
        exchange.leave_alone(unused)
