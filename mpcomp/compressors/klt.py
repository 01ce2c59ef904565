"""The Karhunen-Loeve transform before another compressor: vectors in a basis of their own.

With the covariance S = U diag(l) U^T of the vectors x [C] that a link carries, the coordinates
U^T x are uncorrelated. Quantized with one step and coded by their entropy they take

    1/2 (mean log2 S_ii - mean log2 l_i)

bits an element less than those of x, for the same error, and no orthonormal basis saves more (the
coding gain; Huang and Schultheiss, 1963; Goyal, 2001).

Where what an error costs hangs on its direction, e F e^T of an error e, the best basis is not
orthonormal. With F = L L^T errors of L^T x cost the same in all directions, and with
L^T S L = V diag(l) V^T the basis B = V^T L^(-1) takes

    1/2 (log2 mean f_i - mean log2 f_i)

bits an element less than the best orthonormal one at the same cost, with f the eigenvalues of F (a
weighted square error at high resolution; Gardner and Rao, 1995). Here F is the second moment of the
gradients of the loss that come back for x, Fisher's information. B is scaled so that the errors of
independent coordinates cost in the mean what they would in the plain basis: tr(F B^T B) = tr F.

The receiver needs the basis too, so what is used is B rounded: without weights its rows are of
length one but for some hundredths. The sender finds y with x = y B, exactly, and the receiver makes
x^ = C(y) B: that B is not quite the best changes the cost of the error by as little.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp import entropy
from mpcomp.compressors.base import Compressor, Hosted, RoundCompressors
from mpcomp.compressors.tokens import Tokens
from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import SpecValue, of_inner, shown
from mpcomp.core.wire import Payload

__all__ = ["KLT", "LARGEST_WIDTH", "Basis", "InBasis"]

#: An entry of a basis is a whole number of such parts of its root mean square, 1 / sqrt(C).
_FRACTIONS = 8
#: A basis of more channels takes minutes to find and megabytes to send.
LARGEST_WIDTH = 4096
# Larger coordinates are clipped: what is made of them stays finite in fp32.
_LIMIT = torch.finfo(torch.float32).max / 2**18


@dataclass(frozen=True)
class KLT(SpecValue):
    """``inner`` in a basis that the link learns while training. Spec ``klt+step:0.15:centre=true``.

    y = U^T x with the covariance U diag(l) U^T of what the link carries: x^ = U C(y). For vectors
    along the channels (dim 1 of images, else the last) and an inner compressor whose bytes follow
    its data, as `ECSQ`'s do: fewer bits at the same error. How many follows from the spectrum of
    what crosses: 2 bits an element of a small GPT-2's activations and 0.6 of their gradients, next
    to nothing where all directions are as strong. A step is relative to the vector itself.

    With ``weighted`` the error may be larger in directions in which the loss hardly changes, by the
    gradients that have come back for the activations: fewer bits at the same cost to the loss.

    Round a memory, as ``klt+aqsgd+step:0.4``, all its compressors work in the basis: what has
    changed since the last visit is coded in it. The memory itself is of the vectors, and outlives
    a basis.

    Each link has its own basis. Its sender keeps the covariance of what it sent in training, and
    puts a new basis (5 bits an entry) into a message as soon as those sent since the last one would
    have been shorter by that much (`mpcomp.links.endpoints.basis`). Until the first it is ``inner``
    alone, as in a run that only evaluates. Behind a ReLU, whose zeros are worth more, it may remain
    so; vectors of more than 4096 channels have none. ``pipe.state_bytes`` counts what has been
    learned.

    A link resolves it for each message into the basis that its ends have, so it is no
    `Compressor` itself.

    * Source: the Karhunen-Loeve transform as a transform code (Huang & Schultheiss, 1963; Goyal,
      2001), weights by sensitivity (Gardner & Rao, 1995); learning both on the link, and when to
      send a basis, are this project's own.
    * State: second moments of what was sent, ``weighted`` of gradients too, and the basis at the
      sender, the basis at the receiver, per link; in checkpoints.
    * Theory: no orthonormal basis saves more bits of a Gaussian at equal error. The error itself is
      that of ``inner`` but for some hundredths, as a basis is sent rounded; no theorem of training.

    Args:
        inner: compressor of the coordinates, fp32, or a memory round one.
        weighted: let the cost of an error hang on its direction; for activations.

    Raises:
        TypeError: inner is neither.
        ValueError: inner compresses nothing, or looks at gradients (``along=``).
    """

    inner: Compressor | RoundCompressors
    weighted: bool = False
    spec: ClassVar[str] = "klt"
    spec_inner: ClassVar[str | None] = "inner"
    at_cuts = True
    variable_length = True  # of a message that brings a basis
    multiplies = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor | RoundCompressors):
            raise TypeError(
                f"inner={shown(self.inner)}: coordinates go to a compressor such as ECSQ(0.5), or "
                "to a memory such as AQSGD(ECSQ(0.5)); an adaptive method takes no basis"
            )
        if self.coder.sends_dense:
            raise ValueError(f"inner={self.inner}: a basis for what is sent as it is gains nothing")
        if isinstance(self.inner, RoundCompressors) and self.inner.looks_at_gradients:
            raise ValueError(
                f"inner={self.inner}: along= goes with no basis; leave one of them out"
            )

    @property
    def coder(self) -> Compressor:
        """The compressor that a basis is judged by; a memory's is the one of a first visit."""
        if isinstance(self.inner, Compressor):
            return self.inner
        return self.inner.first or self.inner.inner

    by_sample = of_inner("by_sample")

    def check_place(self, argument: str) -> None:
        if argument == "tie_comp":
            raise ValueError(
                f"tie_comp={self}: a weight's gradient is no set of vectors; a basis is for cuts"
            )
        if self.weighted and argument != "act_comp":
            raise ValueError(
                f"{argument}={self}: weighted=true looks at the gradients of an activation, so it "
                "is for act_comp"
            )
        self.inner.check_place(argument)

    def at(self, basis: Basis | None) -> Compressor | RoundCompressors:
        """``inner`` in a basis that both ends have; None for none yet."""
        if isinstance(self.inner, Compressor):
            return InBasis(self.inner, basis, str(self))
        return self.inner.with_coders(lambda coder: InBasis(coder, basis, str(self)))


@dataclass(frozen=True, eq=False)
class Basis:
    """A basis as it travels.

    Attributes:
        numbers: int16 [C, C] on the CPU, a vector a row, in units of 1 / (8 sqrt(C)).
    """

    numbers: Tensor
    _copies: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def rounded(cls, vectors: Tensor) -> Basis:
        """The nearest to rows, fp64 [C, C], of a length of about one."""
        unit = _FRACTIONS * math.sqrt(len(vectors))
        return cls((vectors * unit).round().to(torch.int16))

    @classmethod
    def of(cls, covariance: Tensor, weights: Tensor | None = None) -> Basis:
        """The best basis, strongest coordinates first.

        Args:
            covariance: S, fp64 [C, C].
            weights: F, likewise, positive definite; None for the unit matrix.
        """
        if weights is None:
            return cls.rounded(_directions(covariance))
        root = torch.linalg.cholesky(weights)
        directions = _directions(root.T @ covariance @ root)
        rows = torch.linalg.solve_triangular(root, directions, upper=False, left=False)
        cost = (weights * (rows.T @ rows)).sum() / weights.trace()
        return cls.rounded(rows * cost.rsqrt())

    @classmethod
    def decoded(cls, coded: Tensor, width: int) -> Basis:
        """Inverse of `coded`.

        Raises:
            RuntimeError: no such numbers.
        """
        return cls(torch.from_numpy(entropy.decode(coded.cpu().numpy(), width, width)))

    @cached_property
    def coded(self) -> Tensor:
        """The numbers by their entropy: uint8 [n] on the CPU."""
        return torch.from_numpy(entropy.encode(self.numbers.numpy()))

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the numbers."""
        return zlib.crc32(self.numbers.numpy().tobytes())

    @cached_property
    def rows(self) -> Tensor:
        """B: fp64 [C, C] on the CPU."""
        return self.numbers.to(torch.float64) / (_FRACTIONS * math.sqrt(len(self.numbers)))

    @cached_property
    def inverse(self) -> Tensor:
        """Inverse of `rows`; the sender's alone, who has made the basis."""
        inverse: Tensor = torch.linalg.inv(self.rows)
        return inverse

    def coordinates(self, vectors: Tensor) -> Tensor:
        """y with y B = x: fp32 [vectors, C] of that."""
        return vectors.mm(self._on("inverse", vectors.device))

    def vectors(self, coordinates: Tensor) -> Tensor:
        """x = y B: fp32 [vectors, C] of that."""
        return coordinates.mm(self._on("rows", coordinates.device))

    def _on(self, name: str, device: torch.device) -> Tensor:
        """One of the matrices in fp32 on a device."""
        if (name, device) not in self._copies:
            matrix: Tensor = getattr(self, name)
            self._copies[name, device] = matrix.to(device, torch.float32)
        return self._copies[name, device]


def _directions(covariance: Tensor) -> Tensor:
    """Orthonormal rows, fp64 [C, C], along which variances are uncorrelated; falling."""
    vectors: Tensor = torch.linalg.eigh(covariance).eigenvectors
    return vectors.T.flip(0)


@dataclass(frozen=True, eq=False)
class InBasis(Hosted):
    """A compressor of coordinates, for vectors of a link that has a basis, or has none yet.

    Attributes:
        inner: the compressor.
        basis: that both ends have; None for none yet.
        spec: of the method.
    """

    inner: Compressor
    basis: Basis | None
    spec: str  # type: ignore[misc]
    multiplies = True

    def __str__(self) -> str:
        """The spec of the method."""
        return self.spec

    variable_length = of_inner("variable_length")
    is_unbiased = of_inner("is_unbiased")
    on_host = of_inner("on_host")
    draws = of_inner("draws")

    @property
    def check(self) -> int:  # type: ignore[override]
        """A checksum of the basis."""
        return 0 if self.basis is None else self.basis.checksum

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return self.inner.layout(meta.with_dtype(torch.float32))

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return self.compress_against(x, x, generator)

    def compress_against(
        self, x: Tensor, whole: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        return self.inner.compress_against(
            *self._coordinates(x, whole, TensorMeta.of(x)), generator
        )

    def round_trip(
        self,
        x: Tensor,
        whole: Tensor,
        meta: TensorMeta,
        draw: Callable[[], torch.Generator | None],
    ) -> tuple[Payload, Tensor]:
        wide = meta.with_dtype(torch.float32)
        payload, said = self.inner.round_trip(*self._coordinates(x, whole, meta), wide, draw)
        return payload, self._back(said, meta)

    def _coordinates(self, x: Tensor, whole: Tensor, meta: TensorMeta) -> tuple[Tensor, Tensor]:
        """The coordinates of a tensor's vectors, and what they are left of, fp32 of its shape."""
        tokens = self._tokens(meta)
        vectors = _finite(tokens, x)
        against = tokens.join(vectors if whole is x else _finite(tokens, whole))
        if self.basis is not None:
            return tokens.join(self.basis.coordinates(vectors)), against
        return against if whole is x else tokens.join(vectors), against

    def _tokens(self, meta: TensorMeta) -> Tokens:
        return Tokens.of(meta.with_dtype(torch.float32))

    def decompress_to(
        self,
        device: torch.device,
        payload: Payload,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        wide = meta.with_dtype(torch.float32)
        return self._back(self.inner.decompress_to(device, payload, wide, generator), meta)

    def _back(self, x: Tensor, meta: TensorMeta) -> Tensor:
        """The tensor like ``meta`` whose coordinates are ``x``; that may be changed."""
        limit = min(torch.finfo(meta.dtype).max, torch.finfo(torch.float32).max)
        if self.basis is not None:
            tokens = self._tokens(meta)
            x = tokens.join(self.basis.vectors(_finite(tokens, x)))
        return x.clamp_(-limit, limit).to(meta.dtype)


def _finite(tokens: Tokens, x: Tensor) -> Tensor:
    """A tensor's vectors without what is too large."""
    return tokens.split(x).clamp_(-_LIMIT, _LIMIT)
