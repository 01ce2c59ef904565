"""From what a user gives for ``dp_comp`` to a method between replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mpcomp.compressors import Compressor, Identity
from mpcomp.core.spec import SpecValue, parse, shown
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.data_parallel.base import Controller, ReplicaMethod, Setting, Static
from mpcomp.data_parallel.contracted import Contracted
from mpcomp.data_parallel.memory import Estimate, Memory, Residual
from mpcomp.feedback import EF21, ConEF, ErrorFeedback, Feedback
from mpcomp.feedback.slots import StoragePlan

__all__ = ["Compressed", "param_comp_of", "replica_method_of"]


@dataclass(frozen=True)
class Compressed(ReplicaMethod):
    """A compressor between replicas, alone or inside `ErrorFeedback`, `EF21` or `ConEF`.

    Args:
        given: what the user gave.
    """

    given: Compressor | Feedback

    def __str__(self) -> str:
        return str(self.given)

    @property
    def lr_scaled(self) -> bool:  # type: ignore[override]
        return isinstance(self.given, Feedback) and self.given.lr_scaled

    @property
    def _compressor(self) -> Compressor:
        return self.given.inner if isinstance(self.given, Feedback) else self.given

    def controller(self, setting: Setting) -> Controller:
        return Static(self._compressor)

    def memory(self, meta: TensorMeta, device: torch.device, *, compressed: bool) -> Memory:
        if not compressed or isinstance(self.given, Compressor):
            return Memory()
        if isinstance(self.given, ConEF):
            return Contracted(self.given, meta, device)
        return (Estimate if isinstance(self.given, EF21) else Residual)(
            meta.numel, self._plan, device
        )

    def phase_memory(self, numel: int, device: torch.device) -> Memory:
        # Also with EF21: a mean is formed of messages, and forgets nothing that it has not sent.
        if isinstance(self.given, Compressor):
            return Memory()
        if isinstance(self.given, ConEF):
            return Contracted(self.given, TensorMeta((1, numel)), device)
        return Residual(numel, self._plan, device)

    @property
    def _plan(self) -> StoragePlan:
        assert isinstance(self.given, ErrorFeedback | EF21 | ConEF)
        return StoragePlan(self.given.storage, self.given.location)


def replica_method_of(value: Any) -> ReplicaMethod:
    """The method that ``dp_comp`` names.

    Args:
        value: a method between replicas, a compressor, `ErrorFeedback`, `EF21` or `ConEF` round
            one, a spec string, or None for none.

    Raises:
        ValueError: an unknown spec, or a method that has no place between replicas.
        TypeError: something else.
    """
    if value is None:
        value = Identity()
    if isinstance(value, str):
        value = parse(value)
    if isinstance(value, ReplicaMethod):
        return value
    if isinstance(value, EF21) and value.first is not None:
        raise ValueError(
            f"dp_comp={value}: between replicas estimates begin at zero, so there is no first "
            "message to compress in another way; leave first out"
        )
    if isinstance(value, Compressor) or type(value) in (ErrorFeedback, EF21, ConEF):
        return Compressed(value)
    if isinstance(value, SpecValue):
        raise ValueError(
            f"dp_comp={value}: it belongs at a cut, as its state is that of samples or its "
            "selection that of activations; between replicas use a compressor, ef+..., ef21+..., "
            "conef+... or a method such as gravac+topk:0.1"
        )
    raise TypeError(
        f"dp_comp={shown(value)}: expected a compressor such as TopK(0.01), a method such as "
        "GraVAC(TopK(0.1)), a spec string such as 'ef+topk:0.01', or None"
    )


def param_comp_of(value: Any) -> Compressor | None:
    """The compressor that ``param_comp`` names; None for none.

    Raises:
        ValueError: an unknown spec.
        TypeError: no compressor.
    """
    if isinstance(value, str):
        value = parse(value)
    if not isinstance(value, Compressor | None):
        raise TypeError(
            f"param_comp={shown(value)}: expected a compressor such as Quantize(8, scale=128), as "
            "parameters are sent without a memory"
        )
    return value
