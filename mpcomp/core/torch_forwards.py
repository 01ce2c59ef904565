"""Forwards that a stage of `torch.distributed.pipelining` keeps for its backward, by version.

Before torch 2.15 it is a pair, outputs and inputs; from then on torch has a class for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

__all__ = ["drop_forward", "forward_of", "keep_forward"]

_HAS_CLASS: Final = hasattr(PipelineStage, "_make_forward_chunk_state")


def keep_forward(
    stage: Any, microbatch: int, outputs: tuple[Tensor, ...], inputs: list[Tensor]
) -> None:
    """Keeps the outputs and inputs of a microbatch, as torch's own forward does."""
    kept: Any = outputs, inputs
    if _HAS_CLASS:
        kept = stage._make_forward_chunk_state(*kept)
    _forwards(stage)[microbatch] = kept


def forward_of(stage: Any, microbatch: int) -> tuple[Sequence[Tensor], list[Tensor]]:
    """The outputs and inputs of a microbatch that has run forward."""
    kept = _forwards(stage)[microbatch]
    outputs, inputs = (kept.live_outputs, kept.input_values) if _HAS_CLASS else kept
    return outputs, inputs


def drop_forward(stage: Any, microbatch: int) -> None:
    """Lets go of a microbatch whose backward is left out."""
    del _forwards(stage)[microbatch]


def _forwards(stage: Any) -> dict[int, Any]:
    forwards: dict[int, Any] = stage._forward_chunk_states if _HAS_CLASS else stage.fwd_cache
    return forwards
