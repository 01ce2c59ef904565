"""The step of replicas as `mpcomp.plan` predicts it, to be held against the measured one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from mpcomp.core.context import TensorMeta
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.plan.network import PACKET_SHARE
from mpcomp.plan.replica_cost import replica_cost
from recipes.bench.replica_variants import MPCOMP, REFERENCE
from recipes.bench.workers import num_cores

__all__ = ["predicted_steps"]


def predicted_steps(
    names: Sequence[str],
    model: nn.Module,
    *,
    compute_s: float,
    num_replicas: int,
    mbps: float,
    latency_ms: float,
) -> Mapping[str, float]:
    """Seconds of a step with each method of mpcomp's, and with none; other methods have none.

    Args:
        names: of methods.
        model: of a replica.
        compute_s: of a step without communication, as all replicas take it side by side.
        num_replicas: on this machine.
        mbps: of every replica's link, each way.
        latency_ms: of a message.
    """
    parameters = {name: TensorMeta.of(parameter) for name, parameter in model.named_parameters()}
    network = ReplicaNetwork(bandwidth_mbps=PACKET_SHARE * mbps, latency_ms=latency_ms)
    # Coding is measured alone; here replicas share the cores for it.
    crowd = max(1.0, num_replicas / num_cores())
    found = {}
    for name in names:
        if name == REFERENCE:
            cost = replica_cost("none", parameters, num_replicas, network)
            found[name] = compute_s + cost.link_s  # torch's own sum codes nothing
        elif name.startswith(MPCOMP):
            cost = replica_cost(name.removeprefix(MPCOMP), parameters, num_replicas, network)
            found[name] = compute_s + crowd * cost.coding_s + cost.link_s
    return found
