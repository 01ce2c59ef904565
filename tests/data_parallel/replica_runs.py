"""What the processes of these tests do: exchange gradients that are made up, or train with DDP."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpcomp
from mpcomp import ReplicaNetwork
from mpcomp.data_parallel.compress import CompressedGradients
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.methods import replica_method_of

#: Elements from which on a parameter of these small models goes compressed.
SMALLEST = 64
NETWORK = ReplicaNetwork(smallest=SMALLEST)

# -- exchanges alone ------------------------------------------------------------------------------


def parameters(*, vectors: bool = True) -> dict[str, Tensor]:
    """Two matrices and a channels-last kernel that go compressed; two tensors that do not."""
    made = {
        "wide": torch.zeros(7, 30),
        "conv": torch.zeros(6, 5, 3, 3).to(memory_format=torch.channels_last),
        "tall": torch.zeros(41, 4),
    }
    if vectors:
        made |= {"bias": torch.zeros(80), "small": torch.zeros(3, 5)}
    return made


def gradients(like: dict[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    """Of a replica in a step; their scales differ from tensor to tensor."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * 3.0**i)
        for i, (name, p) in enumerate(like.items())
    }


def mean_gradients(like: dict[str, Tensor], num_replicas: int, step: int) -> dict[str, Tensor]:
    """What a plain DDP would make of them."""
    own = [gradients(like, rank, step) for rank in range(num_replicas)]
    return {name: torch.stack([g[name] for g in own]).double().mean(0) for name in like}


@contextmanager
def alone() -> Iterator[None]:
    """A group of this process alone: its exchanges take the ways of many, and cost no process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def exchange_of(
    method: Any, like: dict[str, Tensor], network: ReplicaNetwork | None = None, **kwargs: Any
) -> Exchange:
    method = replica_method_of(method)
    return Exchange(like, method, dist.group.WORLD, network=network or NETWORK, **kwargs)


def exchanged(
    exchange: Exchange, given: dict[str, Tensor], lr: float | None = 0.1, **kwargs: Any
) -> dict[str, Tensor]:
    """One step: the gradients come in two groups, and leave as results."""
    own = {name: torch.empty_like(g).copy_(g) for name, g in given.items()}
    names = list(own)
    exchange.begin(lr=lr, **kwargs)
    exchange.add({name: own[name] for name in names[:2]})
    exchange.add({name: own[name] for name in names[2:]})
    exchange.finish()
    exchange.finish_step(finite=not exchange.nonfinite)
    return own


def mean_over_replicas(x: Tensor) -> Tensor:
    x = x.double().contiguous()
    dist.all_reduce(x)
    return x / dist.get_world_size()


# -- training with DDP ----------------------------------------------------------------------------


class Branching(nn.Module):
    """Layers that are run in another order than they are made; `extra` is run when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(24, 5)
        self.extra = nn.Linear(24, 24)
        self.tied = nn.Linear(24, 24, bias=False)
        self.middle = nn.Linear(10, 24)
        self.first = nn.Conv2d(3, 10, 3, padding=1)

    def forward(self, x: Tensor, use_extra: bool = True) -> Tensor:
        x = F.relu(self.first(x)).mean(dim=(2, 3))
        x = torch.tanh(self.middle(x))
        x = x + torch.tanh(self.tied(torch.tanh(self.tied(x))))  # used twice
        if use_extra:
            x = x + torch.tanh(self.extra(x))
        out: Tensor = self.last(x)
        return out


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        spec: of the method; None for plain DDP.
        network: how replicas are connected.
        ddp: arguments of DDP.
        steps: number of steps.
        extra: which replicas use the layer `extra`: "all", "changing" (by turns all of them, some
            and none), or "never".
        dtype: of the parameters.
        channels_last: whether kernels are so.
        device: of the parameters.
        accumulate: backward passes for one step.
        lr: learning rate.
    """

    spec: str | None
    network: ReplicaNetwork = NETWORK
    ddp: tuple[tuple[str, Any], ...] = ()
    steps: int = 50
    extra: str = "all"
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    device: str = "cpu"
    accumulate: int = 1
    lr: float = 0.1


def uses_extra(run: Run, step: int, rank: int) -> bool:
    if run.extra == "changing":
        return (True, rank % 2 == 0, False)[step % 3]
    return run.extra == "all"


class Training:
    """A model in training, some steps at a time."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(0)
        self.run = run
        self.model = Branching().to(run.device, run.dtype)
        if run.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        # One bucket in the first step, three after that, in the order of the backward pass.
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.003, **dict(run.ddp))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=run.lr)
        self.groups: list[list[str]] = []
        self.handle: CompressedGradients | None = None
        if run.spec is not None:
            self.handle = mpcomp.compress_gradients(self.ddp, run.spec, network=run.network)
            self.handle.follow(self.optimizer)
            add = self.handle.exchange.add

            def noted(gradients: Any) -> None:
                self.groups.append(list(gradients))
                add(gradients)

            self.handle.exchange.add = noted  # type: ignore[method-assign]
        self.buckets: list[list[list[str]]] = []  # of each step

    def loss(self, step: int, part: int = 0) -> Tensor:
        """On random rows of this replica, which one rule labels."""
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(100_000 * part + 100 * step + rank)
        x = torch.randn(12, 3, 5, 5, generator=generator)
        rule = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
        y = (x + F.relu(x)).mean(dim=(2, 3)).matmul(rule).argmax(1)
        x, y = x.to(self.run.device, self.run.dtype), y.to(self.run.device)
        if self.run.channels_last:
            x = x.to(memory_format=torch.channels_last)
        out = self.ddp(x, uses_extra(self.run, step, rank))
        return F.cross_entropy(out.float(), y)

    def step(self, step: int) -> float:
        self.groups.clear()
        for part in range(self.run.accumulate - 1):
            with self.ddp.no_sync():
                (self.loss(step, part + 1) / self.run.accumulate).backward()
        loss = self.loss(step)
        (loss / self.run.accumulate).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.buckets.append(list(self.groups))
        return float(loss.detach())

    def go(self, start: int, stop: int) -> list[float]:
        return [self.step(step) for step in range(start, stop)]

    def digest(self) -> str:
        return digest(dict(self.model.state_dict()))

    def state(self) -> dict[str, Any]:
        """Copies of all that is needed to go on."""
        assert self.handle is not None
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "replica": self.handle.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        assert self.handle is not None
        self.model.load_state_dict(state["model"])
        self.handle.load_state_dict(state["replica"])


def digest(tensors: dict[str, Tensor]) -> str:
    """Of every bit of them."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        hashed.update(name.encode() + str((value.dtype, tuple(value.shape))).encode())
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        hashed.update(raw.numpy().tobytes())
    return hashed.hexdigest()


@dataclass(frozen=True)
class Outcome:
    """What a training run ended with on one rank; everything here can be pickled."""

    weights: str
    losses: list[float]
    report: dict[str, Any]
    history: list[dict[str, Any]]
    buckets: list[list[list[str]]]
    finite: bool


def train_all(runs: list[Run]) -> list[Outcome | str]:
    """Each run in turn; in place of one that raised, what it said."""
    outcomes: list[Outcome | str] = []
    for run in runs:
        try:
            training = Training(run)
            losses = training.go(0, run.steps)
        except Exception as error:  # raised on all ranks, or the run does not end
            outcomes.append(f"{type(error).__name__}: {error}")
            continue
        handle = training.handle
        outcomes.append(
            Outcome(
                training.digest(),
                losses,
                handle.report() if handle else {},
                handle.history if handle else [],
                training.buckets,
                all(bool(p.isfinite().all()) for p in training.model.parameters()),
            )
        )
    return outcomes
