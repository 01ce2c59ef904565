"""A pipeline's replicas: all stages of a rank exchange their gradients once, after backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from mpcomp.core.step import Step
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.replicas import check_unchanged, described

__all__ = ["GROUP_BYTES", "CompressedAverage"]

#: Gradients are exchanged in groups of about so many bytes, one on its way while the next is
#: encoded.
GROUP_BYTES = 25_000_000


class CompressedAverage:
    """Replaces the gradients of a rank's stages by what a method makes of all replicas' ones.

    It runs when all microbatches are done, and so under every schedule alike; there is no reducer
    of DDP that would have to notice a backward that was split.

    Args:
        stages: of this rank.
        exchange: of their parameters.
        tied: names of parameters that another rank may have a copy of. Each goes by itself, so that
            no figure of it depends on what else a rank has.

    Attributes:
        exchange: as given.
        enabled: whether steps are exchanged, or gradients added up for a later one.
    """

    def __init__(
        self, stages: Sequence[nn.Module], exchange: Exchange, tied: Collection[str] = ()
    ) -> None:
        self._stages = list(stages)
        self._known = [described(stage) for stage in stages]
        self._tied = frozenset(tied)
        self.exchange = exchange
        self.enabled = True

    def __call__(self, step: Step) -> None:
        """Exchanges the gradients of a step.

        Raises:
            ValueError: parameters are not those that were connected.
        """
        if not self.enabled:
            return
        for stage, known in zip(self._stages, self._known, strict=True):
            check_unchanged(stage, known)
        exchange = self.exchange
        exchange.begin(loss_scale=step.loss_scale, lr=step.lr, compress=step.compress_dp)
        group: dict[str, Any] = {}
        num_bytes = 0
        for name, parameter in self._trained():
            if parameter.grad is None:  # it may have one on other replicas
                parameter.grad = torch.zeros_like(parameter)
            if name in self._tied:
                exchange.add({name: parameter.grad})
                continue
            group[name] = parameter.grad
            num_bytes += parameter.grad.nbytes
            if num_bytes >= GROUP_BYTES:
                exchange.add(group)
                group, num_bytes = {}, 0
        exchange.add(group)
        exchange.finish()

    def check_begin(self, step: Step) -> None:
        """Raises ValueError, on all ranks alike, if the step cannot be exchanged."""
        if self.enabled:
            self.exchange.check_lr(step.lr)

    def check_finite(self, step: Step) -> None:
        """Raises FloatingPointError on all ranks for NaN or Inf; see `Exchange.check_finite`."""
        if self.enabled:
            self.exchange.check_finite(step.index, scaled=step.scaled)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for stage in self._stages
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        ]
