"""A basis for each cut that is learned with the model: MAPL.

*Learned Subspace Compression for Communication-Efficient Pipeline Parallelism* (arXiv 2606.05484),
without its vector quantization. Cut p sends coordinates in an orthonormal basis A_p [width, rank],
of what remains when a part that all ranks know from the token ids is taken away::

    Z  = (X - E_p[ids] P_p) A_p                 rank numbers a token, and so are their gradients
    X' = Z A_p^T + E_{p+1}[ids] P_{p+1}

The tables E [vocab, rank] are trained like other weights; P [rank, width] has orthonormal rows and
is drawn. A_p stays on the Stiefel manifold: the loss's gradient g loses what would leave it, its
running mean m gives the direction of the steepest step of spectral norm 1, and the way back is the
polar factor::

    g <- g - A sym(A^T g);  m <- beta m + (1 - beta) g;  A <- polar(A - rate polar(m))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.decoder import Block, Embedding, Head
from recipes.lab.rivals.wire import crossing


class LearnedBasisDecoder(nn.Module):
    """The decoder of `recipes.decoder`, a block a stage, with a learned basis at each cut.

    Args:
        num_blocks: also the number of stages.
        width: of the residual stream.
        rank: of each basis.
        num_heads: of attention.
        vocab: tokens.
        context: positions.
        seed: of the bases and the weights.
        rate: of the bases; the paper's is a tenth of that of Muon, customarily 0.02.
        beta: of the mean of their gradients.
    """

    offsets: Tensor

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
        rate: float = 0.002,
        beta: float = 0.95,
    ) -> None:
        super().__init__()
        num_cuts = num_blocks - 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = Embedding(vocab, context, width)
            self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
            self.head = Head(width, vocab)
            drawn = torch.linalg.qr(torch.randn(2 * num_cuts + 1, width, rank)).Q
            self.register_buffer("offsets", drawn[num_cuts:].transpose(1, 2).contiguous())
        self.tables = nn.ParameterList(torch.zeros(vocab, rank) for _ in range(num_cuts + 1))
        #: Trained by `after_step`, and by no optimizer.
        self.bases = [basis.clone().requires_grad_() for basis in drawn[:num_cuts]]
        self._means = [torch.zeros_like(basis) for basis in self.bases]
        self._rate, self._beta = rate, beta
        #: Numbers that a token sends over a cut, each way.
        self.numbers_sent = rank

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedBasisDecoder:
        """Also moves the bases, which are no parameters, where the module goes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.bases = [fn(basis.detach()).requires_grad_() for basis in self.bases]
        self._means = [fn(mean) for mean in self._means]
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] -> logits [batch, time, vocab]."""
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            if i:
                x = self._across(i - 1, x, tokens)
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def _across(self, cut: int, x: Tensor, tokens: Tensor) -> Tensor:
        known, known_there = (
            F.embedding(tokens, self.tables[p]) @ self.offsets[p] for p in (cut, cut + 1)
        )
        basis = self.bases[cut]
        arrived: Tensor = crossing((x - known) @ basis) @ basis.T + known_there
        return arrived

    @torch.no_grad()
    def after_step(self) -> None:
        """Moves the bases by their gradients, along the manifold."""
        for basis, mean in zip(self.bases, self._means, strict=True):
            assert basis.grad is not None
            across = basis.T @ basis.grad
            gradient = basis.grad - basis @ (0.5 * (across + across.T))
            mean.lerp_(gradient, 1 - self._beta)
            basis.copy_(polar(basis - self._rate * polar(mean)))
            basis.grad = None


def polar(matrix: Tensor) -> Tensor:
    """The orthonormal matrix nearest to one [rows, columns], rows >= columns: U V^T of its SVD."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    nearest: Tensor = left @ right
    return nearest
