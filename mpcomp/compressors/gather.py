"""Sending the elements at known positions: what every selecting compressor has in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, Selecting, put_at
from mpcomp.compressors.identity import Identity
from mpcomp.compressors.indices import decode_indices, encode_indices, index_bytes
from mpcomp.core.spec import shown
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.transfer import to_device
from mpcomp.core.wire import Payload

__all__ = ["SentPositions", "ValuesAt", "check_values"]


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
