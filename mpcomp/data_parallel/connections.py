"""The replicas that one exchanges with: all, those of its machine, those between machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from mpcomp.comm.collectives import Peers
from mpcomp.data_parallel.hierarchical import split_group
from mpcomp.data_parallel.network import ReplicaNetwork

__all__ = ["Connections"]


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
        self.inside, between = split_group(group, network, timeout, waiting)
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
