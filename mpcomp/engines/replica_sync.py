"""What this rank's stages exchange with those of other replicas, once a method compresses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.utils import _sync_module_states

import stages as staging
from mpcomp.comm.mesh import World
from mpcomp.data_parallel.average import GROUP_BYTES, CompressedAverage
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.replicas import trained_in
from mpcomp.data_parallel.sharded_average import ShardedAverage, Sharding
from mpcomp.links.tied_weights import Tie

__all__ = ["connect_replicas"]


def connect_replicas(
    own: Sequence[staging.Stage],
    method: ReplicaMethod,
    world: World,
    together: Callable[[], AbstractContextManager[None]],
    *,
    device: torch.device,
    network: ReplicaNetwork | None,
    seed: int,
    cut: Sequence[staging.Stage],
    ties: Sequence[Tie],
    sharding: Sharding | None,
) -> CompressedAverage | ShardedAverage:
    """Gives all replicas the weights of the first, and connects their gradients.

    Args:
        own: the stages of this rank.
        method: compresses.
        world: the connected ranks; all of them call this.
        together: a context that no rank leaves with an error alone.
        device: of the gradients.
        network: how replicas are connected.
        seed: of the run.
        cut: all stages of the pipeline.
        ties: parameters that two of these share.
        sharding: how replicas share parameters, if they do.
    """

    def everywhere(numbers: Sequence[float]) -> list[float]:
        return world.sum(numbers, "gradients of other replicas")

    def norm_of_replica(square: float) -> float:
        squares = [0.0] * world.num_replicas
        squares[world.replica] = square
        return math.sqrt(everywhere(squares)[world.replica])

    group = world.replica_group
    with together(), world.waiting("weights of the first replica"):
        for stage in own:  # as DDP does
            _sync_module_states(
                stage,
                group,
                broadcast_bucket_size=GROUP_BYTES,
                src=0,
                params_and_buffers_to_ignore=(),
            )
    connections: dict[str, Any] = {
        "everywhere": everywhere,
        "waiting": lambda: world.waiting("gradients of other replicas"),
        "timeout": timedelta(seconds=world.wait_s),
    }
    if sharding is not None:
        with together():
            return ShardedAverage(
                own,
                group,
                device,
                method,
                network=network,
                seed=seed,
                param_comp=sharding.param_comp,
                **connections,
            )
    copy_of = {name: tie.name for tie in ties for _, name in tie.copies}
    exchange = Exchange(
        trained_in(own),
        method,
        group,
        network=network,
        seed=seed,
        own_norm=norm_of_replica,
        whole=trained_in(cut),
        copy_of=copy_of,
        **connections,
    )
    return CompressedAverage(own, exchange, copy_of)
