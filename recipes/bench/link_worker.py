"""One host's part in `recipes.bench.slow_link`: its stage, in every variant, and the clock.

Commands come in on standard input and answers go out on standard output, one JSON value a line, so
that nothing but the steps themselves goes over the measured link.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import mpcomp
from recipes.bench.decoder import decoder, equal_stages, token_batch, token_loss
from recipes.bench.workers import begin_together, joined, own_stdout, say

REFERENCE: Final = "torch fp32"
# Name -> (method of both directions, microbatches in flight as a function of stages and chunks).
METHODS: Final[dict[str, tuple[str, Callable[[int, int], int | None]]]] = {
    "mpcomp none": ("none", lambda num_stages, chunks: None),
    "mpcomp quant:4": ("quant:4", lambda num_stages, chunks: None),
    "mpcomp topk:0.1+fp16": ("topk:0.1+fp16", lambda num_stages, chunks: None),
    "mpcomp topk:0.1+fp16 1f1b": ("topk:0.1+fp16", lambda num_stages, chunks: num_stages),
    "mpcomp topk:0.1+fp16 deep": ("topk:0.1+fp16", lambda num_stages, chunks: chunks),
    "mpcomp ef21+topk:0.1+fp16": ("ef21+topk:0.1+fp16", lambda num_stages, chunks: None),
}
TORCH_DTYPES: Final = {REFERENCE: torch.float32, "torch bf16": torch.bfloat16}
VARIANTS: Final = (*TORCH_DTYPES, *METHODS)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all workers are told alike, and the rank."""

    rank: int
    num_stages: int
    address: str
    port: int
    device: str
    num_threads: int
    chunks: int
    microbatch: int
    num_blocks: int
    width: int
    context: int
    vocab: int
    seed: int
    timeout_s: float
    variants: Sequence[str]

    @property
    def cut_elements(self) -> int:
        """Numbers that cross one cut in one direction in one step."""
        return self.chunks * self.microbatch * self.context * self.width


@dataclass(frozen=True)
class Variant:
    """A training step on this rank."""

    step: Callable[[], Tensor | None]
    zero_grad: Callable[[], None]
    #: Bytes that all ranks sent over cuts so far, by the variant's own account.
    metered_bytes: Callable[[], int]


def work(job: Job) -> None:
    """Joins the others, then carries out commands until standard input ends."""
    answers = own_stdout()
    with joined(
        rank=job.rank,
        size=job.num_stages,
        address=job.address,
        port=job.port,
        device=job.device,
        num_threads=job.num_threads,
        timeout_s=job.timeout_s,
    ):
        variants = _variants(job)
        say(answers, {"joined": job.rank})
        for line in sys.stdin:
            name = json.loads(line)
            if name == "compute":
                say(answers, _compute(job))
            else:
                say(answers, _timed(variants[name], answers))


def _timed(variant: Variant, answers: TextIO) -> dict[str, Any]:
    """One step, begun at the moment that all ranks are told; the clock is the machine's."""
    variant.zero_grad()
    before = variant.metered_bytes()
    begin = begin_together(answers)
    loss = variant.step()
    end = time.perf_counter()
    return {
        "seconds": end - begin,
        "metered_bytes": variant.metered_bytes() - before,
        "loss": None if loss is None else loss.item(),
    }


def _variants(job: Job) -> dict[str, Variant]:
    return {
        name: _torch_variant(name, job) if name in TORCH_DTYPES else _mpcomp_variant(name, job)
        for name in job.variants
    }


def _model(job: Job) -> nn.Sequential:
    return decoder(
        num_blocks=job.num_blocks,
        width=job.width,
        context=job.context,
        vocab=job.vocab,
        seed=job.seed,
    )


def _own_stage(job: Job) -> nn.Sequential:
    counts = equal_stages(job.num_blocks, job.num_stages)
    start = sum(counts[: job.rank])
    return nn.Sequential(*list(_model(job))[start : start + counts[job.rank]])


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
    last = job.rank == job.num_stages - 1
    module: nn.Module = _own_stage(job)
    if dtype != torch.float32:
        module = _CastAtCuts(module, dtype, last=last)
    stage = PipelineStage(module, job.rank, job.num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, job.chunks, loss_fn=token_loss)
    x, y = _batch(job)
    inputs = (x,) if job.rank == 0 else ()
    # torch has no meter: what the tensors at the cuts hold.
    step_bytes = 2 * (job.num_stages - 1) * job.cut_elements * dtype.itemsize
    num_steps = 0

    def step() -> Tensor | None:
        nonlocal num_steps
        num_steps += 1
        if not last:
            schedule.step(*inputs, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(target=y, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()

    return Variant(step, module.zero_grad, lambda: num_steps * step_bytes)


def _mpcomp_variant(name: str, job: Job) -> Variant:
    method, in_flight = METHODS[name]
    pipe = mpcomp.pipeline(
        _model(job),
        chunks=job.chunks,
        split=equal_stages(job.num_blocks, job.num_stages),
        act_comp=method,
        grad_comp=method,
        loss_fn=token_loss,
        in_flight=in_flight(job.num_stages, job.chunks),
        timeout=job.timeout_s,
        seed=job.seed,
    )
    x, y = _batch(job)
    return Variant(lambda: pipe.forward_backward(x, y), pipe.zero_grad, lambda: pipe.wire_bytes)


def _compute(job: Job) -> dict[str, float]:
    """Seconds of this stage's forward and backward of one microbatch, the fastest of a few."""
    stage = _own_stage(job)
    x, y = (each[: job.microbatch] for each in _batch(job))
    if job.rank:
        x = torch.randn(job.microbatch, job.context, job.width, requires_grad=True)
    forward, backward = [], []
    for _ in range(job.chunks):
        start = time.perf_counter()
        out = stage(x)
        if job.rank == job.num_stages - 1:
            out = token_loss(out, y)
        middle = time.perf_counter()
        out.backward(torch.ones_like(out))
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    return {"forward_s": min(forward), "backward_s": min(backward)}
