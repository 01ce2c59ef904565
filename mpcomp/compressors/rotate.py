"""A rotation before another compressor and its inverse behind it, so that no element stands out.

A vector x [d] is multiplied by an orthonormal matrix that both ends know: random signs D, then the
Hadamard matrix H of a block of 2^k elements, 1 / sqrt(2^k) each. A length that is no power of two
has two overlapping blocks, its first and its last 2^k elements:

    R = [I  0; 0  H D'] [H D  0; 0  I],    2^k <= d < 2^(k+1),    x^ = R^T C(R x)

so that each element is spread over more than half of the others, whatever d is. (Blocks of 512 and
64 for d = 576 would leave an outlier among the last 64 to them alone; padding to 1024 would be
sent.)

H is applied as its k stages of sums and differences, not as a matrix product: so every rounding is
defined, all devices give the same bits, and one row of a batch gives the same bits as alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Hosted
from mpcomp.compressors.groups import Grouping
from mpcomp.core.context import TensorMeta
from mpcomp.core.randomness import generator_for, uniform
from mpcomp.core.spec import of_inner, shown
from mpcomp.core.wire import Payload

__all__ = ["Rotate", "rotated", "rotated_back"]

# Elements in a block, at the most: to spread further costs a pass each time it doubles.
_LARGEST_BLOCK = 4096
# Larger elements are clipped: sums over two blocks, one after the other, stay finite in fp32.
_LIMIT = torch.finfo(torch.float32).max / 2**18


@dataclass(frozen=True)
class Rotate(Hosted):
    """``inner`` on rotated vectors. Spec ``rotate+lloyd:3``, ``rotate+quant:4:scale=token``.

    Each row of the innermost dimension in memory (the hidden vector of a token, the channels of a
    channels-last pixel; a 1-d tensor is one row) is rotated by random signs and Hadamard matrices
    before ``inner`` and back behind it: x^ = R^T C(R x), R orthonormal, so ||x - x^|| is
    ||R x - C(R x)||. Rotated elements are of about the same size and nearly Gaussian: channels
    that are far larger than the others, which language models have, no longer set the step of all,
    and `LloydMax` has the distribution that it is made for.

    ``inner`` is given fp32 of the same shape, whatever the tensor's dtype: what sends values as
    they are should narrow them, as in ``rotate+topk:0.1+bf16``. What it selects is of rotated
    elements. Zeros of a ReLU do not stay zeros. It draws nothing for a message.

    * Source: QuaRot (Ashkboos et al., NeurIPS 2024) for activations; DRIVE (Vargaftik et al.,
      NeurIPS 2021) for gradients; TurboQuant (Zandieh et al., arXiv 2504.19874, 2025) with
      `LloydMax`.
    * Theory: that of ``inner``, contraction and unbiasedness alike, as R keeps norms and is linear.

    Args:
        inner: compressor of the rotated tensor.
        seed: of the signs, at least 0; the ends must be given equal ones.

    Magnitudes above 1.3e33 are clipped.

    Raises:
        TypeError: inner is no compressor.
        ValueError: inner compresses nothing, or a seed below 0.
    """

    inner: Compressor
    seed: int = 0
    spec: ClassVar[str] = "rotate"
    spec_inner: ClassVar[str | None] = "inner"

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise TypeError(
                f"inner={shown(self.inner)}: what is rotated goes to a compressor such as "
                "LloydMax(3) or Quantize(4, scale='token'); feedback goes round the whole: "
                "ef+rotate+lloyd:2"
            )
        if self.inner.sends_dense:
            raise ValueError(f"inner={self.inner}: rotating what is sent as it is gains nothing")
        if type(self.seed) is not int or self.seed < 0:
            raise ValueError(f"seed={self.seed!r}: a seed of signs is a whole number from 0")

    # A rotation changes no norm, and a mean or a sum may be rotated back.
    adaptable = of_inner("adaptable")
    at_cuts = of_inner("at_cuts")
    between_replicas = of_inner("between_replicas")
    is_unbiased = of_inner("is_unbiased")
    contractive = of_inner("contractive")
    summable = of_inner("summable")
    by_matrix = of_inner("by_matrix")
    multiplies = of_inner("multiplies")
    draws = of_inner("draws")
    shares_choice = of_inner("shares_choice")
    variable_length = of_inner("variable_length")
    on_host = of_inner("on_host")

    @property
    def unbiased(self) -> bool:
        """Whether the inner compressor scales what it decodes up, which feedback refuses."""
        return bool(getattr(self.inner, "unbiased", False))

    def with_cf(self, cf: float) -> Rotate:
        """The same rotation before the inner compressor at factor ``cf``."""
        return dataclasses.replace(self, inner=self.inner.with_cf(cf))

    def cf_ladder(self, lowest: float, highest: float) -> tuple[float, ...]:
        return self.inner.cf_ladder(lowest, highest)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return self.inner.layout(meta.with_dtype(torch.float32))

    def rotate(self, x: Tensor) -> Tensor:
        """The rotated ``x``, which ``inner`` is given: fp32 of its shape."""
        grouping = Grouping.of(TensorMeta.of(x), "token")
        return grouping.join(rotated(grouping.split(x), self.seed))

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return self.inner.compress(self.rotate(x), generator)

    def compress_against(
        self, x: Tensor, whole: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        return self.inner.compress_against(self.rotate(x), self.rotate(whole), generator)

    def round_trip(
        self,
        x: Tensor,
        whole: Tensor,
        meta: TensorMeta,
        draw: Callable[[], torch.Generator | None],
    ) -> tuple[Payload, Tensor]:
        wide = meta.with_dtype(torch.float32)
        rotated_x = self.rotate(x)
        rotated_whole = rotated_x if whole is x else self.rotate(whole)
        payload, y = self.inner.round_trip(rotated_x, rotated_whole, wide, draw)
        return payload, self._back(y, meta)

    def decompress_to(
        self,
        device: torch.device,
        payload: Payload,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        wide = meta.with_dtype(torch.float32)
        return self._back(self.inner.decompress_to(device, payload, wide, generator), meta)

    def _back(self, y: Tensor, meta: TensorMeta) -> Tensor:
        """The tensor like ``meta`` whose rotation is ``y``."""
        grouping = Grouping.of(meta, "token")
        vectors = rotated_back(grouping.split(y), self.seed)
        limit = min(torch.finfo(meta.dtype).max, torch.finfo(torch.float32).max)
        return grouping.join(vectors.clamp_(-limit, limit).to(meta.dtype))


def rotated(vectors: Tensor, seed: int) -> Tensor:
    """R x of each row x: fp32 [vectors, d] -> a new one of that shape.

    Args:
        vectors: fp32 [vectors, d]; magnitudes above 1.3e33 are clipped.
        seed: of the signs.
    """
    columns = _columns(vectors)
    for index, part in enumerate(_parts(columns)):
        part.mul_(_signs(len(part), seed, index, part.device))
        _hadamard_(part)
    return columns.t().contiguous()


def rotated_back(vectors: Tensor, seed: int) -> Tensor:
    """R^T y of each row y: the inverse of `rotated`, up to rounding."""
    columns = _columns(vectors)
    for index, part in reversed([*enumerate(_parts(columns))]):
        _hadamard_(part)
        part.mul_(_signs(len(part), seed, index, part.device))
    return columns.t().contiguous()


def _columns(vectors: Tensor) -> Tensor:
    """A copy [d, vectors]: stages then read and write long runs, however small their distance."""
    return vectors.t().clone(memory_format=torch.contiguous_format).clamp_(-_LIMIT, _LIMIT)


def _parts(columns: Tensor) -> list[Tensor]:
    """Views [block, n] of columns [d, vectors]: the first blocks, and one of the last elements.

    A d of several largest blocks has them interleaved, so that they are one matrix.
    """
    width = len(columns)
    if not columns.numel():
        return []
    block = min(_LARGEST_BLOCK, 1 << (width.bit_length() - 1))
    whole = width - width % block
    parts = [columns[:whole].view(block, -1)]
    if whole < width:
        parts.append(columns[width - block :])
    return parts


@functools.lru_cache(256)
def _signs(block: int, seed: int, part: int, device: torch.device) -> Tensor:
    """1 / sqrt(block) with random signs: fp32 [block, 1]."""
    drawn = uniform(generator_for("rotate", seed, block, part), block, torch.device("cpu"))
    size = torch.tensor(1 / math.sqrt(block), dtype=torch.float32)
    return torch.where(drawn < 0.5, -size, size).reshape(-1, 1).to(device)


def _hadamard_(columns: Tensor) -> None:
    """Multiplies the Hadamard matrix of ones and minus ones by contiguous [2^k, n], in place."""
    source, target = columns, torch.empty_like(columns)
    distance = 1
    while distance < len(columns):
        a, b = source.view(-1, 2, distance * columns.shape[1]).unbind(1)
        out = target.view(-1, 2, distance * columns.shape[1])
        torch.add(a, b, out=out[:, 0])
        torch.sub(a, b, out=out[:, 1])
        source, target = target, source
        distance *= 2
    if source is not columns:
        columns.copy_(source)
