"""The state of a run, as a checkpoint takes it and gives it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import stages as staging
from mpcomp.comm.mesh import Mesh
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.links.link import Link

__all__ = ["RunState"]


@dataclass
class RunState:
    """All that a checkpoint holds of a run, or that tells it what it is the state of.

    Attributes:
        mesh: the ranks.
        model: this rank's stages, under the original model's names.
        cut: all stages.
        here: numbers of the stages of this rank.
        chunks: microbatches a batch.
        links: all links of the pipeline.
        device_of: where a stage of this rank lives.
        exchange: what compresses gradients between replicas; None where nothing does.
        scaler: loss scaler, if any.
        num_steps: training steps so far; set by `mpcomp.checkpoint.load`.
        dial: what ``auto`` has measured (`mpcomp.pilot.paying`); set likewise.
    """

    mesh: Mesh
    model: nn.Module
    cut: Sequence[staging.Stage]
    here: Sequence[int]
    chunks: int
    links: Sequence[Link]
    device_of: Callable[[int], torch.device]
    exchange: Exchange | None
    scaler: torch.amp.GradScaler | None
    num_steps: int
    dial: dict[str, Any]

    def cut_entry(self) -> dict[str, Any]:
        """The cut that links' state depends on."""
        return {
            "chunks": self.chunks,
            "stages": [list(stage.block_names) for stage in self.cut],
        }
