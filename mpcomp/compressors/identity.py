"""No compression: the tensor's own bytes, and when to fall back on it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["Identity", "or_dense", "shrinks"]


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends every element as it is. Spec ``none``.

    * Source: this project's own, for what is not to be compressed.
    * Theory: x^ = x, so whatever is proved of the plain method.
    """

    spec: ClassVar[str] = "none"
    aliases: ClassVar[dict[str, dict[str, Any]]] = {"identity": {}}
    draws = False
    summable = True
    sends_dense = True

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return (TensorMeta((meta.num_rows, meta.row_numel), meta.dtype),)

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return (TensorMeta.of(x).flatten(x),)

    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        return meta.unflatten(payload[0])


def shrinks(compressor: Compressor, meta: TensorMeta) -> bool:
    """Whether a tensor like ``meta`` is sent by ``compressor``, and not as it is."""
    if compressor.sends_dense or compressor.variable_length:
        return True
    return compressor.wire_bytes(meta) < meta.dense_bytes


def or_dense(compressor: Compressor, meta: TensorMeta) -> Compressor:
    """``compressor``, or `Identity` where it would not make a tensor like ``meta`` smaller.

    Both ends decide alike, as the layout follows from ``meta``. (Of messages that vary in length it
    says only the most, which is not what is sent.) Says so once (Python's warning filter folds
    repeats).
    """
    if shrinks(compressor, meta):
        return compressor
    warnings.warn(
        f"{compressor} would not shrink {list(meta.shape)} {meta.dtype} tensors "
        f"({compressor.wire_bytes(meta)} of {meta.dense_bytes} bytes): sending them dense",
        stacklevel=2,
    )
    return Identity()
