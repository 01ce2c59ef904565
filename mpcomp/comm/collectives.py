"""The replicas that average their gradients, and the collectives between them, counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Peers", "Works"]

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
