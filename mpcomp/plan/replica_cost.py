"""The time that replicas take to average a stage's gradients, by any method.

An exchange with nobody, in a group of one rank, codes as every other does and counts what it would
send: so bytes and coding times are those of the method itself, whatever it does, and the network's
own formulas (`mpcomp.data_parallel.network`) say how long that takes among so many replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mpcomp.core.context import TensorMeta
from mpcomp.core.sent import below_bf16
from mpcomp.core.traffic import ReplicaTraffic
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.network import ReplicaNetwork

__all__ = ["ReplicaCost", "replica_cost"]

#: Steps of an exchange; the first makes buffers.
_STEPS = 3
#: Elements from which on a parameter stands for itself with fewer rows.
_LARGEST = 1 << 22


@dataclass(frozen=True)
class ReplicaCost:
    """The cost of an optimizer's step between replicas, on average.

    Attributes:
        method: its spec.
        wire_bytes: of a replica's messages.
        dense_bytes: of its gradients.
        num_elements: of its gradients.
        coding_s: encoding, and decoding of all messages.
        link_s: on the network.
    """

    method: str
    wire_bytes: float
    dense_bytes: float
    num_elements: int
    coding_s: float
    link_s: float

    @property
    def below_bf16(self) -> float | None:
        """Times fewer bytes than bf16 has."""
        return below_bf16(self.wire_bytes, self.num_elements)

    @property
    def seconds(self) -> float:
        """The whole exchange."""
        return self.coding_s + self.link_s


def replica_cost(
    method: Any,
    parameters: Mapping[str, TensorMeta],
    num_replicas: int,
    network: ReplicaNetwork,
) -> ReplicaCost:
    """Measures a method on gradients like a stage's.

    Args:
        method: as of ``dp_comp``. Of one that adapts, what it does in its first steps.
        parameters: of the stage.
        num_replicas: that average them.
        network: between them.

    Raises:
        ValueError: no such method, or one that does not suit these parameters.
        TypeError: no method.
    """
    chosen = replica_method_of(method)
    period = 1
    if chosen.sync_schedule is not None:
        # Changes of parameters, sent once a period, code like gradients.
        period, chosen = chosen.sync_schedule.period, chosen.deltas
    own_bytes: dict[str, float] = {}
    dense, num_elements, coding = 0, 0, 0.0
    with _alone() as group:
        for meta, count in Counter(parameters.values()).items():
            sent = _sent(chosen, meta, network, group)
            own_bytes[sent.path] = own_bytes.get(sent.path, 0.0) + count * sent.wire_bytes
            dense += count * meta.dense_bytes
            num_elements += count * meta.numel
            # Each replica decodes what all have gathered.
            messages = num_replicas if sent.path == "gather" else 1
            coding += count * (sent.encode_s + messages * sent.decode_s)
    # All paths begin together: they share the link, and wait for the others at the same time.
    latencies, transfers = zip(
        *(_link_s(path, num_bytes, num_replicas, network) for path, num_bytes in own_bytes.items()),
        strict=True,
    )
    link = max(latencies) + sum(transfers)
    wire = sum(own_bytes.values())
    return ReplicaCost(
        str(method), wire / period, dense, num_elements, coding / period, link / period
    )


def _link_s(
    path: str, num_bytes: float, num_replicas: int, network: ReplicaNetwork
) -> tuple[float, float]:
    """Seconds of latency, and of bytes on the network, for the messages of a path."""
    rounds = 1
    if path == "gather" and network.path in ("auto", "two-phase"):
        both = ("gather", "two-phase") if network.path == "auto" else ("two-phase",)
        path = min(both, key=lambda one: network.seconds(one, num_bytes, num_replicas))
    elif path == "factors":  # the second factors wait for the first
        path, rounds = "sum", 2
    latency = network.seconds(path, 0.0, num_replicas)
    return rounds * latency, network.seconds(path, num_bytes, num_replicas) - latency


class _Sent(NamedTuple):
    """A parameter's share of a step."""

    path: str
    wire_bytes: float
    encode_s: float
    decode_s: float


def _sent(
    method: ReplicaMethod, meta: TensorMeta, network: ReplicaNetwork, group: dist.ProcessGroup
) -> _Sent:
    rows, *rest = meta.shape
    fewer = max(1, min(rows, _LARGEST * rows // meta.numel))
    gradient = torch.randn(fewer, *rest, generator=torch.Generator().manual_seed(0))
    gradient = gradient.to(meta.dtype)
    exchange = Exchange(
        {"parameter": torch.nn.Parameter(gradient.clone())}, method, group, network=network
    )
    for step in range(1 + _STEPS):
        if step == 1:
            exchange.totals = ReplicaTraffic()  # what the first step takes is not every step's
        exchange.begin(lr=1.0)
        exchange.add({"parameter": gradient.clone()})
        exchange.finish()
        exchange.finish_step(finite=True)
    found = exchange.report()
    exchange.close()
    scale = rows / fewer / _STEPS
    (path,) = found["paths"]
    return _Sent(path, *(scale * found[name] for name in ("wire_bytes", "encode_s", "decode_s")))


@contextmanager
def _alone() -> Iterator[dist.ProcessGroup]:
    """A group of this rank alone."""
    if dist.is_initialized():
        group, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
        yield group
        dist.destroy_process_group(group)
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
