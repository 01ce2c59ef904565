"""Replicas of a pipeline: gradients are averaged once a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["GradientAverage", "check_unchanged", "described", "trained_in"]


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
