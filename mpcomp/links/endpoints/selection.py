"""The endpoint of a selection: gradients are sent where their activations' messages said."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpcomp.compressors.base import Identity
from mpcomp.compressors.bits import nonzero
from mpcomp.compressors.same_indices import SameIndices
from mpcomp.compressors.threshold import count_set
from mpcomp.core.context import MessageContext, TensorMeta
from mpcomp.core.wire import Payload
from mpcomp.feedback.memory import Side
from mpcomp.links.endpoints.base import Endpoint, PlainPlan, Plan

__all__ = ["SelectionEndpoint"]


class SelectionEndpoint(Endpoint, of=SameIndices):
    """The selections of a step's activations, at the ends that are here.

    A gradient whose activation went as it is goes as it is, too.
    """

    follows = True
    method: SameIndices

    def __init__(self, method: SameIndices) -> None:
        super().__init__(method)
        self.asks_arrived = method.where == "nonzero"
        #: By the activation's end, step and microbatch; None of an activation that went dense.
        self._selections: dict[tuple[Side, int, int], Tensor | None] = {}

    def plan(
        self, side: Side, meta: TensorMeta, context: MessageContext, device: torch.device
    ) -> Plan:
        positions = None
        if context.on:  # a gradient's receiver is its activation's sender
            key = side.other, context.step, context.microbatch
            positions = self._selections.get(key)
        coder = Identity() if positions is None else self.method.at(positions)
        return PlainPlan(coder, meta, context, device)

    def crossed(
        self,
        side: Side,
        plan: Plan,
        payload: Payload,
        arrived: Callable[[], Tensor],
        context: MessageContext,
    ) -> None:
        if context.train:
            found = _nonzero(arrived()) if self.asks_arrived else plan.positions(payload)
            self._selections[side, context.step, context.microbatch] = found

    def commit(self) -> None:
        self._selections.clear()

    def discard(self, *, unused: bool = False) -> None:
        self._selections.clear()


def _nonzero(x: Tensor) -> Tensor:
    """Ascending int64 positions, in memory order, of what is not zero."""
    flat = TensorMeta.of(x).flatten(x).reshape(-1)
    mask = flat != 0
    return nonzero(mask, count_set(mask))
