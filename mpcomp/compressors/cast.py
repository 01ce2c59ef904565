"""Sending the elements in a narrower floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["Cast"]

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Cast(Compressor):
    """Rounds to nearest in a narrower type. Specs ``bf16``, ``fp16``, ``fp8`` (e4m3), ``fp8_e5m2``.

    Finite values beyond the type's range become its largest finite value rather than inf or NaN.

    * Source: IEEE 754 (fp16); Micikevicius et al., "FP8 formats for deep learning", 2022.
    * Theory: a contraction, biased. The error of an element is at most 2^-11 of it in fp16, 2^-8 in
      bf16, 2^-4 in fp8_e4m3 and 2^-3 in fp8_e5m2 within the normal numbers, and never more than the
      element.

    Args:
        dtype: one of fp32, bf16, fp16, fp8_e4m3, fp8_e5m2.

    Raises:
        ValueError: another dtype.
    """

    dtype: str
    spec: ClassVar[str] = "cast"
    draws = False
    aliases: ClassVar[dict[str, dict[str, Any]]] = {
        **{name: {"dtype": name} for name in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")},
        "fp8": {"dtype": "fp8_e4m3"},
    }

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: Cast knows {', '.join(_DTYPES)}")

    @property
    def wire_dtype(self) -> torch.dtype:  # type: ignore[override]
        """The torch dtype on the wire."""
        return _DTYPES[self.dtype]

    @property
    def summable(self) -> bool:  # type: ignore[override]
        """8-bit floats have no arithmetic to add them with."""
        return self.wire_dtype.itemsize > 1

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return (TensorMeta((meta.num_rows, meta.row_numel), self.wire_dtype),)

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        flat = TensorMeta.of(x).flatten(x)
        limit = torch.finfo(self.wire_dtype).max
        if torch.finfo(x.dtype).max > limit:
            # In fp32, as bf16 cannot represent fp16's limit. clamp passes NaN on.
            flat = flat.to(torch.float32).clamp(-limit, limit)
        return (flat.to(self.wire_dtype),)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        x = payload[0]
        limit = torch.finfo(meta.dtype).max
        if torch.finfo(self.wire_dtype).max > limit:  # bf16 rounds fp16's largest to beyond it
            x = x.to(torch.float32).clamp(-limit, limit)
        return meta.unflatten(x.to(meta.dtype))
