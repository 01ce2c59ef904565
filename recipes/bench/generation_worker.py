"""One host's part in `recipes.bench.generation`: its stage with every method."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import mpcomp
from recipes.bench import workers

#: In place of a method: only what the last stage tells all ranks after each token.
TOLD_ALONE: Final = "token told"


@dataclass(frozen=True, kw_only=True)
class Job(workers.Job):
    """Sizes of the model and of the text, and the methods."""

    num_blocks: int
    hidden: int
    heads: int
    vocab: int
    prompt: int
    new_tokens: int
    seed: int
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


class Part:
    """This rank's stage with every method.

    Args:
        job: of this rank.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pipes = {method: _pipe(method, job) for method in job.methods}

    def generate(
        self, begin: workers.Begin, method: str, batch: int, new_tokens: int
    ) -> dict[str, Any]:
        """One generation: seconds to the first token and to the last, and bytes sent by then."""
        job, pipe = self._job, self._pipes[method]
        generator = torch.Generator().manual_seed(job.seed)
        ids = torch.randint(job.vocab, (batch, job.prompt), generator=generator)
        clock = _Clock(pipe)
        start = begin()
        tokens = pipe.generate(ids, max_new_tokens=new_tokens, eos_token_id=[], streamer=clock)
        _, first, *_ = clock.times
        return {
            "first_s": first - start,
            "last_s": clock.times[-1] - start,
            "prompt_bytes": clock.bytes[1] - clock.bytes[0],
            "later_bytes": clock.bytes[-1] - clock.bytes[1],
            "tokens": tokens[:, job.prompt :].tolist(),
        }

    def tell(self, begin: workers.Begin, batch: int, new_tokens: int) -> dict[str, Any]:
        """The tokens of one batch, from the last rank to all, as often as after a prompt."""
        pipe = next(iter(self._pipes.values()))
        mesh = pipe.mesh
        start = begin()
        for _ in range(new_tokens):
            mesh.broadcast(torch.zeros(batch, dtype=torch.int64), mesh.num_ranks - 1, "a token")
        return {"seconds": time.perf_counter() - start}


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
        split=job.size,
        act_comp=method,
        timeout=job.timeout_s,
        seed=job.seed,
    )


def _bytes_sent(pipe: mpcomp.Pipeline) -> int:
    """Of all messages of inference that this rank has sent."""
    meters = [link.meter for link in pipe.links]
    return sum(meter.eval.wire_bytes + meter.eval_off.wire_bytes for meter in meters)
