"""Messages that nobody codes, as long as another method's: wire and computing alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import mpcomp
from mpcomp import Compressor
from mpcomp.core.context import TensorMeta
from mpcomp.core.wire import Payload

__all__ = ["Uncoded", "message_lengths"]


@dataclass(frozen=True, eq=False)
class Uncoded(Compressor):
    """Sends as many zeros as another method would send bytes; ones arrive.

    Args:
        direction: of the link, "act" or "grad".
        lengths: bytes of this rank's messages by direction, which may change from step to step.
    """

    variable_length: ClassVar[bool] = True  # type: ignore[misc]
    on_host: ClassVar[bool] = True  # type: ignore[misc]
    draws: ClassVar[bool] = False  # type: ignore[misc]

    direction: str
    lengths: Counter[str]

    def __str__(self) -> str:
        return "uncoded"

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return (TensorMeta((meta.dense_bytes,), torch.uint8),)

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        return (torch.zeros(self.lengths[self.direction], dtype=torch.uint8),)

    def decompress(
        self,
        payload: Payload,
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return torch.ones(meta.shape, dtype=meta.dtype)


def message_lengths(pipe: mpcomp.Pipeline) -> Counter[str]:
    """Bytes that this rank has sent so far over cuts, by direction."""
    sent: Counter[str] = Counter()
    for boundary in pipe.boundaries:
        for link in boundary.links:
            sent[link.direction] += round(link.meter.train.sent.wire_bytes)
    return sent
