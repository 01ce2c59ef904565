"""What the processes of the tests of FSDP2 do: train a sharded model."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from replica_runs import digest
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import mpcomp
from mpcomp import ReplicaNetwork
from mpcomp.data_parallel.compress import ShardedGradients
from mpcomp.feedback.state import EndState

NETWORK = ReplicaNetwork(smallest=16)
WIDTH = 24
HALF = torch.bfloat16


class Block(nn.Module):
    """33 rows belong to no number of ranks evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 33)
        self.down = nn.Linear(33, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.down(torch.tanh(self.up(x))))
        return out


class Net(nn.Module):
    """Blocks, a layer that is used when it is told, and a head of fewer rows than four ranks."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        if tied:
            self.blocks[1].down.weight = nn.Parameter(torch.randn(33, WIDTH).T.contiguous() / 6)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.second.weight = self.first.weight
        self.tied = tied

    def forward(self, x: Tensor, use_extra: bool = True) -> Tensor:
        if self.tied:
            x = self.second(torch.tanh(self.first(x)))
        for block in self.blocks:
            x = block(x)
        if use_extra:
            x = x + torch.tanh(self.extra(x))
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        spec: of the method; None for torch's own FSDP2.
        options: further arguments of `compress_gradients`.
        steps: number of steps.
        policy: of mixed precision.
        accumulate: backward passes for one step.
        frozen: parameters whose names contain one of these are not trained.
        extra: whether the layer `extra` is used: "all", "never", or "asked" (never, but its
            gradient is exchanged all the same).
        tied: whether two layers have one weight.
        resharded: whether a block's parameters are gathered anew for backward.
        sums: whether FSDP2 is told to sum and to divide afterwards.
        columns: whether matrices are cut by columns, where ranks can share them evenly.
    """

    spec: str | None
    options: tuple[tuple[str, Any], ...] = ()
    steps: int = 4
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    accumulate: int = 1
    frozen: tuple[str, ...] = ()
    extra: str = "all"
    tied: bool = False
    resharded: bool = True
    sums: bool = False
    columns: bool = False


def by_columns(parameter: nn.Parameter) -> Shard | None:
    if parameter.dim() == 2 and parameter.shape[1] % dist.get_world_size() == 0:
        return Shard(1)
    return None


class Training:
    """A sharded model in training."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(0)
        self.run = run
        self.model = Net(tied=run.tied)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in run.frozen))
        options = {
            "mp_policy": run.policy,
            "shard_placement_fn": by_columns if run.columns else None,
        }
        for block in self.model.blocks:
            fully_shard(block, reshard_after_forward=run.resharded, **options)
        fully_shard(self.model, **options)
        if run.extra == "asked":
            self.model.set_reduce_scatter_unused_params(True)
        if run.sums:
            for module in (self.model, *self.model.blocks):
                module.set_force_sum_reduction_for_comms(True)
        self.handle: ShardedGradients | None = None
        if run.spec is not None:
            options = {"network": NETWORK, **dict(run.options)}
            handle = mpcomp.compress_gradients(self.model, run.spec, **options)
            assert isinstance(handle, ShardedGradients)
            self.handle = handle
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        if self.handle is not None and "momentum" not in str(run.spec):
            self.handle.follow(self.optimizer)

    def loss(self, step: int, part: int = 0) -> Tensor:
        """On random rows of this rank, which one rule labels."""
        seed = 100_000 * part + 100 * step + dist.get_rank()
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))
        out = self.model(x, self.run.extra == "all")
        return F.cross_entropy(out.float(), x[:, :3].argmax(1))

    def backward(self, step: int) -> float:
        for part in range(self.run.accumulate - 1):
            self.model.set_requires_gradient_sync(False)
            (self.loss(step, part + 1) / self.run.accumulate).backward()
            self.model.set_requires_gradient_sync(True)
        loss = self.loss(step)
        (loss / self.run.accumulate).backward()
        return float(loss.detach())

    def step(self, step: int) -> float:
        loss = self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def go(self, start: int, stop: int) -> list[float]:
        return [self.step(step) for step in range(start, stop)]

    def weights(self) -> dict[str, Tensor]:
        """The whole parameters, gathered from the optimizer's shards."""
        found = {name: p.full_tensor() for name, p in self.model.named_parameters()}
        return {name: p.detach().clone() for name, p in found.items()}

    def gradients(self) -> list[Tensor]:
        """This rank's shards."""
        return [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]

    def memories(self) -> str:
        assert self.handle is not None
        return digest(self.handle.state_dict()["tensors"])

    def state(self) -> dict[str, Any]:
        assert self.handle is not None
        shards = {n: p.detach().to_local().clone() for n, p in self.model.named_parameters()}
        held = self.handle.state_dict()
        tensors = {name: value.clone() for name, value in held["tensors"].items()}
        return {"shards": shards, "replica": {**held, "tensors": tensors}}

    def load(self, state: dict[str, Any]) -> None:
        assert self.handle is not None
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.to_local().copy_(state["shards"][name])
        self.handle.load_state_dict(state["replica"])


def kept_of(end: EndState) -> Tensor:
    """What it knows to be missing [n]."""
    return sum(end.open(flat=True)[name] for name in end.fields)  # type: ignore[return-value]
