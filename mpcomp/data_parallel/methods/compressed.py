"""From what a user gives for ``dp_comp`` to a method between replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpcomp.compressors import Compressor, Identity
from mpcomp.core.spec import SpecValue, parse, shown
from mpcomp.data_parallel.base import Controller, ReplicaMethod, RunInfo, Static
from mpcomp.feedback.base import Feedback
from mpcomp.feedback.memory import NO_MEMORY, Memory

__all__ = ["Compressed", "param_comp_of", "replica_method_of"]


@dataclass(frozen=True)
class Compressed(ReplicaMethod):
    """A compressor between replicas, alone or inside a feedback method.

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

    def controller(self, run: RunInfo) -> Controller:
        return Static(self._compressor)

    def memory(self, *, compressed: bool) -> Memory:
        return self.given if compressed and isinstance(self.given, Feedback) else NO_MEMORY


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
    if isinstance(value, Compressor):
        return Compressed(value)
    if isinstance(value, Feedback) and value.between_replicas:
        value.check_replicas()
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
    if isinstance(value, Compressor) and value.variable_length:
        raise ValueError(
            f"param_comp={value}: its messages are as long as their tensors make them, and ranks "
            "gather messages of equal lengths; use another compressor"
        )
    if not isinstance(value, Compressor | None):
        raise TypeError(
            f"param_comp={shown(value)}: expected a compressor such as Quantize(8, scale=128), as "
            "parameters are sent without a memory"
        )
    return value
