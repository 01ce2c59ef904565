"""A small decoder language model in plain PyTorch, its sizes, and where to cut it into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Size(NamedTuple):
    """A decoder, and the batch of a step.

    Attributes:
        num_blocks: one to a stage.
        width: of the residual stream.
        num_heads: of attention.
        vocab: tokens.
        context: tokens of a sequence.
        batch: sequences of a step.
        chunks: microbatches of a step.
    """

    num_blocks: int
    width: int
    num_heads: int
    vocab: int
    context: int
    batch: int
    chunks: int

    @property
    def message_elements(self) -> int:
        """Numbers of one microbatch that cross a cut, one way."""
        return self.batch * self.context * self.width // self.chunks


SIZES: Final[Mapping[str, Size]] = {
    "small": Size(8, 128, 4, 1024, 128, 8, 2),
    "tiny": Size(8, 64, 4, 512, 64, 8, 1),
    # Width, blocks, context and tokens of a step are that benchmark's.
    "203M": Size(8, 1024, 8, 50304, 1024, 512, 64),
}


class Embedding(nn.Module):
    """Token, times ``scale``, plus position."""

    def __init__(self, vocab: int, context: int, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] -> [batch, time, width]."""
        embedded: Tensor = self.token(tokens)
        return self.scale * embedded + self.position[: tokens.shape[1]]


class Block(nn.Module):
    """Causal attention and a feed-forward part, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.to_heads = nn.Linear(width, 3 * width)
        self.from_heads: nn.Module = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        heads = self.to_heads(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [batch, head, time, width of a head]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(mixed.transpose(1, 2).flatten(2))
        grown: Tensor = x + self.feed_forward(x)
        return grown


class Head(nn.Module):
    """From the last block's output to a logit for each token."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.to_logits = nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> [batch, time, vocab]."""
        logits: Tensor = self.to_logits(self.norm(x))
        return logits


def decoder(
    *,
    num_blocks: int = 4,
    width: int = 256,
    num_heads: int = 4,
    vocab: int = 256,
    context: int = 128,
    seed: int = 0,
    make_block: Callable[[], nn.Module] | None = None,
    make_head: Callable[[], nn.Module] | None = None,
    tied: bool = False,
    scale: float = 1.0,
) -> nn.Sequential:
    """Embedding, blocks and head: tokens [batch, time] -> logits [batch, time, vocab].

    Args:
        make_block: of another kind than `Block`; [batch, time, width] -> the same.
        make_head: of another kind than `Head`; its ``to_logits`` is linear.
        tied: the head's weight is that of the tokens' embedding.
        scale: what the embedding's weight is multiplied by in use; a tied one is divided by it when
            it is made, or with 1 is N(0, 0.02²). With the root of the width, as in Vaswani et al.
            2017, logits are about 1, and what blocks add to is N(0, 1) as without a tie.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        embedding = Embedding(vocab, context, width, scale)
        blocks = [
            make_block() if make_block else Block(width, num_heads) for _ in range(num_blocks)
        ]
        head = make_head() if make_head else Head(width, vocab)
    if tied:
        head.get_submodule("to_logits").weight = embedding.token.weight
        with torch.no_grad():
            embedding.token.weight.mul_(0.02 if scale == 1.0 else 1 / scale)
    return nn.Sequential(embedding, *blocks, head)


def equal_stages(num_blocks: int, num_stages: int) -> list[int]:
    """Numbers of children of the decoder for each stage, so that all have as many blocks.

    Raises:
        ValueError: the blocks cannot be shared out equally.
    """
    if num_stages < 2 or num_blocks % num_stages:
        raise ValueError(
            f"{num_stages} stages cannot share {num_blocks} blocks equally: "
            "pass at least 2 stages and a multiple of them as blocks"
        )
    counts = [num_blocks // num_stages] * num_stages
    counts[0] += 1  # the embedding
    counts[-1] += 1  # the head
    return counts


def token_batch(*, batch: int, context: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens, and after each one the next, both [batch, context]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (batch, context + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def activation_of(size: Size, device: torch.device) -> Tensor:
    """A microbatch at a cut, in fp32 and drawn at random: what coding is measured with."""
    return torch.randn(size.batch // size.chunks, size.context, size.width).to(device)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
