"""A pipeline's replicas that share their stages' parameters: each holds a piece (ZeRO, FSDP2).

A stage is gathered once a step, before its first microbatch, and stays whole until its gradients
have been exchanged after the last one: each microbatch would gather it anew otherwise. So a rank
has the memory of its stages' weights and gradients during a step, and of a piece of them and of the
optimizer's state between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import stages as staging
from mpcomp.compressors import Compressor
from mpcomp.core.step import Step
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.fsdp import Shards, reduce_now
from mpcomp.data_parallel.sharded import Part, ShardedExchange

__all__ = ["ShardedAverage", "Sharding"]


@dataclass(frozen=True)
class Sharding:
    """How replicas share parameters.

    Attributes:
        param_comp: compressor of those that they gather; None for none.
    """

    param_comp: Compressor | None = None


class ShardedAverage:
    """Shards a rank's stages over their replicas, and exchanges their gradients once a step.

    Args:
        stages: of this rank, with equal weights on all replicas; they are sharded here.
        group: the ranks that have these stages.
        device: of the stages.
        method: between replicas.
        param_comp: compressor of the parameters that are gathered.
        connections: further arguments of `ShardedExchange`.

    Attributes:
        exchange: what does the work.
        enabled: whether steps are exchanged, or gradients added up for a later one.
    """

    def __init__(
        self,
        stages: Sequence[staging.Stage],
        group: dist.ProcessGroup,
        device: torch.device,
        method: ReplicaMethod,
        *,
        param_comp: Compressor | None,
        **connections: Any,
    ) -> None:
        self._stages = list(stages)
        # torch takes meshes of the same ranks and names for equal, and what it keeps of operations
        # would lead to the groups of a pipeline that is gone. So each has a name of its own.
        names = (f"replicas of group {group.group_name}",)
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=names)
        for stage in self._stages:
            for block in _apart(stage):
                fully_shard(block, mesh=mesh, reshard_after_forward=False)
            fully_shard(stage, mesh=mesh, reshard_after_forward=False)
        shards = Shards(self._stages)
        shards.check_dtypes()
        self.exchange = ShardedExchange(
            shards.parts, method, group, device=device, param_comp=param_comp, **connections
        )
        self.enabled = True
        self._compress = True
        shards.connect(self, gathers=param_comp is not None)

    def begin(self, step: Step) -> None:
        """Before the first microbatch of a step, or of a pass of evaluation."""
        self._compress = step.compress_dp

    def __call__(self, step: Step) -> None:
        """Exchanges the gradients of a step."""
        if not self.enabled:
            return
        exchange = self.exchange
        exchange.begin(loss_scale=step.loss_scale, lr=step.lr, compress=step.compress_dp)
        for stage in self._stages:
            reduce_now(stage)
        exchange.finish()

    def end(self) -> None:
        """After the last microbatch: parameters may change now, so none stays gathered."""
        for stage in self._stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def check_begin(self, step: Step) -> None:
        """Raises ValueError, on all ranks alike, if the step cannot be exchanged."""
        if self.enabled:
            self.exchange.check_lr(step.lr)

    def check_finite(self, step: Step) -> None:
        """Raises FloatingPointError on all ranks for NaN or Inf, without a loss scaler."""
        if self.enabled:
            self.exchange.check_finite(step.index, scaled=step.scaled)

    # -- what FSDP2's modules ask for -------------------------------------------------------------

    def reduce(self, blocks: Tensor, parts: Sequence[Part], out: Tensor, *, mean: bool) -> None:
        """One block's reduce-scatter."""
        self.exchange.reduce(blocks, parts, out, mean=mean)

    def gather(self, own: Tensor, parts: Sequence[Part], out: Tensor) -> None:
        """One block's all-gather."""
        self.exchange.gather(own, parts, out, compress=self._compress)


def _apart(stage: staging.Stage) -> list[nn.Module]:
    """The blocks that share no parameter with another; those that do go with the stage itself."""
    blocks = [stage.get_submodule(name) for name in stage.block_names]
    users: dict[int, int] = {}
    for block in blocks:
        for parameter in block.parameters():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return [
        block
        for block in blocks
        if any(True for _ in block.parameters())
        and all(users[id(parameter)] == 1 for parameter in block.parameters())
    ]
