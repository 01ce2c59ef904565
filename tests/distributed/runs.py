"""Training runs that one process and many do alike, told by a `Run`; and what they end with.

    outcomes = ranks(train_all, 2, runs)          # in each process: one outcome for each run
    for run, outcome in zip(runs, outcomes[0]):
        assert_same(run, outcome, train(run))     # here: the same run, in this process

Several runs share one start of processes: a pipeline can be made again and again.
"""

import contextlib
import copy
import itertools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from methods import same_bits
from models import CLASSES, CONV_SPLIT, MLP_SPLIT, convnet, images, mlp, rows
from ranks import preload
from torch import Tensor, nn

import mpcomp
import stages as staging
from mpcomp.core.microbatch import rows_of_chunks, scatter
from mpcomp.engines.local import LocalEngine
from mpcomp.engines.shape_inference import Planner
from mpcomp.engines.stage_runner import Autocast

preload("runs")

SINGLE = (None, "GPipe", "1F1B")
SPLITTING = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE, "Interleaved1F1B", "LoopedBFS", *SPLITTING)


def deep() -> nn.Sequential:
    """Eight blocks of odd sizes, so eight stages at most."""
    sizes = (13, 19, 17, 23, 11, 29, 15, 21)
    blocks = [
        nn.Sequential(nn.Linear(a, b), nn.Tanh() if i % 2 else nn.ReLU())
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]
    return nn.Sequential(*blocks, nn.Linear(sizes[-1], CLASSES))


def deep_convnet() -> nn.Sequential:
    """As `deep`, of images, with BatchNorm, dropout and operations in place in every stage."""
    widths = (3, 6, 7, 5, 9, 6, 7, 5)

    def block(i: int, a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1, stride=2 if i == 2 else 1),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
        )

    blocks = [block(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(widths))]
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))
    return nn.Sequential(*blocks, last)


@dataclass(frozen=True)
class Kind:
    """A model, where it can be cut, and its data."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, Tensor]]
    blocks: int | None = None  # so many stages at most, cut anywhere; else `split` alone
    split: Sequence[str] | None = None


class Masked(nn.Module):
    """A first stage of several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.one = nn.Sequential(nn.Linear(12, 12), nn.ReLU())
        self.two = nn.Sequential(nn.Linear(12, 9), nn.ReLU())
        self.rest = nn.Linear(9, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.one(self.embed(ids).mul(mask.unsqueeze(-1)))
        return self.rest(self.two(x).sum(dim=1))


def masked(count: int, seed: int, length: int = 7) -> tuple[Any, Tensor]:
    """A tuple batch for `Masked`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, (count, length), generator=generator)
    mask = torch.rand(count, length, generator=generator).round()
    return (ids, mask), torch.randint(CLASSES, (count,), generator=generator)


def named(count: int, seed: int) -> tuple[Any, Tensor]:
    """The same, by name."""
    (ids, mask), y = masked(count, seed)
    return {"ids": ids, "mask": mask}, y


def last_channels(count: int, seed: int) -> tuple[Any, Tensor]:
    x, y = images(count, seed)
    return x.contiguous(memory_format=torch.channels_last), y


KINDS = {
    "mlp": Kind(mlp, rows, split=MLP_SPLIT),
    "convnet": Kind(convnet, images, split=CONV_SPLIT),
    "deep": Kind(deep, rows, blocks=8),
    "deep convnet": Kind(deep_convnet, images, blocks=8),
    "masked": Kind(Masked, masked, split=("embed", "one", "two")),
    "named": Kind(Masked, named, split=("embed", "one", "two")),
}
#: Those of any test, beside which some tests put kinds of their own.
COMMON = tuple(KINDS)


def infer_shapes() -> None:
    """Shapes at the models' cuts, so that torch knows those of each operation: half of a short run.

    For the server of ranks, which has it from them.
    """
    for kind in (KINDS[name] for name in COMMON):
        model = kind.make().train()
        planner = Planner(staging.split(model, cut_evenly(kind, 4)), torch.device("cpu"))
        for part in scatter(kind.batch(10, 0)[0], rows_of_chunks(10, 4)):
            planner.plan(part, Autocast.of_caller(torch.device("cpu")))


def cut_evenly(kind: Kind, num_stages: int) -> Sequence[str]:
    """Names to cut after."""
    if kind.blocks is None:
        assert kind.split is not None
        return kind.split[-(num_stages - 1) :] if num_stages > 1 else ()
    return [str(kind.blocks * (i + 1) // num_stages - 1) for i in range(num_stages - 1)]


@dataclass(frozen=True)
class Run:
    """What to train and how; the fields that `mpcomp.pipeline` knows are passed on."""

    model: str = "deep"
    stages: int = 2
    schedule: str | None = None
    act: Any = None
    grad: Any = None
    chunks: int = 4
    rows: Sequence[int] = (10,)  # of each step, in turn
    steps: int = 10
    pipeline: dict[str, Any] = field(default_factory=dict)
    # What the loop does besides
    scale: float | None = None  # of a loss scaler
    overflow: tuple[int, int] | None = None  # (step, stage) with an infinite gradient
    clip: float | None = None
    autocast: torch.dtype | None = None
    channels_last: bool = False
    off: Sequence[int] = ()  # steps without compression
    accumulate: int = 1  # calls before an optimizer's step
    evaluate: bool = False  # after every step
    ids: int = 20  # sample ids are drawn from so many
    frozen: Sequence[str] = ()  # names of parameters begin with these
    thaw: int | None = None  # the step from which they are trained
    to: tuple[int, torch.dtype] | None = None  # (step, dtype): from then on
    optimizer: str = "sgd"
    seed: int = 0

    def __str__(self) -> str:
        told = [f"{k}={v}" for k, v in vars(self).items() if v != vars(Run())[k]]
        return f"Run({', '.join(told)})"


@dataclass
class Outcome:
    """What a run ended with, as one process sees it."""

    losses: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    bytes: tuple[int, int] = (0, 0)
    links: dict[str, dict[str, Any]] = field(default_factory=dict)
    norms: list[Tensor] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    num_steps: int = 0
    fidelity: dict[str, float] = field(default_factory=dict)
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)  # by link: wire, dense bytes
    without: list[set[str]] = field(default_factory=list)  # names of None gradients, by step
    error: str = ""


def make(run: Run, *, alone: bool, **kwargs: Any) -> tuple[mpcomp.Pipeline, Any]:
    """The pipeline of a run, and its scaler."""
    torch.manual_seed(run.seed)
    kind = KINDS[run.model]
    model = kind.make()
    if run.channels_last:
        model = model.to(memory_format=torch.channels_last)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(run.frozen) or ("-",)))
    scaler = None
    if run.scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=run.scale, growth_interval=4)
    options: dict[str, Any] = {
        "loss_fn": F.cross_entropy,
        "split": cut_evenly(kind, run.stages),
        "act_comp": run.act,
        "grad_comp": run.grad,
        "scaler": scaler,
        **run.pipeline,
        **kwargs,
    }
    if run.schedule is not None:  # as such a schedule places stages
        options.setdefault("ties", "apart")
    if alone:
        options["engine"] = "local"
        for name in ("in_flight", "in_flight_bytes"):
            options.pop(name, None)
    else:
        options.update(schedule=run.schedule, timeout=60.0)
    return mpcomp.pipeline(model, run.chunks, **options), scaler


def optimizer_of(run: Run, pipe: mpcomp.Pipeline) -> torch.optim.Optimizer:
    if run.optimizer == "adamw":
        return torch.optim.AdamW(pipe.parameters(), lr=0.01)
    return torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def data_of(run: Run, call: int) -> tuple[Any, Tensor, Tensor]:
    """Batch, target and sample ids of a call."""
    x, y = KINDS[run.model].batch(run.rows[call % len(run.rows)], call)
    if run.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    ids = torch.randperm(run.ids, generator=torch.Generator().manual_seed(call))[: len(y)]
    return x, y, ids


def train(run: Run, *, alone: bool = True, **kwargs: Any) -> Outcome:
    """Trains; in this process alone, or as one of several ranks."""
    pipe, scaler = make(run, alone=alone, **kwargs)
    optimizer = optimizer_of(run, pipe)
    outcome = Outcome()
    for step in range(run.steps):
        if run.thaw == step:
            pipe.requires_grad_(True)
        if run.to is not None and run.to[0] == step:
            pipe.to(run.to[1])
        for part in range(run.accumulate):
            x, y, ids = data_of(run, step * run.accumulate + part)
            if run.to is not None and step >= run.to[0] and isinstance(x, Tensor):
                x = x.to(run.to[1])
            with contextlib.ExitStack() as stack:
                if step in run.off:
                    stack.enter_context(pipe.uncompressed())
                if run.autocast is not None:
                    stack.enter_context(torch.autocast("cpu", dtype=run.autocast))
                if run.overflow is not None and run.overflow[0] == step:
                    stack.enter_context(exploding(pipe, run.overflow[1]))
                    before = links_of(pipe)
                if pipe.has_data:
                    loss = pipe.forward_backward(x, y, sample_ids=ids)
                else:
                    loss = pipe.forward_backward()
            outcome.losses.append(loss)
            outcome.skipped.append(pipe.step_skipped)
            if run.overflow is not None and run.overflow[0] == step:
                assert_same_links(links_of(pipe), before)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if run.clip is not None:
            outcome.norms.append(mpcomp.clip_grad_norm_(pipe, run.clip))
        outcome.without.append({n for n, p in pipe.named_parameters() if p.grad is None})
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
            outcome.scales.append(scaler.get_scale())
        else:
            optimizer.step()
        optimizer.zero_grad()
        if run.evaluate:
            batches = [KINDS[run.model].batch(count, 100 + step) for count in (7, 4, 2, 1)]
            loader = batches if pipe.has_data else None
            outcome.values.append(pipe.evaluate(loader))
            with pipe.uncompressed():
                outcome.values.append(pipe.evaluate(loader, accuracy))
    outcome.state = {k: v.clone() for k, v in pipe.merge().state_dict().items()}
    outcome.bytes = pipe.wire_bytes, pipe.dense_bytes
    outcome.links = links_of(pipe)
    outcome.num_steps = pipe.num_steps
    for link in pipe.links:
        outcome.sent[link.name] = link.meter.train.wire_bytes, link.meter.train.dense_bytes
        if link.meter.train.messages or not link.on_wire:
            outcome.fidelity[link.name] = link.meter.train.relative_error
    return outcome


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


@contextlib.contextmanager
def exploding(pipe: mpcomp.Pipeline, stage: int) -> Any:
    """Within it, gradients of the parameters of one stage, and of no other, are infinite."""
    handles = []
    for module in pipe.stages:
        if module.index == stage:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    handles.append(parameter.register_hook(lambda g: g * torch.inf))
    yield
    for handle in handles:
        handle.remove()


def links_of(pipe: mpcomp.Pipeline) -> dict[str, dict[str, Any]]:
    """A deep copy of what the ends of links on this rank remember."""
    return {link.name: copy.deepcopy(link.endpoint.state_dict()) for link in pipe.links}


def train_all(runs: Sequence[Run]) -> list[Outcome]:
    """Called in every rank. An error ends its run, not the others."""
    outcomes = []
    for run in runs:
        try:
            outcomes.append(train(run, alone=False))
        except Exception:
            outcomes.append(Outcome(error=traceback.format_exc()))
    return outcomes


def descending(run: Run) -> Outcome:
    """In this process, microbatches differentiated from the last to the first, as LoopedBFS."""
    ascending = LocalEngine.forward_backward

    def forward_backward(self, microbatches, targets, step, loss, same=(), updates=None):  # type: ignore
        outputs = self.forward(microbatches, step)
        pairs = enumerate(zip(outputs, targets, strict=True))
        parts = [loss(output, target, i) for i, (output, target) in pairs]
        for part in reversed(parts):
            part.backward()

    LocalEngine.forward_backward = forward_backward  # type: ignore[method-assign]
    try:
        return train(run)
    finally:
        LocalEngine.forward_backward = ascending  # type: ignore[method-assign]


def assert_same_links(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> None:
    """What this rank remembers is, bit for bit, what the other does (who may remember more)."""
    for name, state in ours.items():
        for key, value in state.items():
            other = theirs[name][key]
            same = same_bits(value, other) if isinstance(value, Tensor) else value == other
            assert same, f"{name} {key}"


def assert_same(run: Run, ours: Sequence[Outcome], alone: Outcome) -> None:
    """Every rank's outcome is that of one process, bit for bit.

    Args:
        run: what was done.
        ours: by rank.
        alone: in one process.
    """
    assert alone.losses and not alone.error
    remembered: dict[str, set[str]] = {name: set() for name in alone.links}
    for rank, outcome in enumerate(ours):
        where = f"rank {rank}, {run}"
        assert not outcome.error, f"{where}\n{outcome.error}"
        assert same_bits(torch.stack(outcome.losses), torch.stack(alone.losses)), (
            f"{where}: losses {outcome.losses} {alone.losses}"
        )
        assert list(outcome.state) == list(alone.state), where
        for name, value in alone.state.items():
            assert same_bits(outcome.state[name], value), f"{where}: {name}"
        assert len(outcome.norms) == len(alone.norms), where
        for a, b in zip(outcome.norms, alone.norms, strict=True):
            # Of a skipped step either is NaN or Inf: there all ranks fill their gradients.
            assert same_bits(a, b) or not (a.isfinite() or b.isfinite()), f"{where}: norm"
        for name in ("skipped", "scales", "values", "num_steps"):
            assert getattr(outcome, name) == getattr(alone, name), f"{where}: {name}"
        assert_same_links(outcome.links, alone.links)
        assert len(outcome.without) == len(alone.without), where
        for name, state in outcome.links.items():
            remembered[name] |= set(state)
    for step, without in enumerate(alone.without):
        found = set().union(*(outcome.without[step] for outcome in ours))
        assert found == without, f"{run}, step {step}: {found ^ without} without a gradient"
    # Nothing is missing: what one process remembers, some rank does.
    for name, state in alone.links.items():
        assert remembered[name] == set(state), f"{run}: {name}"


def with_stages(run: Run, num_ranks: int) -> Run:
    """The run with as many stages as its schedule takes, and enough microbatches."""
    stages = num_ranks * (1 if run.schedule in SINGLE else 2)
    chunks = run.chunks
    if run.schedule == "DualPipeV":  # torch: as many microbatches as stages
        chunks = max(chunks, stages)
    return replace(run, stages=stages, chunks=chunks)
