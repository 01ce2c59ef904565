"""One host's part in `recipes.bench.generation`: its stage with every method, and the clock."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

import torch
from torch import Tensor

import mpcomp
from recipes.bench.workers import begin_together, joined, own_stdout, say

#: In place of a method: only what the last stage tells all ranks after each token.
TOLD_ALONE: Final = "token told"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all workers are told alike, and the rank."""

    rank: int
    num_stages: int
    address: str
    port: int
    device: str
    num_threads: int
    num_blocks: int
    hidden: int
    heads: int
    vocab: int
    prompt: int
    new_tokens: int
    seed: int
    timeout_s: float
    methods: Sequence[str]


class _Clock:
    """A streamer that notes when each token came, and the bytes sent until then."""

    def __init__(self, pipe: mpcomp.Pipeline) -> None:
        self._pipe = pipe
        self.times: list[float] = []
        self.bytes: list[int] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with each token."""
        self.times.append(time.perf_counter())
        self.bytes.append(_bytes_sent(self._pipe))

    def end(self) -> None:
        """Called after the last."""


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
        pipes = {method: _pipe(method, job) for method in job.methods}
        say(answers, {"joined": job.rank})
        for line in sys.stdin:
            command = json.loads(line)
            if command["variant"] == TOLD_ALONE:
                say(answers, _told(next(iter(pipes.values())), command, answers))
            else:
                say(answers, _generated(pipes[command["variant"]], command, job, answers))


def _pipe(method: str, job: Job) -> mpcomp.Pipeline:
    """The model cut into stages of equally many blocks."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=job.vocab,
        n_positions=job.prompt + job.new_tokens,
        n_embd=job.hidden,
        n_layer=job.num_blocks,
        n_head=job.heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(job.seed)
    return mpcomp.pipeline(
        transformers.GPT2LMHeadModel(config),
        1,
        split=job.num_stages,
        act_comp=method,
        timeout=job.timeout_s,
        seed=job.seed,
    )


def _generated(
    pipe: mpcomp.Pipeline, command: dict[str, Any], job: Job, answers: TextIO
) -> dict[str, Any]:
    """One generation: seconds until the first token and until the last, and bytes sent by then."""
    generator = torch.Generator().manual_seed(job.seed)
    ids = torch.randint(job.vocab, (command["batch"], job.prompt), generator=generator)
    clock = _Clock(pipe)
    begin = begin_together(answers)
    tokens = pipe.generate(
        ids, max_new_tokens=command["new_tokens"], eos_token_id=[], streamer=clock
    )
    _, first, *_ = clock.times
    return {
        "first_s": first - begin,
        "last_s": clock.times[-1] - begin,
        "prompt_bytes": clock.bytes[1] - clock.bytes[0],
        "later_bytes": clock.bytes[-1] - clock.bytes[1],
        "tokens": tokens[:, job.prompt :].tolist(),
    }


def _told(pipe: mpcomp.Pipeline, command: dict[str, Any], answers: TextIO) -> dict[str, Any]:
    """The tokens of one batch, from the last rank to all, as often as after a prompt."""
    mesh = pipe.mesh
    tokens = torch.zeros(command["batch"], dtype=torch.int64)
    begin = begin_together(answers)
    for _ in range(command["new_tokens"]):
        mesh.broadcast(tokens, mesh.num_ranks - 1, "a token")
    return {"seconds": time.perf_counter() - begin}


def _bytes_sent(pipe: mpcomp.Pipeline) -> int:
    """Of all messages of inference that this rank has sent."""
    meters = [link.meter for link in pipe.links]
    return sum(meter.eval.wire_bytes + meter.eval_off.wire_bytes for meter in meters)
