"""One host's part in `recipes.bench.slow_shards`: a rank of FSDP2, a model for each variant."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpcomp
from mpcomp.data_parallel.compress import ShardedGradients
from recipes.bench import workers
from recipes.bench.replica_variants import ALONE, MPCOMP, Variant, endless
from recipes.bench.replica_worker import OpenVariants
from recipes.decoder import Block, decoder, token_loss
from recipes.tokens import Blocks, TokenLoader

REFERENCE: Final = "torch FSDP2"
#: Between the method of gradients and the compressor of parameters that are gathered.
AND: Final = ","
#: Of one rank: what went over its link, and what it took; ``gather_`` of parameters that mpcomp
#: gathers, the others of gradients.
TOTALS: Final = (
    *("traffic_bytes", "encode_s", "wait_s", "decode_s"),
    *("gather_traffic_bytes", "gather_s"),
)


@dataclass(frozen=True, kw_only=True)
class Job(workers.Job):
    """The model and the text that all ranks train on."""

    #: File with what `save_tokens` was given.
    tokens: str
    vocab: int
    blocks: int
    width: int
    context: int
    #: Sequences of one rank in a step.
    batch: int
    lr: float


@dataclass(frozen=True)
class Tokens:
    """Sequences of one token more than the context, [n, context + 1]."""

    train: Tensor
    held_out: Tensor


@dataclass(frozen=True)
class ShardVariant(Variant):
    """A sharded model that is trained with one method."""

    #: A context in which parameters are gathered as they are.
    exact: Callable[[], AbstractContextManager[None]] = nullcontext


def save_tokens(tokens: Tokens, path: Path) -> None:
    """Writes a file for the workers, which would else all tokenize the same text."""
    torch.save({"train": tokens.train, "held_out": tokens.held_out}, path)


class Part(OpenVariants[ShardVariant]):
    """The models of one rank.

    Args:
        job: of this rank.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._tokens = Tokens(**torch.load(job.tokens, weights_only=True))
        self._mesh = init_device_mesh("cpu", (job.size,))

    def made(self, name: str, seed: int, mbps: float | None) -> ShardVariant:
        """As `open_variant` makes it, which knows no rate."""
        return open_variant(name, self._job, self._tokens, self._mesh, seed=seed)

    def judged(self, variant: ShardVariant) -> float:
        """The loss on this rank's part of the held-out sequences."""
        return _held_out_loss(variant, self._job, self._tokens)


def specs_of(name: str) -> tuple[str, str | None]:
    """The method of gradients and the compressor of parameters that a variant's name says."""
    method, _, codec = name.removeprefix(MPCOMP).partition(AND)
    return method.strip(), codec.strip() or None


def open_variant(
    name: str, job: Job, tokens: Tokens, mesh: DeviceMesh, *, seed: int
) -> ShardVariant:
    """The model with its method, at its first step; all ranks open it at once.

    Args:
        name: `ALONE`, `REFERENCE`, or `MPCOMP` and what `specs_of` takes.
        job: of this rank.
        tokens: what it trains on.
        mesh: the ranks.
        seed: of the weights, the batches and the method.

    Raises:
        ValueError: no such method.
    """
    model = decoder(
        num_blocks=job.blocks, width=job.width, vocab=job.vocab, context=job.context, seed=seed
    )
    loader = TokenLoader(
        blocks=Blocks(tokens.train, tokens.train),
        batch_size=job.batch * job.size,
        replica=job.rank,
        num_replicas=job.size,
        seed=seed,
    )
    batches = (_pair(batch["input_ids"]) for batch, *_ in endless(loader))
    report: Callable[[], Mapping[str, Any]] = dict
    exact: Callable[[], AbstractContextManager[None]] = nullcontext
    handle: ShardedGradients | None = None
    if name != ALONE:
        # Of logits, which nobody here changes in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        for child in model:
            if isinstance(child, Block):
                fully_shard(child, mesh=mesh)
        sharded = fully_shard(model, mesh=mesh)
        if name != REFERENCE:
            method, codec = specs_of(name)
            made = mpcomp.compress_gradients(sharded, method, param_comp=codec, seed=seed)
            assert isinstance(made, ShardedGradients)
            handle = made
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
    if handle is not None:
        handle.follow(optimizer)
        report, exact = _reporting(handle), handle.uncompressed
    return ShardVariant(
        model, optimizer, batches, report, loss=token_loss, totals=TOTALS, exact=exact
    )


def _pair(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and those after them, both [batch, context]."""
    return ids[:, :-1], ids[:, 1:], ids


def _reporting(handle: ShardedGradients) -> Callable[[], Mapping[str, Any]]:
    """A handle's report, with that of gathered parameters beside it where mpcomp gathers."""
    gathers = handle.exchange.param_comp is not None

    def report() -> Mapping[str, Any]:
        known = dict(handle.report())
        gathered = known.pop("parameters")
        if not gathers:
            return known
        traffic, seconds = gathered["traffic_bytes"], gathered["seconds"]
        return {**known, "gather_traffic_bytes": traffic, "gather_s": seconds}

    return report


@torch.no_grad()
def _held_out_loss(variant: ShardVariant, job: Job, tokens: Tokens) -> float:
    """Nats a token on this rank's part of the held-out sequences, with the exact weights.

    The model cannot be trained on afterwards: FSDP2 keeps the root's parameters until a backward.
    """
    own = tokens.held_out[job.rank :: job.size]
    with variant.exact():
        losses = [_loss(variant.model, rows) * len(rows) for rows in torch.split(own, job.batch)]
    return sum(losses) / len(own)


def _loss(model: nn.Module, rows: Tensor) -> float:
    x, y, _ = _pair(rows)
    return float(token_loss(model(x), y))
