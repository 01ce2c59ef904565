"""The ranks of a run, their place in the mesh of pipelines × replicas, and small agreements.

    replica 0   rank 0 ── rank 1 ── rank 2      a row is a pipeline
    replica 1   rank 3 ── rank 4 ── rank 5      a column holds the same stages

Everything here is small and on the CPU, over a gloo group of its own; nothing is pickled.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from mpcomp.comm.failures import PeerError, Waits, grace_of

__all__ = ["World", "join", "launched"]

#: Pipelines made so far in this process: all ranks make them in the same order.
_counter = itertools.count()


def launched() -> bool:
    """Whether this process is one of several: by torchrun, or in an initialised group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def join(device: torch.device, timeout_s: float) -> None:
    """Joins torchrun's other processes, unless that has been done.

    Raises:
        ValueError: this process was not started by torchrun.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise ValueError(
            "engine='distributed' needs several processes: start the script with torchrun, or "
            "call torch.distributed.init_process_group before mpcomp.pipeline"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=max(timeout_s, 300)))


class World:
    """All ranks of a run.

    Args:
        replicas: number of pipelines.
        timeout_s: after which ranks that wait in vain have ended.
        device: of this rank.

    Raises:
        ValueError: the ranks cannot be shared out among so many replicas.
    """

    def __init__(self, replicas: int, timeout_s: float, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if replicas < 1 or self.size % replicas:
            raise ValueError(
                f"replicas={replicas} with {self.size} ranks: expected a divisor of {self.size}, "
                "as every replica is a whole pipeline"
            )
        self.num_replicas = replicas
        self.ranks_per_pipeline = self.size // replicas
        self.replica, self.place = divmod(self.rank, self.ranks_per_pipeline)
        self.device = device
        self.timeout_s = timeout_s
        #: Of a single wait; the rest is for finding out why it was in vain.
        self.wait_s = timeout_s - grace_of(timeout_s)
        store = dist.distributed_c10d._get_default_store()
        self.store = PrefixStore(f"mpcomp/{next(_counter)}", store)
        self.waits = Waits()
        self._groups: list[dist.ProcessGroup] = []

    def connect(self) -> None:
        """Makes the groups; all ranks together, once they agree that they want the same."""
        everyone = torch.arange(self.size).reshape(self.num_replicas, -1)
        self._control = self._group(everyone.flatten().tolist(), backend="gloo")
        pipes = [self._group(row.tolist()) for row in everyone]
        columns = [self._group(column.tolist()) for column in everyone.T]
        self.pipe_group = pipes[self.replica]
        self.replica_group = columns[self.place]
        self.mesh = DeviceMesh.from_group(
            [self.replica_group, self.pipe_group],
            self.device.type,
            mesh=everyone,
            mesh_dim_names=("replica", "pipe"),
        )

    def pair(self, a: int, b: int) -> dist.ProcessGroup | None:
        """A group of two places of every pipeline; None where this rank is neither.

        All ranks call this in the same order.
        """
        own = None
        for row in range(self.num_replicas):
            ranks = [row * self.ranks_per_pipeline + place for place in (a, b)]
            group = self._group(sorted(ranks))
            if self.rank in ranks:
                own = group
        return own

    def rank_at(self, place: int) -> int:
        """The rank at a place of this rank's own pipeline."""
        return self.replica * self.ranks_per_pipeline + place

    def _group(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        group = self._new(ranks, backend)
        if self.rank in ranks:
            self._groups.append(group)
        return group

    def _new(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        try:
            group: dist.ProcessGroup = dist.new_group(
                list(ranks), backend=backend, timeout=timedelta(seconds=self.wait_s)
            )
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} could not be connected to the others within {self.wait_s:g} s "
                f"({str(error).partition(chr(10))[0]}): one of them has failed meanwhile, or their "
                "machines cannot reach each other"
            ) from error
        return group

    def close(self) -> None:
        """Closes all connections."""
        for group in self._groups:
            with suppress(ValueError, RuntimeError):  # destroyed with all others at the end
                dist.destroy_process_group(group)
        self._groups.clear()
        for name in ("_control", "pipe_group", "replica_group", "mesh"):
            if hasattr(self, name):
                delattr(self, name)

    # -- agreements: every rank calls them in the same order ------------------------------------

    def gather(self, values: Sequence[int], what: str) -> list[list[int]]:
        """Whole numbers of 64 bits from every rank, by rank."""
        own = torch.tensor(list(values), dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        with self.waiting(what):
            dist.all_gather(gathered, own, group=self._control)
        return [numbers.tolist() for numbers in gathered]

    def sum(self, values: Sequence[float], what: str) -> list[float]:
        """Elementwise sums over all ranks, in fp64."""
        total = torch.tensor(values, dtype=torch.float64)
        with self.waiting(what):
            dist.all_reduce(total, group=self._control)
        result: list[float] = total.tolist()
        return result

    def share(self, value: Any, source: int, what: str) -> Any:
        """What JSON can hold, from one rank to all."""
        raw = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor([len(raw)])
        with self.waiting(what):
            dist.broadcast(length, src=source, group=self._control)
            data = torch.empty(int(length), dtype=torch.uint8)
            if raw:
                data.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            dist.broadcast(data, src=source, group=self._control)
        return json.loads(bytes(data.numpy()))

    def share_tensor(self, x: Tensor | None, source: int, what: str) -> Tensor:
        """A tensor from one rank to all, on this rank's device."""
        described = None
        if self.rank == source:
            assert x is not None
            described = [list(x.shape), str(x.dtype).removeprefix("torch.")]
        shape, dtype = self.share(described, source, what)
        host = torch.empty(shape, dtype=getattr(torch, dtype))
        if x is not None and self.rank == source:
            host.copy_(x.detach())
        if host.numel():
            with self.waiting(what):
                raw = host.reshape(-1).view(torch.uint8)  # gloo does not know every dtype
                dist.broadcast(raw, src=source, group=self._control)
        return host.to(self.device)

    def tell(self, x: Tensor, source: int, what: str) -> None:
        """Overwrites ``x``, on the CPU and of the same shape on all ranks, by that of one rank."""
        with self.waiting(what):
            dist.broadcast(x, src=source, group=self._control)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A context for a collective, in which this rank waits for all others."""
        return self.waits.on(None, what)
