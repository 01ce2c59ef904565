"""An outline of a batch: what ranks without data are told of it, in a few bytes a microbatch.

    first rank    batch ──> its stages ──> cut ──> ...        and an outline ──> the others
    the others    sizes, shapes at the cuts, and what their stages take beside the activation

That are a language model's masks and positions, and sample ids. They are sent as differences along
their rows, which zlib makes next to nothing of.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import stages as staging
from mpcomp.core.context import WHOLE_NUMBERS, TensorMeta
from mpcomp.core.microbatch import scatter

__all__ = ["Outline", "Told"]

_HEAD: Final = struct.Struct("<I")
#: The name among the tensors that sample ids have.
_IDS: Final = "sample_ids"


class Told(dict[str, Any]):
    """A microbatch as a rank without data knows it: what its stages take beside the activation.

    Attributes:
        metas: what crosses each cut.
    """

    def __init__(self, beside: Mapping[str, Any], metas: Sequence[TensorMeta]) -> None:
        super().__init__(beside)
        self.metas = list(metas)


@dataclass(frozen=True)
class Outline:
    """A batch as ranks without data are told of it.

    Attributes:
        sizes: rows of each microbatch.
        metas: of each microbatch what crosses each cut.
        beside: what later stages take from the batch beside the activation.
        sample_ids: as `mpcomp.Pipeline.forward_backward` takes them.
    """

    sizes: Sequence[int]
    metas: Sequence[Sequence[TensorMeta]]
    beside: Mapping[str, Any]
    sample_ids: Any = None

    @classmethod
    def of(
        cls,
        batch: Any,
        sizes: Sequence[int],
        metas: Sequence[Sequence[TensorMeta]],
        stages: Sequence[staging.Stage],
        sample_ids: Any = None,
    ) -> Outline:
        """The outline of a batch.

        Args:
            batch: what the first stage is called with.
            sizes: as the attribute, as are ``metas`` and ``sample_ids``.
            stages: those of the ranks that are to be told.
        """
        taken = {name: value for stage in stages for name, value in stage.takes(batch).items()}
        beside = {n: v for n, v in taken.items() if not isinstance(v, staging.StageState)}
        return cls(sizes, metas, beside, sample_ids)

    def microbatches(self, **states: Any) -> list[Told]:
        """The microbatches, each with ``states`` that this rank's stages keep from call to call."""
        parts = scatter(self.beside, self.sizes) if self.beside else [{} for _ in self.sizes]
        return [
            Told({**part, **states}, metas) for part, metas in zip(parts, self.metas, strict=True)
        ]

    def to_bytes(self) -> bytes:
        """All of it; never empty."""
        values = dict(self.beside)
        if self.sample_ids is not None:
            values[_IDS] = torch.as_tensor(self.sample_ids)
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        head = {
            "rows": list(self.sizes),
            "cuts": [[_described(meta) for meta in metas] for metas in self.metas],
            "tensors": {n: [list(x.shape), _name(x.dtype)] for n, x in tensors.items()},
            "values": {name: value for name, value in values.items() if name not in tensors},
        }
        text = json.dumps(head, separators=(",", ":")).encode()
        packed = [_packed(x) for x in tensors.values()]
        return zlib.compress(b"".join([_HEAD.pack(len(text)), text, *packed]))

    @classmethod
    def from_bytes(cls, message: bytes) -> Outline:
        """The inverse of `to_bytes`."""
        raw = zlib.decompress(message)
        (length,) = _HEAD.unpack_from(raw)
        at = _HEAD.size + length
        head = json.loads(raw[_HEAD.size : at])
        values = head["values"]
        for name, (shape, dtype) in head["tensors"].items():
            end = at + math.prod(shape) * _dtype(dtype).itemsize
            values[name] = _unpacked(raw[at:end], shape, _dtype(dtype))
            at = end
        metas = [
            [TensorMeta(tuple(shape), _dtype(dtype), last) for shape, dtype, last in cuts]
            for cuts in head["cuts"]
        ]
        ids = values.pop(_IDS, None)
        return cls(head["rows"], metas, values, ids)


def _described(meta: TensorMeta) -> list[Any]:
    return [list(meta.shape), _name(meta.dtype), meta.channels_last]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RuntimeError(f"the outline of a batch names {name!r:.40}: no dtype")
    return dtype


def _packed(x: Tensor) -> bytes:
    bits = x.detach().cpu().contiguous().view(WHOLE_NUMBERS[x.dtype.itemsize]).numpy()
    if bits.ndim:
        bits = np.diff(bits, axis=-1, prepend=bits.dtype.type(0))  # with overflow, as its inverse
    return bits.tobytes()


def _unpacked(raw: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    kind = torch.empty(0, dtype=WHOLE_NUMBERS[dtype.itemsize]).numpy().dtype
    bits = np.frombuffer(raw, kind).reshape(shape)
    whole = np.cumsum(bits, axis=-1, dtype=kind) if bits.ndim else bits.copy()
    return torch.from_numpy(whole).view(dtype)
