"""The mean of replicas' gradients, by DDP's reducer: bit for bit what DDP gives.

The uncompressed mean of an exchange (`paths.dense_sum`) is no replacement. On gloo it has
DDP's bits with 2 replicas, fp32 and bf16, but not with others: of 12 million fp32 gradients in
three buckets 43 % differ with 3 replicas, where DDP multiplies by 1/3 and an exchange divides by 3,
and 15 % with 4, where the order of a ring's sums follows from the place in the buffer, and so from
how gradients are grouped; by one unit in the last place (1.4e-7 of the largest).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import stages as staging
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.core.sent import Sent
from mpcomp.core.step import Step
from mpcomp.data_parallel.replica_sync import (
    ReplicaSync,
    check_unchanged,
    parameter_ids,
    trained_in,
)

__all__ = ["GradientAverage"]


class GradientAverage(ReplicaSync):
    """Averages gradients by DDP's reducer, and so by its hooks.

    DDP reduces in the last backward of a step. A pipeline has one backward for each microbatch,
    and schedules that split backward never run one that DDP would notice: replicas would drift
    apart without a word. So DDP's hooks stay asleep (its forward is never called) until all
    gradients are there; then a backward of zeros through the parameters wakes them, once.

    Args:
        stages: on every replica with equal parameter shapes; they take the values of replica 0.
        mesh: the connected ranks.

    Attributes:
        reducers: of each stage; None where there is nothing to train. A hook of DDP can be
            registered there.
    """

    def __init__(self, stages: Sequence[staging.Stage], mesh: ProcessMesh) -> None:
        super().__init__(stages, mesh)
        self._numbers = [stage.index for stage in stages]
        self._known = [parameter_ids(stage) for stage in stages]
        with mesh.waiting("weights of the first replica"):
            self.reducers = [
                _reducer(stage, mesh) if known else None
                for stage, known in zip(stages, self._known, strict=True)
            ]
        self._sent = Sent()

    @property
    def sent(self) -> Sent:
        return self._sent

    def reduce(self, step: Step) -> None:
        """Replaces ``.grad`` by its mean over the replicas."""
        if not self.enabled:
            return
        for number, stage, known, ddp in zip(
            self._numbers, self._stages, self._known, self.reducers, strict=True
        ):
            self._mesh.where = f"stage {number}, averaging over replicas"
            check_unchanged(stage, known)
            if ddp is None:
                continue
            parameters = [p for p in stage.parameters() if p.requires_grad]
            with (
                self._completed(trained_in([stage]), self._mesh.replica_group),
                self._mesh.waiting("gradients of other replicas"),
            ):
                ddp.reducer.prepare_for_backward([])
                torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])
            num_bytes = sum(p.nbytes for p in parameters)
            self._sent += Sent(num_bytes, num_bytes, sum(p.numel() for p in parameters))

    def close(self) -> None:
        super().close()
        self.reducers.clear()


def _reducer(stage: staging.Stage, mesh: ProcessMesh) -> DistributedDataParallel:
    # Not a parameter once more: its gradient is added to the first use's before replicas exchange.
    ignored: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignored(stage, stage.second_uses)
    return DistributedDataParallel(stage, process_group=mesh.replica_group)
