"""A mean for each token of the vocabulary, taken off before another compressor, put back behind it.

In a language model the activation of a position says first of all which token stands there. All
ranks have the batch, and so the tokens; both ends of a link keep a running mean of what arrived for
each, m [tokens, C], and only what is different goes over the link:

    x^_t = m[id_t] + C(x_t - m[id_t])

At the end of a step in which token i has occurred n_i times, N_i times in all so far,

    m[i] <- m[i] + min(1, n_i / min(N_i, 64)) (mean of x^_t over its positions - m[i])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.compressors.klt import KLT
from mpcomp.core.spec import SpecValue, shown
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["LessMean", "TokenMean"]


@dataclass(frozen=True)
class TokenMean(SpecValue):
    """``inner`` on what differs from the mean of a token. Spec ``tokenmean+klt+step:0.1``.

    For language models, whose batch is a dict with ``input_ids`` [b, s], and tensors [b, s, C] at
    the cuts. The means are learned while training, from what arrived, at both ends alike; nothing
    is sent for them. They hold nine tenths of the energy of a small GPT-2's activations, and
    nothing of that of their gradients. A sender decodes each of its messages, to know what arrived.

    The error is relative to what is left, not to the tensor, as the context is in what is left.

    Each end of each cut keeps C numbers in fp32 for each token that has occurred, in host memory.

    Args:
        inner: compressor of what is left.

    Raises:
        TypeError: inner is neither a compressor nor a `KLT`.
        ValueError: inner compresses nothing.
    """

    inner: Compressor | KLT
    spec: ClassVar[str] = "tokenmean"
    spec_inner: ClassVar[str | None] = "inner"
    at_cuts = True
    learns = True
    reads_tokens = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor | KLT):
            raise TypeError(
                f"inner={shown(self.inner)}: what is left goes to a compressor such as ECSQ(0.3), "
                "or to KLT(ECSQ(0.3)); means are neither round nor inside feedback"
            )
        if self.inner.sends_dense:
            raise ValueError(f"inner={self.inner}: a mean off what is sent as it is gains nothing")

    @property
    def variable_length(self) -> bool:
        """Whether the inner compressor's messages vary."""
        return self.inner.variable_length


@dataclass(frozen=True, eq=False)
class LessMean(Compressor):
    """The compressor of one message, given the means at its positions.

    Attributes:
        method: of the link.
        inner: compressor of what is left.
        means: makes those of the positions, fp32 [b, s, C] on the CPU. Not made beforehand, as a
            receiver has the compressors of all microbatches of a step at once.
        occurrences: of all tokens together, that the means are of.
    """

    method: TokenMean
    inner: Compressor
    means: Callable[[], Tensor]
    occurrences: int

    def __str__(self) -> str:
        """The spec of the method."""
        return str(self.method)

    @property
    def variable_length(self) -> bool:  # type: ignore[override]
        """Whether the inner compressor's messages vary."""
        return self.inner.variable_length

    @property
    def check(self) -> int:  # type: ignore[override]
        """The inner compressor's, and the number of occurrences."""
        return self.inner.check ^ (self.occurrences & 0xFFFFFFFF)

    def left(self, x: Tensor) -> Tensor:
        """``x`` less the means: fp32."""
        return x.to(torch.float32).nan_to_num() - self.means().to(x.device)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return self.inner.layout(meta.with_dtype(torch.float32))

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return self.inner.compress(self.left(x), generator)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        left = self.inner.decompress(payload, meta.with_dtype(torch.float32), generator)
        limit = min(torch.finfo(meta.dtype).max, torch.finfo(torch.float32).max)
        return left.add_(self.means().to(left.device)).clamp_(-limit, limit).to(meta.dtype)
