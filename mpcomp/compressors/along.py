"""The component of each token along a vector that both ends know: one number a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Hosted
from mpcomp.compressors.tokens import Tokens
from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import of_inner
from mpcomp.core.wire import Payload

__all__ = ["AlongVectors"]

_LARGEST: Final = 1e30  # of a coefficient: of a vector that is hardly there


@dataclass(frozen=True, eq=False)
class AlongVectors(Hosted):
    """Sends of each token x the coefficient c = <x, g> / <g, g> of its vector g: x^ = c^ g.

    With c^ = c what is left of x is orthogonal to g. A coefficient of a vector that is zero is
    zero.

    Args:
        vectors: gives the vectors, a tensor like the one that is compressed; equal at both ends.
        coefficients: their compressor, of a tensor [tokens, 1].
    """

    vectors: Callable[[], Tensor]
    coefficients: Compressor

    def __str__(self) -> str:
        return f"along its vectors by {self.coefficients}"

    variable_length = of_inner("variable_length", "coefficients")
    on_host = of_inner("on_host", "coefficients")

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return self.coefficients.layout(_one_a_token(meta))

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        tokens = Tokens.of(TensorMeta.of(x))
        return self.coefficients.compress(
            _coefficients(tokens.split(x), self._split(tokens, x.device)), generator
        )

    def round_trip(
        self,
        x: Tensor,
        whole: Tensor,
        meta: TensorMeta,
        draw: Callable[[], torch.Generator | None],
    ) -> tuple[Payload, Tensor]:
        tokens = Tokens.of(meta)
        g = self._split(tokens, x.device)
        c = _coefficients(tokens.split(x), g)
        payload, c = self.coefficients.round_trip(c, c, TensorMeta.of(c), draw)
        return payload, _combined(c, g, tokens)

    def decompress_to(
        self,
        device: torch.device,
        payload: Payload,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        tokens = Tokens.of(meta)
        c = self.coefficients.decompress_to(device, payload, _one_a_token(meta), generator)
        return _combined(c, self._split(tokens, c.device), tokens)

    def _split(self, tokens: Tokens, device: torch.device) -> Tensor:
        """The vectors, fp32 [tokens, channels]."""
        return tokens.split(self.vectors().to(device))


def _one_a_token(meta: TensorMeta) -> TensorMeta:
    return TensorMeta((Tokens.of(meta).num, 1))


def _coefficients(x: Tensor, g: Tensor) -> Tensor:
    """c of vectors x along g, both fp32 [tokens, channels]: fp32 [tokens, 1]."""
    largest = g.abs().amax()
    g = g / torch.where(largest > 0, largest, 1.0)  # no square over- or underflows then
    # Sums may round by machine: what is sent is the result.
    products = torch.linalg.vecdot(x, g)
    squares = torch.linalg.vecdot(g, g)
    c = torch.where(squares > 0, products / squares / largest, 0.0)
    return c.nan_to_num().clamp(-_LARGEST, _LARGEST)[:, None]


def _combined(c: Tensor, g: Tensor, tokens: Tokens) -> Tensor:
    """c^ g, as a tensor."""
    dtype = tokens.meta.dtype
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return tokens.join((c * g).clamp_(-limit, limit).to(dtype))
