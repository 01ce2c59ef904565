"""Replicas of a pipeline: gradients are averaged once a step, and a sample stays on its replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

__all__ = ["GradientAverage", "ReplicaSampler", "check_unchanged", "described", "trained_in"]


class GradientAverage:
    """Averages one stage's gradients over its replicas, by DDP's reducer and so by its hooks.

    DDP reduces in the last backward of a step. A pipeline has one backward for each microbatch,
    and schedules that split backward never run one that DDP would notice: replicas would drift
    apart without a word. So DDP's hooks stay asleep (its forward is never called) until all
    gradients are there; then a backward of zeros through the parameters wakes them, once.

    Args:
        stage: on every replica with equal parameter shapes; takes the values of replica 0.
        group: the ranks that have this stage.
    """

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup) -> None:
        self._stage = stage
        self._parameters = [p for p in stage.parameters() if p.requires_grad]
        self._known = described(stage)
        self.enabled = True
        #: None where there is nothing to train. Gradient compression registers its hook here.
        self.ddp: DistributedDataParallel | None = None
        if self._parameters:
            self.ddp = DistributedDataParallel(stage, process_group=group)

    def __call__(self) -> None:
        """Replaces ``.grad`` by its mean over the replicas."""
        if not self.enabled:
            return
        check_unchanged(self._stage, self._known)
        if self.ddp is None:
            return
        self.ddp.reducer.prepare_for_backward([])
        torch.autograd.backward(self._parameters, [torch.zeros_like(p) for p in self._parameters])


def described(stage: nn.Module) -> list[tuple[int, torch.dtype]]:
    """What DDP's hooks hang on: they are lost without a word when one of these changes."""
    return [(id(p), p.dtype) for p in stage.parameters() if p.requires_grad]


def check_unchanged(stage: nn.Module, known: list[tuple[int, torch.dtype]]) -> None:
    """Raises ValueError if the parameters are not those that were `described`."""
    if described(stage) != known:
        raise ValueError(
            "parameters were replaced, frozen, unfrozen or given another dtype after the "
            "replicas were connected, so their gradients would not be averaged: change the "
            "model before mpcomp.pipeline"
        )


def trained_in(stages: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of stages that require gradients, by name."""
    named = (item for stage in stages for item in stage.named_parameters())
    return {name: parameter for name, parameter in named if parameter.requires_grad}


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
