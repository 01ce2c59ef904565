"""Connecting a rank's stages with those of other replicas, in the way that was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.utils import _sync_module_states

import stages as staging
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.exchange import GROUP_BYTES, Exchange
from mpcomp.data_parallel.local_exchange import LocalExchange
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.replica_sync import (
    CompressedAverage,
    GradientAverage,
    ReplicaSync,
    trained_in,
)
from mpcomp.data_parallel.sharded_average import ShardedAverage, Sharding

__all__ = ["connect_replicas"]


def connect_replicas(
    own: Sequence[staging.Stage],
    method: ReplicaMethod | None,
    mesh: ProcessMesh,
    *,
    network: ReplicaNetwork | None,
    seed: int,
    cut: Sequence[staging.Stage],
    tied_alias: Mapping[str, str],
    sharding: Sharding | None,
) -> ReplicaSync:
    """Gives all replicas the weights of the first, and connects their gradients.

    Args:
        own: the stages of this rank.
        method: compresses; None for the plain mean.
        mesh: the connected ranks; all of them call this.
        network: how replicas are connected.
        seed: of the run.
        cut: all stages of the pipeline.
        tied_alias: of each copy of a tied weight the name of the first one.
        sharding: how replicas share parameters, if they do.

    Raises:
        PeerError: another rank failed.
    """
    with mesh.abort_all_on_error("connecting replicas"):
        if method is None and sharding is None:
            return GradientAverage(own, mesh)
        apart = method is not None and method.sync_schedule is not None
        purpose = f"{'parameters' if apart else 'gradients'} of other replicas"

        def over_all_ranks(numbers: Sequence[float]) -> list[float]:
            return mesh.all_reduce_sum(numbers, purpose)

        def norm_of_replica(square: float) -> float:
            squares = [0.0] * mesh.num_replicas
            squares[mesh.replica] = square
            return math.sqrt(over_all_ranks(squares)[mesh.replica])

        group = mesh.replica_group
        with mesh.waiting("weights of the first replica"):
            for stage in own:  # as DDP does
                _sync_module_states(
                    stage,
                    group,
                    broadcast_bucket_size=GROUP_BYTES,
                    src=0,
                    params_and_buffers_to_ignore=(),
                )
        # What is refused from here on is so on all ranks, and none of them waits for another yet.
        mesh.all_reduce_sum([0.0], "weights of the first replica")
        connections: dict[str, Any] = {
            "all_reduce_sum": over_all_ranks,
            "waiting": lambda: mesh.waiting(purpose),
            "timeout": timedelta(seconds=mesh.wait_s),
        }
        if sharding is not None:
            return ShardedAverage(
                own,
                mesh,
                method or replica_method_of(None),
                network=network,
                seed=seed,
                param_comp=sharding.param_comp,
                **connections,
            )
        assert method is not None
        if apart:
            connections["together"] = mesh.abort_all_on_error
        exchange = (LocalExchange if apart else Exchange)(
            trained_in(own),
            method,
            group,
            network=network,
            seed=seed,
            global_norm=norm_of_replica,
            whole=trained_in(cut),
            tied_alias=tied_alias,
            **connections,
        )
        return CompressedAverage(own, mesh, exchange, tied_alias)
