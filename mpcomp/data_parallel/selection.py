"""The path of each gradient, and whether a method suits a model at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpcomp.compressors import Compressor
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.base import Controller, Factored, ReplicaMethod, Setting
from mpcomp.data_parallel.methods.powersgd import factored_sum
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.paths import dense_sum, gather, payload_sum, two_phase
from mpcomp.data_parallel.plan import Item, matrix_of

__all__ = ["PATH_OF", "check_run", "matrices", "routes"]

#: The paths by name, in the order in which they start.
PATH_OF = {
    "dense": dense_sum,
    "sum": payload_sum,
    "gather": gather,
    "two-phase": two_phase,
    "factors": factored_sum,
}


def matrices(
    parameters: Mapping[str, Tensor],
    network: ReplicaNetwork,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, TensorMeta]:
    """The parameters that may go compressed, as matrices.

    Args:
        parameters: by name.
        network: says from how many elements on.
        sizes: elements of the whole parameter, where ``parameters`` are pieces; by default theirs.
    """
    metas = {name: TensorMeta.of(p) for name, p in parameters.items()}
    sizes = sizes or {name: meta.numel for name, meta in metas.items()}
    return {
        name: matrix_of(meta)
        for name, meta in metas.items()
        if len(meta.shape) > 1 and sizes[name] >= network.smallest
    }


def check_run(
    parameters: Mapping[str, Tensor],
    method: ReplicaMethod,
    network: ReplicaNetwork,
    num_replicas: int,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Checks what ranks can tell alike before anything is connected.

    Args:
        parameters: those of the whole model that require gradients, by name.
        method: between replicas.
        network: how they are connected.
        num_replicas: how many.
        sizes: as for `matrices`.

    Raises:
        ValueError: the method does not suit the model or the path, or the network these replicas.
        TypeError: parameters of fp64.
    """
    wide = [name for name, p in parameters.items() if p.dtype == torch.float64]
    if wide:
        raise TypeError(f"{wide[0]} is fp64: gradients between replicas are at most fp32")
    network.check_replicas(num_replicas)
    setting = Setting(num_replicas, matrices(parameters, network, sizes))
    method.check(setting)
    controller = method.controller(setting)
    if controller.waits and network.per_machine > 1:
        raise ValueError(
            f"{method} with per_machine={network.per_machine}: exact=True looks at gradients "
            "before machines have averaged theirs; leave exact out"
        )
    controller.begin(0, None)
    for name in setting.metas:
        codec = controller.codec(name)
        if not isinstance(codec, Compressor):
            continue
        if codec.variable_length:
            raise ValueError(
                f"dp_comp={method}: a message of {codec} is as long as its tensor makes it, and "
                "replicas exchange messages of equal lengths; use it at a cut"
            )
        if network.path == "sum":
            network.check_path(codec.summable)


def routes(
    items: Sequence[Item], controller: Controller, network: ReplicaNetwork, num_replicas: int
) -> dict[str, list[Item]]:
    """The gradients by the name of their path, in the order of `PATH_OF`."""
    found: dict[str, list[Item]] = {}
    to_weigh: list[Item] = []
    for item in items:
        route = _route(item, controller)
        if route is None:
            to_weigh.append(item)
        else:
            found.setdefault(route, []).append(item)
    if to_weigh:
        weighed = _weighed(to_weigh, controller, network, num_replicas)
        found.setdefault(weighed, []).extend(to_weigh)
    return {name: found[name] for name in PATH_OF if name in found}


def _route(item: Item, controller: Controller) -> str | None:
    """The path of one gradient; None where that depends on how much goes with it."""
    codec = controller.codec(item.name) if item.compressible else None
    if codec is None:
        return "dense"
    if isinstance(codec, Factored):
        return "factors" if codec.worthwhile(matrix_of(item.meta)) else "dense"
    if codec.sends_dense or codec.wire_bytes(item.shaped(codec)) >= item.meta.dense_bytes:
        return "dense"
    return "sum" if codec.summable else None


def _weighed(
    items: Sequence[Item], controller: Controller, network: ReplicaNetwork, num_replicas: int
) -> str:
    wire = dense = 0
    for item in items:
        codec = controller.codec(item.name)
        assert isinstance(codec, Compressor)
        wire += codec.wire_bytes(item.shaped(codec))
        dense += item.meta.dense_bytes
    return network.choose(
        summable=False, wire_bytes=wire, dense_bytes=dense, num_replicas=num_replicas
    )
