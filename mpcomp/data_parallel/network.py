"""The network between replicas, and the cheapest way over it for a message of so many bytes.

With n replicas, latency a (s) and bandwidth b (bytes/s) of each one's link, a dense gradient of D
bytes and a message of B bytes take about

===========  =====================================================  ==============================
path         seconds                                                for
===========  =====================================================  ==============================
sum          min(2 (n-1) a, 2 ceil(log2 n) a) + 2 (n-1)/n B/b       payloads that may be added
gather       (n-1) a + (n-1) B/b                                    few replicas
two-phase    2 (n-1) a + 2 (n-1)/n B/b                              many replicas
dense        as for a sum, of D bytes                               what compresses too little
===========  =====================================================  ==============================

The two terms of a sum's latency are those of a ring and of recursive halving and doubling, of which
a backend takes the better one. A gathered message goes to all others, so its traffic grows with n,
and the sum of n selections is up to n times as dense as one. On the two-phase path replica i forms
the mean of the i-th piece of every parameter, compresses it again (what that leaves out is
remembered there) and sends it to all: traffic and density stay those of one message. But what is
compressed twice arrives later, which costs quality, so this path is only taken where it is less
than half as expensive as to gather: from five replicas on, or so.

Replicas on one machine may average their gradients first, at two levels of compression::

    machine 0   replica 0 ── replica 1      means inside each machine first; then the first
                    |                       replica of each exchanges with those of the others,
    machine 1   replica 2 ── replica 3      and tells its machine the result
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from mpcomp.compressors import Compressor

__all__ = ["PATHS", "Connections", "Peers", "ReplicaNetwork", "Works"]

PATHS: Final = ("auto", "sum", "gather", "two-phase")
#: What weighs on the path that compresses twice.
TWICE: Final = 2.0


@dataclass(frozen=True)
class ReplicaNetwork:
    """Latency, bandwidth and layout of the links between replicas.

    Args:
        path: "auto" for the cheapest; "gather" or "two-phase" for all payloads that cannot be
            added ("sum" insists on methods whose payloads can).
        latency_ms: of a message between two replicas.
        bandwidth_mbps: megabits a second of each replica's link.
        per_machine: replicas on one machine, neighbours in rank; above 1 gradients are averaged
            inside each machine first, and only the first replica of each takes part in the
            compressed exchange between machines.
        inside: compressor inside a machine; None averages as it is.
        smallest: number of elements from which on a parameter is compressed, if it has two
            dimensions or more; all others go together, uncompressed.
        small: 16-bit type that those others are rounded to on their way, ``Cast("bf16")`` or
            ``Cast("fp16")`` (which clips beyond 65504, a loss scale included); None for their own.
            Where much is compressed they are much of what is left to send.

    Raises:
        ValueError: a setting outside those.
        TypeError: ``inside`` is no compressor, or ``small`` no such type.
    """

    path: str = "auto"
    latency_ms: float = 0.1
    bandwidth_mbps: float = 1000.0
    per_machine: int = 1
    inside: Compressor | None = None
    smallest: int = 1024
    small: Compressor | None = None

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise ValueError(f"path={self.path!r}: expected one of {', '.join(PATHS)}")
        if not (self.latency_ms >= 0 and math.isfinite(self.latency_ms)):
            raise ValueError(f"latency_ms={self.latency_ms}: expected milliseconds, 0 or more")
        if not (self.bandwidth_mbps > 0 and math.isfinite(self.bandwidth_mbps)):
            raise ValueError(
                f"bandwidth_mbps={self.bandwidth_mbps}: expected megabits a second, more than 0"
            )
        if self.per_machine < 1:
            raise ValueError(f"per_machine={self.per_machine}: expected 1 replica or more")
        if self.smallest < 1:
            raise ValueError(f"smallest={self.smallest}: expected 1 element or more")
        if self.small is not None and not _two_bytes(self.small):
            raise TypeError(f"small={self.small!r}: expected Cast('bf16') or Cast('fp16')")
        if self.inside is not None and not isinstance(self.inside, Compressor):
            raise TypeError(f"inside={self.inside!r}: expected a compressor such as Cast('bf16')")
        if self.inside is not None and self.per_machine == 1:
            raise ValueError(f"inside={self.inside} with per_machine=1: give per_machine as well")

    def check_replicas(self, num_replicas: int) -> None:
        """Raises ValueError if so many replicas cannot be shared out among such machines."""
        if num_replicas % self.per_machine:
            raise ValueError(
                f"per_machine={self.per_machine} with {num_replicas} replicas: expected a divisor "
                f"of {num_replicas}, as every machine holds as many"
            )

    def check_path(self, summable: bool) -> None:
        """Raises ValueError for ``path="sum"`` and a payload that cannot be added."""
        if self.path == "sum" and not summable:
            raise ValueError(
                "path='sum' for a method whose messages cannot be added elementwise: use randomk, "
                "randomblock, fp16 or powersgd, or path='gather'"
            )

    def seconds(self, path: str, num_bytes: float, num_replicas: int) -> float:
        """The time of a path for messages of so many bytes a replica; see the module's table."""
        n = num_replicas
        latency = self.latency_ms / 1000
        transfer = num_bytes * 8 / (self.bandwidth_mbps * 1e6)
        if path in ("sum", "dense"):
            rounds = min(2 * (n - 1), 2 * math.ceil(math.log2(n))) if n > 1 else 0
            return rounds * latency + 2 * (n - 1) / n * transfer
        if path == "gather":
            return (n - 1) * latency + (n - 1) * transfer
        assert path == "two-phase"
        return 2 * (n - 1) * latency + 2 * (n - 1) / n * transfer

    def choose(
        self, *, summable: bool, wire_bytes: float, dense_bytes: float, num_replicas: int
    ) -> str:
        """The path for one message: "sum", "gather", "two-phase", or "dense" if that is cheaper.

        Raises:
            ValueError: ``path="sum"`` for a payload that cannot be added.
        """
        self.check_path(summable)
        if summable:
            return "sum"
        if self.path != "auto":
            return self.path
        gather = self.seconds("gather", wire_bytes, num_replicas)
        two_phase = self.seconds("two-phase", wire_bytes, num_replicas)
        dense = self.seconds("dense", dense_bytes, num_replicas)
        if gather > dense:
            return "two-phase" if two_phase < dense else "dense"
        return "two-phase" if TWICE * two_phase < gather else "gather"


#: Collectives under way, which a path waits for before it goes on.
Works = list[Any]


class Peers:
    """A process group of replicas.

    Collectives start at once and are waited for later, all from the thread that started them: a
    wait inside a future's callback deadlocks on gloo, whose few threads run the callbacks.

    Attributes:
        size: number of replicas.
        rank: this one's number among them.
        traffic_bytes: that this rank has sent since the last `take_traffic`, by the algorithms
            that backends use (a ring for sums; every other replica gets each gathered message).
        waiting: a context for whatever needs the other replicas, and fails if one is gone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.traffic_bytes = 0.0
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def close(self) -> None:
        """Lets go of the group: a connection lasts as long as something refers to it."""
        del self.group

    def take_traffic(self) -> float:
        """Bytes sent since the last call."""
        sent, self.traffic_bytes = self.traffic_bytes, 0.0
        return sent

    def all_reduce(self, x: Tensor) -> Any:
        """Begins to replace ``x`` by its sum over all replicas, the same bits on each."""
        self.traffic_bytes += 2 * (self.size - 1) / self.size * x.nbytes
        with self.waiting():
            return dist.all_reduce(x, group=self.group, async_op=True)

    def all_gather(self, x: Tensor) -> tuple[Tensor, Any]:
        """Begins to collect ``x`` [n], which is as long everywhere, as [replicas, n]."""
        self.traffic_bytes += (self.size - 1) * x.nbytes
        gathered = torch.empty(self.size, x.numel(), dtype=x.dtype, device=x.device)
        with self.waiting():
            return gathered, dist.all_gather(list(gathered), x, group=self.group, async_op=True)

    def all_to_all(self, parts: Sequence[Tensor], own_length: int) -> tuple[Tensor, Any]:
        """Begins to send part i to replica i; gives what all have sent here [replicas, n].

        Args:
            parts: 1-d, one for each replica.
            own_length: of each that comes here.
        """
        whole = torch.cat(list(parts))
        self.traffic_bytes += whole.nbytes - parts[self.rank].nbytes
        gathered = torch.empty(self.size * own_length, dtype=whole.dtype, device=whole.device)
        with self.waiting():
            work = dist.all_to_all_single(
                gathered,
                whole,
                [own_length] * self.size,
                [part.numel() for part in parts],
                group=self.group,
                async_op=True,
            )
        return gathered.reshape(self.size, own_length), work

    def broadcast(self, x: Tensor) -> Any:
        """Begins to overwrite ``x`` by that of the first replica of the group."""
        if self.rank == 0:
            self.traffic_bytes += (self.size - 1) * x.nbytes
        first = dist.get_global_rank(self.group, 0)
        with self.waiting():
            return dist.broadcast(x, src=first, group=self.group, async_op=True)


class Connections:
    """The groups that this rank is in. All ranks of ``group`` make theirs together.

    Args:
        group: all replicas.
        network: how they are connected.
        device: of the gradients.
        waiting: a context for whatever needs other replicas, and fails if one is gone.
        timeout: of a wait in groups that are made here; None for torch's own.

    Attributes:
        everyone: all replicas.
        inside: those on this one's machine; None for one level.
        between: those that exchange compressed gradients; None where this rank only gives its own
            to the first one of its machine.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        network: ReplicaNetwork,
        device: torch.device,
        *,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        timeout: timedelta | None = None,
    ) -> None:
        self._device = device
        self.inside, between = _split_group(group, network, timeout, waiting)
        self.everyone = Peers(group)
        self.between = Peers(between) if between is not None else None
        for peers in self._all():
            peers.waiting = waiting

    def _all(self) -> Iterator[Peers]:
        yield self.everyone
        for peers in (self.between, self.inside):
            if peers is not None:
                yield peers

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Over all replicas, in fp64, on the gradients' device."""
        total = torch.tensor(list(numbers), dtype=torch.float64, device=self._device)
        with self.everyone.waiting():
            dist.all_reduce(total, group=self.everyone.group)
        result: list[float] = total.tolist()
        return result

    def take_traffic(self) -> float:
        """Bytes sent since the last call to whoever gradients are compressed for."""
        traffic = self.everyone.take_traffic()
        return traffic if self.between is None else traffic + self.between.take_traffic()

    def close(self) -> None:
        """Closes the groups made here, and lets go of the given one."""
        for peers in (self.between, self.inside):
            if peers is None:
                continue
            if peers.group is not self.everyone.group:
                with suppress(ValueError, RuntimeError):  # destroyed with all others at the end
                    dist.destroy_process_group(peers.group)
            peers.close()
        self.everyone.close()


def _split_group(
    group: dist.ProcessGroup,
    network: ReplicaNetwork,
    timeout: timedelta | None,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Peers | None, dist.ProcessGroup | None]:
    """The replicas on this one's machine, and those that exchange between machines.

    All ranks of ``group`` call this together.

    Returns:
        None and ``group`` for one level; None as the second where this rank is not the first of its
        machine.

    Raises:
        ValueError: the replicas cannot be shared out among such machines.
    """
    size, each = dist.get_world_size(group), network.per_machine
    if each == 1:
        return None, group
    network.check_replicas(size)
    ranks = dist.get_process_group_ranks(group)
    machines = [ranks[i : i + each] for i in range(0, size, each)]
    own, place = divmod(dist.get_rank(group), each)
    # The name that torch gives a group in this way has the number of a rank's groups in it, so
    # every rank has to make as many: the other places of the machines get groups as well.
    alike = [machine[place] for machine in machines]
    with waiting():
        inside = dist.new_group(machines[own], timeout=timeout, use_local_synchronization=True)
        between = dist.new_group(alike, timeout=timeout, use_local_synchronization=True)
    return Peers(inside), between if place == 0 else None


def _two_bytes(small: object) -> bool:
    """Whether it rounds to a 16-bit type and does no more."""
    dtype = small.wire_dtype if isinstance(small, Compressor) else None
    return dtype is not None and dtype.itemsize == 2
