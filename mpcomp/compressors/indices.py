"""Values and their positions: all that a selection sends.

Which ones are ``k`` ascending positions below ``n``, in the smallest of three codes. All sizes
follow from ``n`` and ``k``, so both ends choose alike and buffers are posted without data:

=============  =======================================  =========================
code           bits                                     best for
=============  =======================================  =========================
bitmask        n                                        k above about n / 4
Elias-Fano     k (2 + log2(n / k)) at the most          nearly everything else
integers       k log2 n                                 a handful of positions
=============  =======================================  =========================

Elias-Fano (Elias 1974, Fano 1971): the low ``l = floor(log2(n / k))`` bits of each position
are stored as they are; the high parts, which ascend, as a bit string in which position number
``i`` sets bit ``high_i + i``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpcomp.compressors import bits
from mpcomp.compressors.base import Compressor, Identity, Selecting, put_at
from mpcomp.core.kernels import kernel
from mpcomp.core.spec import shown
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.transfer import to_device
from mpcomp.core.wire import Payload

__all__ = [
    "SentPositions",
    "ValuesAt",
    "check_values",
    "decode_indices",
    "encode_indices",
    "index_bytes",
    "nonzero",
]


def _low_width(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1)


def _upper_bits(n: int, k: int) -> int:
    return k + ((n - 1) >> _low_width(n, k)) + 1


def _sizes(n: int, k: int) -> dict[str, int]:
    """Bytes of each code. The order settles ties."""
    return {
        "bitmask": bits.packed_bytes(n, 1),
        "elias-fano": bits.packed_bytes(k, _low_width(n, k))
        + bits.packed_bytes(_upper_bits(n, k), 1),
        "integers": bits.packed_bytes(k, (n - 1).bit_length()),
    }


@functools.lru_cache(4096)
def _cheapest(n: int, k: int) -> str:
    sizes = _sizes(n, k)
    return min(sizes, key=sizes.__getitem__)


@functools.lru_cache(4096)
def index_bytes(n: int, k: int) -> int:
    """Bytes of ``k`` positions below ``n``; zero if all or none are kept."""
    return 0 if k in (0, n) else min(_sizes(n, k).values())


@kernel
def nonzero(mask: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` set elements of a flat bool tensor, ascending; int64 [count]."""
    # With the count known, an accelerator need not be waited for.
    return torch.nonzero_static(mask, size=count).squeeze(1)


@nonzero.on("cpu")
def _nonzero_on_cpu(mask: Tensor, count: int) -> Tensor:
    # numpy's scan is twice as fast as torch's here
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def encode_indices(positions: Tensor, n: int) -> Tensor:
    """Ascending int64 positions [k] below ``n`` -> uint8 [index_bytes(n, k)]."""
    k = positions.numel()
    if k in (0, n):
        return torch.empty(0, dtype=torch.uint8, device=positions.device)
    code = _cheapest(n, k)
    if code == "integers":
        return bits.pack(positions.reshape(1, -1), (n - 1).bit_length())[0]
    if code == "bitmask":
        return bits.pack_bools(_mask(positions, n))
    low = _low_width(n, k)
    upper = (positions >> low) + torch.arange(k, device=positions.device)
    return torch.cat(
        [
            bits.pack(positions.reshape(1, -1), low)[0],
            bits.pack_bools(_mask(upper, _upper_bits(n, k))),
        ]
    )


def decode_indices(code: Tensor, n: int, k: int) -> Tensor:
    """Inverse of `encode_indices`: int64 [k], ascending.

    Raises:
        ValueError: no such code; on the CPU, as an accelerator is not waited for. There what comes
            of a damaged one are other positions below ``n``.
    """
    if k in (0, n):
        return torch.arange(k, device=code.device)
    positions = _decoded(code, n, k)
    if positions.device.type != "cpu":
        return positions.clamp_(0, n - 1)
    found = positions.numpy()  # several times as fast as torch where positions are few
    if not (found[1:] > found[:-1]).all() or not 0 <= found[0] <= found[-1] < n:
        raise _damaged(n, k)
    return positions


def _decoded(code: Tensor, n: int, k: int) -> Tensor:
    """Positions that a code says, int64 [k]; of a damaged one any numbers."""
    kind = _cheapest(n, k)
    if kind == "integers":
        return bits.unpack(code.reshape(1, -1), (n - 1).bit_length(), k)[0].to(torch.int64)
    if kind == "bitmask":
        return _set(bits.unpack_bools(code, n), n, k)
    low = _low_width(n, k)
    split = bits.packed_bytes(k, low)
    upper = _set(bits.unpack_bools(code[split:], _upper_bits(n, k)), n, k)
    high = upper - torch.arange(k, device=code.device)
    lows = bits.unpack(code[:split].reshape(1, -1), low, k)[0]
    return (high << low) | lows.to(torch.int64)


def _set(mask: Tensor, n: int, k: int) -> Tensor:
    positions = nonzero(mask, k)
    if positions.numel() != k:
        raise _damaged(n, k)
    return positions


def _damaged(n: int, k: int) -> ValueError:
    return ValueError(
        f"a code that is not of {k} ascending positions below {n}: it is damaged, or the two ends "
        "have different methods"
    )


def _mask(positions: Tensor, n: int) -> Tensor:
    mask = torch.zeros(n, dtype=torch.bool, device=positions.device)
    return mask.index_fill_(0, positions, True)


# -- values at positions ---------------------------------------------------------------------------


def check_values(values: Compressor | None, *, last: bool = False) -> None:
    """Raises unless ``values`` may code the values of a selection.

    Args:
        values: their compressor; None sends them as they are.
        last: whether nothing follows them in the message, so that they may vary in length.
    """
    if values is None:
        return
    if not isinstance(values, Compressor):
        raise TypeError(
            f"values={shown(values)}: the values of a selection take a compressor such as "
            "Cast('fp16') or Quantize(8); feedback goes round the whole: ef21+topk:0.1+quant:8"
        )
    if isinstance(values, Selecting):
        raise ValueError(
            f"values={values}: the values of a selection cannot be selected again; lower keep"
        )
    if values.variable_length and not last:
        raise ValueError(
            f"values={values}: indices follow the values of a selection, so these cannot vary in "
            "length; use it alone"
        )


@dataclass(frozen=True)
class ValuesAt:
    """The elements at given positions of a tensor, optionally compressed themselves.

    Attributes:
        num_rows: number of rows of equal length in which the values are coded, so that a value
            compressor with a scale per sample has samples to go by.
        count: number of values in all.
        values: compressor of the values; None sends them as they are.
    """

    num_rows: int
    count: int
    values: Compressor | None

    def _meta(self, dtype: torch.dtype) -> TensorMeta:
        return TensorMeta((self.num_rows, self.count // max(1, self.num_rows)), dtype)

    def layout(self, dtype: torch.dtype) -> tuple[TensorMeta, ...]:
        """Wire tensors for values of ``dtype``."""
        return (Identity() if self.values is None else self.values).layout(self._meta(dtype))

    def take(
        self, x: Tensor, positions: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        """The payload of the elements of ``x`` at ``positions`` (memory order)."""
        flat = TensorMeta.of(x).flatten(x).reshape(-1)
        chosen = flat.index_select(0, positions).reshape(self._meta(x.dtype).shape)
        if self.values is None:
            return (chosen,)
        payload = self.values.compress(chosen, generator)
        if self.values.on_host:
            payload = tuple(to_device(part, x.device) for part in payload)
        return payload

    def put(
        self,
        payload: Payload,
        positions: Tensor,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A tensor like ``meta`` that holds the payload's values and zeros elsewhere."""
        return put_at(positions, self.decode(payload, meta.dtype, generator), meta)

    def decode(
        self, payload: Payload, dtype: torch.dtype, generator: torch.Generator | None = None
    ) -> Tensor:
        """The payload's values [count] in ``dtype``."""
        if self.values is None:
            return payload[0].reshape(-1)
        return self.values.decompress(payload, self._meta(dtype), generator).reshape(-1)


class SentPositions(Selecting):
    """A selection whose positions travel behind its values: (*values, indices)."""

    def _values(self, meta: TensorMeta) -> ValuesAt:
        """The coding of the values of a tensor like ``meta``: here, one scope."""
        return ValuesAt(1, self.num_kept(meta.numel), self.values)

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        values = self._values(meta)
        indices = TensorMeta((index_bytes(meta.numel, values.count),), torch.uint8)
        return (*values.layout(meta.dtype), indices)

    def take(
        self, x: Tensor, positions: Tensor, generator: torch.Generator | None = None
    ) -> Payload:
        meta = TensorMeta.of(x)
        payload = self._values(meta).take(x, positions, generator)
        return (*payload, encode_indices(positions, meta.numel))

    def indices(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        return decode_indices(payload[-1], meta.numel, self._values(meta).count)

    def decoded(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        return self._values(meta).decode(payload[:-1], meta.dtype, generator)
