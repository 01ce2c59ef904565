"""A pipeline's replicas: all stages of a rank exchange their gradients once, after backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from mpcomp.comm.mesh import ProcessMesh
from mpcomp.core.step import Step
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.replica_sync import ReplicaSync, check_unchanged, parameter_ids

__all__ = ["GROUP_BYTES", "CompressedAverage"]

#: Gradients are exchanged in groups of about so many bytes, one on its way while the next is
#: encoded.
GROUP_BYTES = 25_000_000


class CompressedAverage(ReplicaSync):
    """Replaces the gradients of a rank's stages by what a method makes of all replicas' ones.

    It runs when all microbatches are done, and so under every schedule alike; there is no reducer
    of DDP that would have to notice a backward that was split.

    Args:
        stages: of this rank.
        mesh: the connected ranks.
        exchange: of their parameters.
        tied: names of parameters that another rank may have a copy of. Each goes by itself, so that
            no figure of it depends on what else a rank has.
    """

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

    def reduce(self, step: Step) -> None:
        self._mesh.where = f"step {step.index}, exchanging gradients with other replicas"
        if not self.enabled:
            return
        for stage, known in zip(self._stages, self._known, strict=True):
            check_unchanged(stage, known)
        exchange = self.exchange
        assert exchange is not None
        exchange.begin(loss_scale=step.loss_scale, lr=step.lr, compress=step.compress_dp)
        group: dict[str, Any] = {}
        num_bytes = 0
        for name, parameter in self._trained():
            if parameter.grad is None:  # it may have one on other replicas
                parameter.grad = torch.zeros_like(parameter)
            if name in self._tied:
                exchange.add({name: parameter.grad})
                continue
            group[name] = parameter.grad
            num_bytes += parameter.grad.nbytes
            if num_bytes >= GROUP_BYTES:
                exchange.add(group)
                group, num_bytes = {}, 0
        exchange.add(group)
        exchange.finish()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for stage in self._stages
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        ]
