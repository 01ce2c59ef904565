"""Subspace Networks: a decoder whose residual stream keeps within a subspace that all stages know.

Ramasinghe et al., *Subspace Networks*, NeurIPS 2025 (arXiv 2506.01260), in the reparametrised form
of the Protocol NanoGPT benchmark. One orthonormal U [width, rank] is drawn from a seed. Whatever a
block adds is U (W x + b), and the embedding of token t is F[t] + U e_t with a table F that is drawn
and never trained. So the stream at every cut is F[t] + U z, exactly, and z is all that is sent::

    z = (x - F[t]) U            rank numbers a token, and so are their gradients
    x = F[t] + z U^T            as every rank has the token ids
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.decoder import Block, Head
from recipes.lab.rivals.wire import crossing


class Constrained(nn.Module):
    """The map x [..., in] -> U (W x + b) [..., width]."""

    basis: Tensor

    def __init__(self, num_in: int, basis: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(num_in, basis.shape[1])
        self.register_buffer("basis", basis)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., width]."""
        y: Tensor = self.inner(x)
        return y @ self.basis.T


class SubspaceDecoder(nn.Module):
    """A decoder with a block a stage, whose cuts carry ``rank`` numbers a token.

    The parameters that the constraint saves go into a wider feed-forward part, so that a block has
    as many as one of `recipes.decoder`; the last block, behind the last cut, is such a one.

    Args:
        num_blocks: also the number of stages.
        width: of the residual stream.
        rank: of the subspace.
        num_heads: of attention.
        vocab: tokens.
        context: positions.
        seed: of the tables, the basis and the weights.
    """

    tables: Tensor
    basis: Tensor

    def __init__(
        self,
        *,
        num_blocks: int,
        width: int,
        rank: int,
        num_heads: int,
        vocab: int,
        context: int,
        seed: int,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.register_buffer("basis", torch.linalg.qr(torch.randn(width, rank)).Q)
            self.register_buffer("tables", torch.randn(vocab, width))
            self.token = nn.Embedding(vocab, rank)
            self.position = nn.Parameter(0.02 * torch.randn(context, rank))
            hidden = equal_hidden(width, rank)
            blocks = [Block(width, num_heads, hidden) for _ in range(num_blocks - 1)]
            for block in blocks:
                block.from_heads = Constrained(width, self.basis)
                block.feed_forward[-1] = Constrained(hidden, self.basis)
            self.blocks = nn.ModuleList([*blocks, Block(width, num_heads)])
            self.head = Head(width, vocab)
        #: Numbers that a token sends over a cut, each way.
        self.numbers_sent = rank

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] -> logits [batch, time, vocab]."""
        fixed = self.tables[tokens]
        z = self.token(tokens) + self.position[: tokens.shape[1]]
        x = fixed + z @ self.basis.T
        for i, block in enumerate(self.blocks):
            if i:
                x = fixed + crossing((x - fixed) @ self.basis) @ self.basis.T
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def after_step(self) -> None:
        """Nothing is left to do when the optimizer has stepped."""


def equal_hidden(width: int, rank: int) -> int:
    """The hidden units with which a constrained block has the weights of a plain one, 12 width^2.

    3 width^2 are the queries, keys and values, width * rank the output of attention, and each
    hidden unit has width weights before it and rank behind it.
    """
    return (12 * width**2 - 3 * width**2 - width * rank) // (width + rank)
