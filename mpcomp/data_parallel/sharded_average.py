"""A pipeline's replicas that share their stages' parameters: each holds a piece (ZeRO, FSDP2).

A stage is gathered once a step, before its first microbatch, and stays whole until its gradients
have been exchanged after the last one: each microbatch would gather it anew otherwise. So a rank
has the memory of its stages' weights and gradients during a step, and of a piece of them and of the
optimizer's state between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import stages as staging
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.compressors import Compressor
from mpcomp.core.context import Step
from mpcomp.core.dtensor import local
from mpcomp.core.sent import Sent
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.fsdp import Shards, reduce_now
from mpcomp.data_parallel.replica_sync import ReplicaSync
from mpcomp.data_parallel.sharded import ShardedExchange, ShardedParameter

__all__ = ["ShardedAverage", "Sharding"]


@dataclass(frozen=True)
class Sharding:
    """A way for replicas to share parameters.

    Attributes:
        param_comp: compressor of those that they gather; None for none.
    """

    param_comp: Compressor | None = None


class ShardedAverage(ReplicaSync):
    """Shards a rank's stages over their replicas, and exchanges their gradients once a step.

    Args:
        stages: of this rank, with equal weights on all replicas; they are sharded here.
        mesh: the connected ranks; the stages are on its device.
        method: between replicas.
        param_comp: compressor of the parameters that are gathered.
        connections: further arguments of `ShardedExchange`.
    """

    exchange: ShardedExchange | None
    gathers = True

    @property
    def keeps_weights_equal(self) -> bool:
        return False  # each has its own piece

    def __init__(
        self,
        stages: Sequence[staging.Stage],
        mesh: ProcessMesh,
        method: ReplicaMethod,
        *,
        param_comp: Compressor | None,
        **connections: Any,
    ) -> None:
        super().__init__(stages, mesh)
        group, device = mesh.replica_group, mesh.device
        # torch takes meshes of the same ranks and names for equal, and what it keeps of operations
        # would lead to the groups of a pipeline that is gone. So each has a name of its own.
        names = (f"replicas of group {group.group_name}",)
        sharded_over = DeviceMesh.from_group(group, device.type, mesh_dim_names=names)
        options: dict[str, Any] = {"mesh": sharded_over, "reshard_after_forward": False}
        for stage in stages:
            again = {stage.get_parameter(name) for name in stage.second_uses}
            for block in _separate_blocks(stage, again):
                fully_shard(block, ignored_params=again, **options)
            fully_shard(stage, ignored_params=again, **options)
        self._shards = shards = Shards(self._stages)
        shards.check_dtypes()
        #: Modules that gather what two stages here use; the second has to find it whole.
        self._gathering = _share_tied(stages, shards)
        staging.tie_names(stages[0].original, stages)  # else its head keeps the whole weight
        self.exchange = ShardedExchange(
            shards.parts, method, group, device=device, param_comp=param_comp, **connections
        )
        self._compress = True
        #: What torch itself gathers in a step, and has so far: this rank's pieces.
        pieces = [local(p) for stage in self._stages for p in stage.parameters()]
        num_bytes = 0 if param_comp is not None else sum(p.nbytes for p in pieces)
        self._pieces = Sent(
            num_bytes, num_bytes, sum(p.numel() for p in pieces) if num_bytes else 0
        )
        self._gathered = Sent()
        shards.connect(
            self,
            gathers=param_comp is not None,
            waiting=lambda: mesh.waiting("parameters of other replicas"),
        )

    @property
    def sent(self) -> Sent:
        if self.exchange is None:
            return Sent()
        return self.exchange.totals.sent + self.exchange.gathered.sent + self._gathered

    def begin(self, step: Step) -> None:
        self._compress = step.compress_dp
        for module in self._gathering:
            module.unshard()
        shards = self._shards.trained()
        #: Those with a gradient that an earlier step has added to its shard.
        self._kept = {name for name, (shard, _) in shards.items() if shard.grad is not None}

    def reduce(self, step: Step) -> None:
        self._mesh.where = f"step {step.index}, exchanging gradients with other replicas"
        if not self.enabled:
            return
        exchange = self.exchange
        assert exchange is not None
        exchange.begin(loss_scale=step.loss_scale, lr=step.lr, compress=step.compress_dp)
        shards = self._shards.trained()
        wholes = {name: whole for name, (_, whole) in shards.items()}
        with self._completed(wholes, exchange.averaged_over) as unused:
            for stage in self._stages:
                reduce_now(stage)
            exchange.finish()
        self._gathered += self._pieces
        for name in unused - self._kept:
            shards[name][0].grad = None
        exchange.leave_alone(unused)

    def end(self) -> None:
        # Parameters may change now, so none stays gathered.
        for stage in self._stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    # -- what FSDP2's modules ask for -------------------------------------------------------------

    def reduce_block(
        self, blocks: Tensor, parts: Sequence[ShardedParameter], out: Tensor, *, mean: bool
    ) -> None:
        """One block's reduce-scatter."""
        assert self.exchange is not None
        self.exchange.reduce(blocks, parts, out, mean=mean)

    def gather_block(self, own: Tensor, parts: Sequence[ShardedParameter], out: Tensor) -> None:
        """One block's all-gather."""
        assert self.exchange is not None
        self.exchange.gather(own, parts, out, compress=self._compress)


def _share_tied(stages: Sequence[staging.Stage], shards: Shards) -> list[FSDPModule]:
    """Gives second uses on this rank the first ones' shards; the modules that gather these."""
    here = {stage.index: stage for stage in stages}
    return [
        shards.share(here[first].get_parameter(name), here[last], again)
        for (first, name), (last, again) in staging.ties(stages)
        if first in here and last in here
    ]


def _separate_blocks(stage: staging.Stage, ignored: Collection[nn.Parameter]) -> list[nn.Module]:
    """The blocks that share no parameter with another; those that do go with the stage itself."""
    blocks = [stage.get_submodule(name) for name in stage.block_names]
    users: dict[int, int] = {}
    for block in blocks:
        for parameter in block.parameters():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return [
        block
        for block in blocks
        if any(parameter not in ignored for parameter in block.parameters())
        and all(users[id(parameter)] == 1 for parameter in block.parameters())
    ]
