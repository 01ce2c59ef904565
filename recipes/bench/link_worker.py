"""One host's part in `recipes.bench.slow_link`: its stage, in every variant."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import mpcomp
from mpcomp.core.context import TensorMeta
from mpcomp.core.threads import BACKGROUND
from mpcomp.links.auto import GENERAL, TIE_COMP
from mpcomp.plan import Coding, measure_coding
from mpcomp.plan.planner import tie_cost
from recipes.bench import workers
from recipes.bench.accelerator import WaitingBlock, WaitingHead, loss_of_mixtures
from recipes.bench.uncoded import Uncoded, message_lengths
from recipes.decoder import decoder, equal_stages, token_batch, token_loss

REFERENCE: Final = "torch fp32"


class Setting(NamedTuple):
    """Methods of a variant of mpcomp's, and its microbatches in flight.

    Attributes:
        act: method of activations.
        grad: method of gradients.
        in_flight: as a function of stages and chunks; None for the engine's own.
        connections: of each direction of a cut.
        updates: steps in a call, between which the pipeline does not drain; one is a share of it.
        ties: of the tied embedding, where the model has one.
        background: whether messages are coded beside computing; None for what the engine chooses.
        uncoded: whether messages are as long as those of `IN_BACKGROUND`, and coded by nobody.
    """

    act: str
    grad: str
    in_flight: Callable[[int, int], int] | None = None
    connections: int | str = 1
    updates: int = 1
    ties: str | None = None
    background: bool | None = None
    uncoded: bool = False


_ONE_CONNECTION: Final[dict[str, Setting]] = {
    "mpcomp none": Setting("none", "none"),
    "mpcomp quant:4": Setting("quant:4", "quant:4"),
    "mpcomp topk:0.1+fp16": Setting("topk:0.1+fp16", "topk:0.1+fp16"),
    "mpcomp topk:0.1+fp16 1f1b": Setting(
        "topk:0.1+fp16", "topk:0.1+fp16", lambda num_stages, chunks: num_stages
    ),
    "mpcomp topk:0.1+fp16 deep": Setting(
        "topk:0.1+fp16", "topk:0.1+fp16", lambda num_stages, chunks: chunks
    ),
    "mpcomp ef21+topk:0.1+fp16": Setting("ef21+topk:0.1+fp16", "ef21+topk:0.1+fp16"),
    "mpcomp auto": Setting(*GENERAL),
    "mpcomp auto:scratch": Setting("auto:scratch", "auto:scratch"),
    "mpcomp auto:memory": Setting("auto:memory", "auto:memory"),
}
_FOUR: Final = {
    f"{name} x4": each._replace(connections=4) for name, each in _ONE_CONNECTION.items()
}
_MEASURED: Final = {
    f"{name} measured": each._replace(connections="auto") for name, each in _ONE_CONNECTION.items()
}
_ASYNCHRONOUS: Final = {
    f"{name} asynchronous": _ONE_CONNECTION[name]._replace(updates=16)
    for name in ("mpcomp none", "mpcomp quant:4", "mpcomp auto:scratch")
}
_APART: Final = {
    f"{name} apart": _ONE_CONNECTION[name]._replace(ties="apart")
    for name in ("mpcomp none", "mpcomp auto", "mpcomp auto:scratch")
}
#: The variant whose messages `uncoded` ones are as long as.
IN_BACKGROUND: Final = "mpcomp auto:scratch in background"
UNCODED: Final = "mpcomp uncoded"
_SCRATCH: Final = _ONE_CONNECTION["mpcomp auto:scratch"]
WHEN_CODED: Final = {
    "mpcomp auto:scratch in turn": _SCRATCH._replace(background=False),
    IN_BACKGROUND: _SCRATCH._replace(background=True),
    UNCODED: _SCRATCH._replace(background=True, uncoded=True),
}
#: The variant that chooses by the links, and what it falls back on as a variant of its own.
CHOSEN: Final = "mpcomp auto chosen"
_BY_LINKS: Final = {"mpcomp bf16": Setting("bf16", "bf16"), CHOSEN: Setting("auto", "auto")}
#: Those whose names end with x4 have four connections, with "measured" as many as ranks choose.
METHODS: Final[dict[str, Setting]] = {
    **_ONE_CONNECTION,
    **_FOUR,
    **_MEASURED,
    **_ASYNCHRONOUS,
    **_APART,
    **WHEN_CODED,
    **_BY_LINKS,
}
TORCH_DTYPES: Final = {REFERENCE: torch.float32, "torch bf16": torch.bfloat16}
VARIANTS: Final = (*TORCH_DTYPES, *METHODS)
USUAL: Final = (*TORCH_DTYPES, *_ONE_CONNECTION)


@dataclass(frozen=True, kw_only=True)
class Job(workers.Job):
    """Sizes of the model and of a step, and the variants.

    Attributes:
        accelerator_ms: of a block's forward where blocks only wait; 0 where they compute.
    """

    chunks: int
    microbatch: int
    num_blocks: int
    width: int
    context: int
    vocab: int
    seed: int
    lr: float
    tied: bool
    accelerator_ms: float
    variants: Sequence[str]

    @property
    def head_waits(self) -> bool:
        """Whether the head waits as the blocks do: a tied weight's is no small part."""
        return self.tied and self.accelerator_ms > 0

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of a microbatch."""
        return loss_of_mixtures if self.head_waits else token_loss

    @property
    def cut_elements(self) -> int:
        """Numbers that cross one cut in one direction in one step."""
        return self.chunks * self.microbatch * self.context * self.width


class Output:
    """The last output of a module, and by how much it changes.

    Args:
        module: watched from here on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._now: Tensor | None = None
        self._earlier: Tensor | None = None
        module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._now = output.detach()  # no copy: this is on the clock

    def change(self) -> float | None:
        """Energy of what changed since the last call ÷ that of the output; None at first."""
        earlier, self._earlier = self._earlier, self._now
        if earlier is None or self._now is None:
            return None
        return float((self._now - earlier).square().sum() / earlier.square().sum())


@dataclass(frozen=True)
class Variant:
    """A training step on this rank."""

    step: Callable[[], Tensor | None]
    #: Has the parameters of this rank.
    module: nn.Module
    #: Bytes that all ranks sent over cuts so far, by the variant's own account.
    metered_bytes: Callable[[], float]
    #: Of the stage, behind which the next cut lies.
    output: Output
    #: Steps that one call takes, and changes weights between.
    updates: int = 1
    #: Of each direction of a cut.
    connections: int = 1
    #: The place of a tied weight: "together" or "apart", None where the model has none.
    ties: str | None = None
    #: Bytes that this rank sent of the tied weight's gradient so far.
    tie_bytes: Callable[[], float] = lambda: 0.0
    #: Methods at each cut, of activations and of gradients, where links choose them.
    sends: Callable[[], list[list[str]] | None] = lambda: None


class Part:
    """This rank's stage in every variant.

    Args:
        job: of this rank.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._variants = _variants(job)

    def step(self, begin: workers.Begin, name: str, before: int) -> dict[str, Any]:
        """One step of a variant; the clock is the machine's, and stops before weights change.

        Where they change within a call, it is a share of the call.

        Args:
            begin: the moment for all ranks.
            name: of the variant.
            before: steps right before the clock.
        """
        variant = self._variants[name]
        variant.module.zero_grad()
        start = begin()
        for _ in range(before):
            variant.step()
            variant.module.zero_grad()
            start = time.perf_counter()
        sent_before, tied_before = variant.metered_bytes(), variant.tie_bytes()
        loss = variant.step()
        end = time.perf_counter()
        if variant.updates == 1:
            descend(variant.module, self._job.lr)
        return {
            "seconds": (end - start) / variant.updates,
            "change": variant.output.change(),  # of the last microbatch
            "metered_bytes": (variant.metered_bytes() - sent_before) / variant.updates,
            "loss": None if loss is None else loss.item(),
            "connections": variant.connections,
            "ties": variant.ties,
            "tie_bytes": (variant.tie_bytes() - tied_before) / variant.updates,
            "sends": variant.sends(),
        }

    def compute(self) -> list[dict[str, list[float]]]:
        """Seconds of the stage's forwards and backwards of a microbatch, of a few.

        Where the model is tied its head is a stage of its own, which the first rank measures.
        """
        return [_compute(self._job, stage, **ends) for stage, ends in _timed_stages(self._job)]

    def coding(self, name: str) -> Coding:
        """Seconds for which a variant of mpcomp's codes a microbatch."""
        act, grad, *_ = METHODS[name]
        if METHODS[name].uncoded:
            return Coding()
        x = torch.randn(self._job.microbatch, self._job.context, self._job.width)
        return measure_coding(act, grad, x, x.clone())[0]

    def tie_coding(self, name: str) -> Coding:
        """Seconds for which a variant of mpcomp's codes both gradients of the tied weight."""
        pipe = self._variants[name].module
        assert isinstance(pipe, mpcomp.Pipeline)
        (tie,) = pipe.ties
        job, meta = self._job, TensorMeta((self._job.vocab, self._job.width))
        num_rows = int(_batch(job)[0].flatten().bincount().count_nonzero())
        return tie_cost(tie.links[0].method, meta, num_rows).coding


def _variants(job: Job) -> dict[str, Variant]:
    lengths: Counter[str] = Counter()  # bytes of a message of `IN_BACKGROUND`, by direction
    return {
        name: _torch_variant(name, job)
        if name in TORCH_DTYPES
        else _mpcomp_variant(name, job, lengths)
        for name in job.variants
    }


def descend(module: nn.Module, lr: float) -> None:
    """A step of SGD in which each tensor moves by ``lr`` times its own norm.

    Where one batch repeats, the gradients' own lengths give no steady change: half-way through the
    default model it is below 0.2 % of the energy at a rate of 1, and from 1.5 on soon above 20 %.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            direction = parameter.grad / parameter.grad.norm().clamp(min=1e-12)
            parameter.sub_(lr * parameter.norm() * direction)


def _model(job: Job) -> nn.Sequential:
    block_s = job.accelerator_ms / 1e3
    head_s = block_s * job.vocab / (12 * job.width)  # 12 width^2 are the weights of a block
    waiting = functools.partial(WaitingBlock, job.width, block_s)
    head = functools.partial(WaitingHead, job.width, job.vocab, job.context, head_s)
    return decoder(
        num_blocks=job.num_blocks,
        width=job.width,
        context=job.context,
        vocab=job.vocab,
        seed=job.seed,
        make_block=waiting if job.accelerator_ms else None,
        make_head=head if job.head_waits else None,
        tied=job.tied,
    )


def _stage_of(job: Job, model: nn.Sequential) -> nn.Sequential:
    """This rank's children of the model."""
    counts = equal_stages(job.num_blocks, job.size)
    start = sum(counts[: job.rank])
    return nn.Sequential(*list(model)[start : start + counts[job.rank]])


def _batch(job: Job) -> tuple[Tensor, Tensor]:
    return token_batch(
        batch=job.chunks * job.microbatch, context=job.context, vocab=job.vocab, seed=job.seed
    )


class _CastAtCuts(nn.Module):
    """A stage whose inputs and outputs at cuts, and so their gradients, are of ``dtype``."""

    def __init__(self, stage: nn.Module, dtype: torch.dtype, *, last: bool) -> None:
        super().__init__()
        self.stage, self.dtype, self.last = stage, dtype, last

    def forward(self, x: Tensor) -> Tensor:
        """Computes in fp32 whatever arrives."""
        out: Tensor = self.stage(x.float() if x.is_floating_point() else x)
        return out if self.last else out.to(self.dtype)


def _torch_variant(name: str, job: Job) -> Variant:
    dtype = TORCH_DTYPES[name]
    last = job.rank == job.size - 1
    own = _stage_of(job, _model(job))
    module: nn.Module = own
    if dtype != torch.float32:
        module = _CastAtCuts(module, dtype, last=last)
    stage = PipelineStage(module, job.rank, job.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, job.chunks, loss_fn=job.loss)
    x, y = _batch(job)
    inputs = (x,) if job.rank == 0 else ()
    # torch has no meter: what the tensors at the cuts hold.
    step_bytes = 2 * (job.size - 1) * job.cut_elements * dtype.itemsize
    tie = _TorchTie(job, own, dtype) if job.tied else None
    if tie is not None:
        step_bytes += 2 * tie.copy_bytes  # both copies are sent once each
    num_steps = 0

    def step() -> Tensor | None:
        nonlocal num_steps
        num_steps += 1
        losses: list[Tensor] = []
        if last:
            schedule.step(target=y, losses=losses, return_outputs=False)
        else:
            schedule.step(*inputs, return_outputs=False)
        if tie is not None:
            tie.add_up()
        return torch.stack(losses).mean() if last else None

    own_bytes = tie.copy_bytes if tie is not None and job.rank in (0, job.size - 1) else 0
    return Variant(
        step,
        module,
        lambda: num_steps * step_bytes,
        Output(own[-1]),
        ties="apart" if job.tied else None,
        tie_bytes=lambda: num_steps * own_bytes,
    )


class _TorchTie:
    """The tied weight's two copies, whose gradients torch adds up by an all-reduce each step.

    Args:
        job: of this rank.
        own: the stage; the first has the embedding, the last the head.
        dtype: in which they are exchanged.
    """

    def __init__(self, job: Job, own: nn.Sequential, dtype: torch.dtype) -> None:
        self._group = dist.new_group([0, job.size - 1])  # made by all
        self._dtype = dtype
        self._weight: nn.Parameter | None = None
        if job.rank == 0:
            self._weight = own[0].get_parameter("token.weight")
        elif job.rank == job.size - 1:
            self._weight = own[-1].get_parameter("to_logits.weight")
        #: Of one copy's gradient.
        self.copy_bytes = job.vocab * job.width * dtype.itemsize

    def add_up(self) -> None:
        """Gives both copies the sum of their gradients."""
        if self._weight is None:
            return
        assert self._weight.grad is not None
        both = self._weight.grad.to(self._dtype)
        dist.all_reduce(both, group=self._group)
        self._weight.grad = both.to(self._weight.dtype)


def _mpcomp_variant(name: str, job: Job, lengths: Counter[str]) -> Variant:
    setting = METHODS[name]
    depth = setting.in_flight
    model = _model(job)
    output = Output(_stage_of(job, model)[-1])
    uncoded = Uncoded("act", lengths), Uncoded("grad", lengths)
    act, grad = uncoded if setting.uncoded else (setting.act, setting.grad)
    with _coding(setting.background):
        pipe = mpcomp.pipeline(
            model,
            chunks=job.chunks * setting.updates,
            split=equal_stages(job.num_blocks, job.size),
            act_comp=act,
            grad_comp=grad,
            loss_fn=job.loss,
            in_flight=None if depth is None else depth(job.size, job.chunks),
            connections=setting.connections,
            ties=setting.ties,
            tie_comp=TIE_COMP if setting.ties and (act, grad) == GENERAL else None,
            timeout=job.timeout_s,
            seed=job.seed,
        )
    x, y = (torch.cat([each] * setting.updates) for each in _batch(job))
    ids = torch.arange(len(x))

    def update() -> None:
        descend(pipe, job.lr)
        pipe.zero_grad()

    within = update if setting.updates > 1 else None

    def step() -> Tensor:
        before = message_lengths(pipe) if name == IN_BACKGROUND else None
        loss = pipe.forward_backward(x, y, sample_ids=ids, update=within, updates=setting.updates)
        if before is not None:
            for direction, sent in (message_lengths(pipe) - before).items():
                lengths[direction] = sent // job.chunks
        return loss

    return Variant(
        step,
        pipe,
        lambda: pipe.wire_bytes,
        output,
        setting.updates,
        pipe.engine.connections,
        ties=("apart" if pipe.ties else "together") if job.tied else None,
        tie_bytes=lambda: sum(
            link.meter.train.sent.wire_bytes for tie in pipe.ties for link in tie.links
        ),
        sends=lambda: (
            [[str(link.method) for link in cut.links] for cut in pipe.boundaries]
            if name == CHOSEN
            else None
        ),
    )


@contextmanager
def _coding(background: bool | None) -> Iterator[None]:
    """Pipelines that are made within it code in the background, or in turn; None leaves it."""
    before = os.environ.get(BACKGROUND)
    if background is not None:
        os.environ[BACKGROUND] = str(int(background))
    try:
        yield
    finally:
        os.environ.pop(BACKGROUND, None)
        if before is not None:
            os.environ[BACKGROUND] = before


def _timed_stages(job: Job) -> list[tuple[nn.Module, dict[str, bool]]]:
    """The stages that this rank measures, and whether they begin and end the model."""
    model = _model(job)
    own, last = _stage_of(job, model), job.rank == job.size - 1
    if not job.tied:
        return [(own, {"first": job.rank == 0, "last": last})]
    if job.rank == 0:
        head = nn.Sequential(model[-1])
        return [(own, {"first": True, "last": False}), (head, {"first": False, "last": True})]
    if last:
        own = nn.Sequential(*list(own)[:-1])
    return [(own, {"first": False, "last": False})]


def _compute(job: Job, stage: nn.Module, *, first: bool, last: bool) -> dict[str, list[float]]:
    """Seconds of a stage's forwards and backwards of a step, two microbatches under way."""
    x, y = (each[: job.microbatch] for each in _batch(job))
    if not first:
        x = torch.randn(job.microbatch, job.context, job.width, requires_grad=True)
    times: dict[str, list[float]] = {"forward_s": [], "backward_s": []}
    under_way: deque[Tensor] = deque()

    def forward() -> None:
        start = time.perf_counter()
        out = stage(x)
        under_way.append(job.loss(out, y) if last else out)
        times["forward_s"].append(time.perf_counter() - start)

    def backward() -> None:
        start = time.perf_counter()
        out = under_way.popleft()
        torch.autograd.backward(out, torch.ones_like(out))
        times["backward_s"].append(time.perf_counter() - start)

    for _ in range(2):  # the first time everything is new; gradients are in every step
        stage.zero_grad()
        times["forward_s"].clear()
        times["backward_s"].clear()
        forward()
        for _ in range(job.chunks - 1):
            forward()  # one more than backwards: what they read has left the caches by then
            backward()
        backward()
    return times
