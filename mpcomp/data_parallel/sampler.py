"""A replica's share of a data set: a sample stays on its replica in all epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

__all__ = ["ReplicaSampler"]


class ReplicaSampler(Sampler[int]):
    """A replica's share of a data set: the same samples in every epoch, in another order.

    torch's DistributedSampler deals samples out anew in each epoch. AQ-SGD keeps a buffer for each
    sample on the replica that saw it last, so there a sample must stay. Samples are dealt out at
    random: by turns, as a data set that has its classes in turn would be, replicas might see some
    of the classes alone.

    Args:
        data: anything with a length.
        pipe: the pipeline, which knows its replica; or (replica, number of replicas).
        shuffle: draw another order in each epoch.
        seed: of the share and the order; the same on all ranks.

    Every replica gets the same number of samples: up to replicas - 1 are left out.

    Raises:
        ValueError: fewer samples than replicas.
    """

    def __init__(self, data: Sized, pipe: object, *, shuffle: bool = True, seed: int = 0) -> None:
        replica, replicas = pipe if isinstance(pipe, tuple) else (pipe.replica, pipe.num_replicas)  # type: ignore[attr-defined]
        if not 0 <= replica < replicas:
            raise ValueError(f"replica {replica} of {replicas}: expected 0 to {replicas - 1}")
        dealt = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        self._own = sorted(dealt[replica : len(data) - len(data) % replicas : replicas].tolist())
        if not self._own:
            raise ValueError(f"{len(data)} samples for {replicas} replicas: each needs one")
        self._shuffle = shuffle
        self._seed = seed
        self._replica = replica
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of this epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if not self._shuffle:
            return iter(self._own)
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * self.epoch)
        order = torch.randperm(len(self._own), generator=generator).tolist()
        return iter([self._own[i] for i in order])

    def __len__(self) -> int:
        return len(self._own)
