"""The choices that `mpcomp.pipeline` was given, as both engines are built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import stages as staging
from mpcomp.core.loss import CausalLMLoss, LossFn
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.links.build import MethodLike, Methods
from stages.split import Where

__all__ = ["Choices"]


@dataclass(frozen=True)
class Choices:
    """Arguments of `mpcomp.pipeline`, which documents them.

    Raises:
        ValueError: one that is wrong by itself.
    """

    chunks: int
    act_comp: Methods
    grad_comp: Methods
    tie_comp: MethodLike
    dp_comp: Any
    network: ReplicaNetwork | None
    split: Where | None
    sample: Any
    devices: str | torch.device | Sequence[str | torch.device] | None
    replicas: int
    shard: bool
    param_comp: Any
    schedule: str | None
    in_flight: int | str | None
    in_flight_bytes: int | None
    loss_fn: LossFn | None
    recompute: bool
    seed: int
    warmup_steps: int
    scaler: torch.amp.GradScaler | None
    weights: str | Path | None
    timeout: float

    def __post_init__(self) -> None:
        chunks, in_flight = self.chunks, self.in_flight
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ValueError(
                f"chunks={chunks!r}: expected a whole number of microbatches, 1 or more"
            )
        if self.split == "time" and self.sample is None:
            raise ValueError(
                "split='time' measures the model's blocks: pass sample=x, a batch of the size of a "
                "microbatch"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps}: expected 0 or more steps")
        whole = isinstance(in_flight, int) and not isinstance(in_flight, bool) and in_flight >= 1
        if not (in_flight in (None, "auto") or whole):
            raise ValueError(
                f"in_flight={in_flight!r}: expected a number of microbatches, 1 or more, 'auto' "
                "or None"
            )
        if self.in_flight_bytes is not None and not _positive(self.in_flight_bytes):
            raise ValueError(
                f"in_flight_bytes={self.in_flight_bytes!r}: expected a positive number of bytes"
            )
        for name in ("in_flight", "in_flight_bytes"):
            if getattr(self, name) is not None and self.schedule is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} with schedule={self.schedule!r}: torch's "
                    "schedules have their own depth; leave one of the two out"
                )
        if self.replicas == 1 and not (self.dp_comp is None and self.network is None):
            raise ValueError(
                f"dp_comp={self.dp_comp!r}, network={self.network!r} with replicas=1: there is "
                "nobody to exchange gradients with; leave them out, or pass replicas=2 and start "
                "twice as many processes"
            )
        if self.shard and self.replicas == 1:
            raise ValueError(
                "shard=True with replicas=1: there is nobody to share parameters with; pass "
                "replicas=2 and start twice as many processes"
            )
        if self.param_comp is not None and not self.shard:
            raise ValueError(
                f"param_comp={self.param_comp!r} without shard=True: replicas that have all "
                "parameters send none; leave it out, or shard them"
            )
        if not _positive(self.timeout):
            raise ValueError(f"timeout={self.timeout!r}: expected seconds, more than 0")

    def loss_for(self, cut: Sequence[staging.Stage]) -> LossFn | None:
        """The loss function: that of language models, where the model is one and none is given."""
        if self.loss_fn is None and cut[0].is_causal_lm:
            return CausalLMLoss()
        return self.loss_fn


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < float("inf")
