"""One replica's part in `recipes.bench.slow_replicas`: a model for each method, and the clock.

Commands come in on standard input and answers go out on standard output, one JSON value a line, so
that nothing but the training itself goes over the measured link.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import mpcomp
import stages
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.clock import WallClock
from mpcomp.data_parallel.methods import replica_method_of
from recipes import data
from recipes.bench.workers import begin_together, joined, own_stdout, say
from recipes.image_config import ImageConfig
from recipes.loader import Loader, loaders_of

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
TEST_BATCH: Final = 128
#: Of one replica: bytes of messages, numbers of 32 bits in them, and what they took.
TOTALS: Final = ("wire_bytes", "floats", "encode_s", "wait_s", "decode_s")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all workers are told alike, and the rank."""

    rank: int
    num_replicas: int
    address: str
    port: int
    device: str
    num_threads: int
    timeout_s: float
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
            batch_size=self.batch * self.num_replicas,
            replicas=self.num_replicas,
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

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward, loss, backward with its communication, and the update."""
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def work(job: Job) -> None:
    """Joins the others, then carries out commands until standard input ends."""
    answers = own_stdout()
    dataset = data.load(job.data, train_limit=job.train_limit, test_limit=job.test_limit)
    variants: dict[str, Variant] = {}
    with joined(
        rank=job.rank,
        size=job.num_replicas,
        address=job.address,
        port=job.port,
        device=job.device,
        num_threads=job.num_threads,
        timeout_s=job.timeout_s,
    ):
        say(answers, {"joined": job.rank})
        for line in sys.stdin:
            command = json.loads(line)
            kind, name = command["do"], command.get("name")
            if kind == "open":
                variants[name] = open_variant(
                    name, job, dataset, seed=command["seed"], mbps=command["mbps"]
                )
                say(answers, {"dense_bytes": _dense_bytes(variants[name].model)})
            elif kind == "close":
                del variants[name]
                say(answers, {"closed": name})
            elif kind == "evaluate":
                say(answers, {"accuracy": _accuracy(variants[name].model, job, dataset)})
            else:
                assert kind == "steps", kind
                say(answers, _stepped(variants[name], command["count"], answers, job.hang_after_s))


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
    batches = _endless(_train_loader(config, dataset, job.rank))
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
    # DGC and RedSync have momentum on the replicas' side, and want none in the optimizer.
    optimizer = _sgd(ddp, job, momentum=0.0 if hasattr(method, "momentum") else None)
    handle = mpcomp.compress_gradients(ddp, method, network=network, seed=seed)
    handle.follow_lr(optimizer)
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


def _dense_bytes(model: nn.Module) -> int:
    """Of all gradients, as fp32."""
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def _train_loader(config: ImageConfig, dataset: data.Dataset, rank: int) -> Loader:
    train, _ = loaders_of(config, dataset, torch.device("cpu"))
    return dataclasses.replace(train, replica=rank)


def _endless(loader: Loader) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return itertools.chain.from_iterable(map(loader.epoch, itertools.count()))


def _stepped(
    variant: Variant, count: int, answers: TextIO, hang_after_s: float | None
) -> dict[str, Any]:
    """So many steps in a row, begun at the moment that all replicas are told."""
    before = variant.report()
    batches = list(itertools.islice(variant.batches, count))
    factors: list[float | None] = []
    losses: list[Tensor] = []

    def steps() -> None:
        with variant.watch:
            for x, y, _ in batches:
                variant.optimizer.zero_grad()
                losses.append(variant.step(x, y))
                factors.append(variant.report().get("cf"))

    begin = begin_together(answers)
    if hang_after_s is None:
        steps()
    elif hangs(steps, hang_after_s):
        return {"hung": True}  # the process stays, or the others would see it leave
    end = time.perf_counter()
    after = variant.report()
    return {
        "seconds": (end - begin) / count,
        "means": {key: (after[key] - before[key]) / count for key in TOTALS if key in after},
        "factors": factors,
        "at": {key: after[key] for key in after if key not in TOTALS and _said(after[key])},
        "loss": torch.stack(losses).mean().item(),
    }


def _said(value: Any) -> bool:
    """Whether it is known; JSON has no NaN."""
    return not isinstance(value, float) or math.isfinite(value)


def hangs(action: Callable[[], None], hang_after_s: float) -> bool:
    """Whether it does not return in time.

    Raises:
        Exception: what it raised.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(hang_after_s)
    for error in errors:
        raise error
    return thread.is_alive()


@torch.no_grad()
def _accuracy(model: nn.Module, job: Job, dataset: data.Dataset) -> float:
    """Of this replica, on all test images, without communication."""
    assert isinstance(model, DistributedDataParallel)
    _, test = loaders_of(job.config(0), dataset, torch.device("cpu"))
    alone = dataclasses.replace(test, num_replicas=1, batch_size=TEST_BATCH)
    module = model.module
    module.eval()
    right = sum(int((module(x).argmax(1) == y).sum()) for x, y in alone)
    module.train()
    return right / len(dataset.test)
