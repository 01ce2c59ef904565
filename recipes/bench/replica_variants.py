"""The methods that `recipes.bench.slow_replicas` compares, each as a model on one replica."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import mpcomp
import stages
from mpcomp.adaptive.clock import WallClock
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.methods import replica_method_of
from recipes import data
from recipes.bench import workers
from recipes.data import Loader, loaders_of
from recipes.image_config import ImageConfig
from recipes.tokens import TokenLoader

REFERENCE: Final = "torch fp32"
#: The same steps of a model that no other replica hears of.
ALONE: Final = "no communication"
TORCH: Final = "torch "
MPCOMP: Final = "mpcomp "
#: After it, DDP's own buckets in place of one that holds all gradients.
OWN_BUCKETS: Final = ", DDP's own buckets"
#: Megabytes that no model here has.
ONE_BUCKET_MB: Final = 1e6
#: Steps that torch's PowerSGD averages densely; its error feedback asks for two.
POWER_SGD_DENSE_STEPS: Final = 2
#: Of one replica: bytes of messages, numbers of 32 bits in them, and what they took.
TOTALS: Final = ("wire_bytes", "floats", "encode_s", "wait_s", "decode_s")


@dataclass(frozen=True, kw_only=True)
class Job(workers.Job):
    """The model and the images that all replicas train on."""

    data: str
    train_limit: int | None
    test_limit: int | None
    model: str
    width: int
    batch: int
    lr: float
    momentum: float
    latency_ms: float
    path: str
    #: Seconds after which steps count as hung, and nothing can follow them; None waits on.
    hang_after_s: float | None = None

    def config(self, seed: int) -> ImageConfig:
        """The batches of a training run, with the augmentation that suits the data."""
        return ImageConfig.for_data(
            self.data,
            batch_size=self.batch * self.size,
            replicas=self.size,
            chunks=1,
            train_limit=self.train_limit,
            test_limit=self.test_limit,
            channels_last=False,
            seed=seed,
        )


class Stopwatch:
    """A clock that stands still between turns, in which other methods have theirs."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._begun: float | None = None

    def now(self) -> float:
        """Seconds of all turns so far."""
        running = 0.0 if self._begun is None else time.perf_counter() - self._begun
        return self._seconds + running

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds, self._begun = self.now(), None


@dataclass(frozen=True)
class Variant:
    """A model that is trained with one method on this replica."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor, Tensor]]
    #: `TOTALS` of all steps so far, as far as the method counts them; of mpcomp's methods also what
    #: they are at.
    report: Callable[[], Mapping[str, Any]]
    watch: Stopwatch = field(default_factory=Stopwatch)
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    #: What of the report grows from step to step.
    totals: Sequence[str] = TOTALS

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward, loss, backward with its communication, and the update."""
        loss = self.loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def open_variant(
    name: str, job: Job, dataset: data.Dataset, *, seed: int, mbps: float | None
) -> Variant:
    """The model with its method, at its first step; all replicas open it at once.

    Args:
        name: `ALONE`, `TORCH` and what `torch_rank` takes, or `MPCOMP` and a method's spec.
        job: of this replica.
        dataset: what it trains on.
        seed: of the weights, the batches and the method.
        mbps: of the links that it is timed on, as far as they are limited.

    Raises:
        ValueError: no such method.
    """
    config = job.config(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = getattr(stages, job.model)(dataset.num_classes, width=job.width)
    batches = endless(_train_loader(config, dataset, job.rank))
    if name == ALONE:
        return Variant(model, _sgd(model, job), batches, dict)
    whole = name.startswith(f"{TORCH}powersgd") and not name.endswith(OWN_BUCKETS)
    # Its new name is not known to all versions of torch that mpcomp runs on.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    ddp = DistributedDataParallel(
        model,
        # Statistics of BatchNorm stay each replica's own: they would be sent uncompressed.
        broadcast_buffers=False,
        # torch's PowerSGD waits within a callback, which gloo's few threads do not survive.
        bucket_cap_mb=ONE_BUCKET_MB if whole else None,
    )
    if name.startswith(MPCOMP):
        spec = name.removeprefix(MPCOMP)
        return _mpcomp_variant(spec, ddp, batches, job, seed=seed, mbps=mbps)
    return _torch_variant(name.removesuffix(OWN_BUCKETS), ddp, batches, job)


def torch_rank(hook: str) -> int | None:
    """The rank of torch's PowerSGD, or None for dense gradients.

    Raises:
        ValueError: no such hook.
    """
    method, _, rank = hook.partition(":")
    if method == "powersgd" and rank.isdecimal() and int(rank) > 0:
        return int(rank)
    if hook not in ("fp32", "fp16"):
        raise ValueError(f"{hook!r} is none of torch's hooks: pass fp32, fp16 or powersgd:<rank>")
    return None


def _torch_variant(
    name: str,
    ddp: DistributedDataParallel,
    batches: Iterator[tuple[Tensor, Tensor, Tensor]],
    job: Job,
) -> Variant:
    optimizer = _sgd(ddp, job)
    numel = sum(parameter.numel() for parameter in ddp.parameters())
    num_steps = 0
    rank = torch_rank(name.removeprefix(TORCH))
    if rank is not None:
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=POWER_SGD_DENSE_STEPS,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        def report() -> Mapping[str, Any]:
            dense = min(num_steps, POWER_SGD_DENSE_STEPS) * numel
            floats = dense + state.total_numel_after_compression
            return {"wire_bytes": 4 * floats, "floats": floats}

    else:
        item_bytes = 4
        if name != REFERENCE:
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            item_bytes = 2

        def report() -> Mapping[str, Any]:
            wire_bytes = num_steps * numel * item_bytes
            return {"wire_bytes": wire_bytes, "floats": wire_bytes / 4}

    def count(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1

    optimizer.register_step_post_hook(count)
    return Variant(ddp, optimizer, batches, report)


def _mpcomp_variant(
    spec: str,
    ddp: DistributedDataParallel,
    batches: Iterator[tuple[Tensor, Tensor, Tensor]],
    job: Job,
    *,
    seed: int,
    mbps: float | None,
) -> Variant:
    network = mpcomp.ReplicaNetwork(path=job.path)
    if mbps is not None:
        network = mpcomp.ReplicaNetwork(job.path, latency_ms=job.latency_ms, bandwidth_mbps=mbps)
    method = replica_method_of(spec)
    watch = Stopwatch()
    time_by(method, watch)
    optimizer = _sgd(ddp, job, momentum=momentum_beside(method, job.momentum))
    handle = mpcomp.compress_gradients(ddp, method, network=network, seed=seed)
    handle.follow(optimizer)
    return Variant(ddp, optimizer, batches, handle.report, watch)


def _sgd(model: nn.Module, job: Job, *, momentum: float | None = None) -> torch.optim.SGD:
    """The optimizer of the run, with its momentum unless another is given."""
    momentum = job.momentum if momentum is None else momentum
    return torch.optim.SGD(model.parameters(), lr=job.lr, momentum=momentum)


def time_by(method: ReplicaMethod, watch: Stopwatch) -> None:
    """Lets a method that measures its steps do so on a stopwatch.

    Else the first step of a turn would seem to it to last since the turn before.
    """
    if isinstance(method, mpcomp.GraVAC) and method.bandwidth_mbps is None:
        object.__setattr__(method, "clock", lambda: WallClock(watch.now))


def momentum_beside(method: ReplicaMethod, momentum: float) -> float:
    """The optimizer's momentum: none beside a method that has it on each replica."""
    return 0.0 if method.own_momentum else momentum


def _train_loader(config: ImageConfig, dataset: data.Dataset, rank: int) -> Loader:
    train, _ = loaders_of(config, dataset, torch.device("cpu"))
    return dataclasses.replace(train, replica=rank)


def endless(loader: Loader | TokenLoader) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    return itertools.chain.from_iterable(map(loader.epoch, itertools.count()))
