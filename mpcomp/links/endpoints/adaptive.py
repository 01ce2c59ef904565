"""The endpoint of an adaptive method: that of the method whose ratio is chosen, and the choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpcomp.adaptive.budget import Budgeted
from mpcomp.adaptive.link_policy import LinkState, Searching
from mpcomp.adaptive.method import Adaptive
from mpcomp.core.context import MessageContext, TensorMeta, padded_positions, zero_padding
from mpcomp.feedback.memory import Side
from mpcomp.links.endpoints.base import Plan, WrappingEndpoint

__all__ = ["AdaptiveEndpoint"]


class AdaptiveEndpoint(WrappingEndpoint, of=Adaptive):
    """Another endpoint, whose method's ratio changes between steps.

    Args:
        method: of the link.

    Attributes:
        policy: chooser of the ratio.
    """

    method: Adaptive

    def __init__(self, method: Adaptive) -> None:
        super().__init__(method)
        self.policy: LinkState = (Searching if method.budget is None else Budgeted)(method)

    def plan(
        self, side: Side, meta: TensorMeta, context: MessageContext, device: torch.device
    ) -> Plan:
        policy = self.policy
        if policy.dense:
            plan = self.inner.plan(side, meta, context._replace(on=False), device)
            plan.context = context
            return plan
        self.inner.method = policy.coder
        plan = self.inner.plan(side, meta, context, device)
        if context.on and not plan.dense:
            plan.cf = policy.cf
        return plan

    def observe(self, x: Tensor, num_bytes: int, plan: Plan) -> None:
        context, policy = plan.context, self.policy
        if not (context.train and context.on):
            return
        if context.sampled and policy.measures_energies:
            padded = padded_positions(context.valid, plan.meta, x.device)
            target, against = self.inner.measured(zero_padding(x.detach(), padded), plan)
            policy.note_energies(target, against, padded, context.draw)
        policy.note_message(num_bytes, plan.meta)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "adaptive": self.policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], device: Mapping[str, torch.device]) -> None:
        self.inner.load_state_dict(
            {name: value for name, value in state.items() if name != "adaptive"}, device
        )
        if "adaptive" in state:
            self.policy.load_state_dict(state["adaptive"])
