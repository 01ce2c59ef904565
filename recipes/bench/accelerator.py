"""A stand-in for a model on an accelerator: it takes its time, and leaves the processor free.

Hosts that share the cores of one machine get in each other's way as hosts do not that have an
accelerator each: there a processor only codes and moves messages. A bench that is about links lets
such blocks, and a head whose arithmetic is no small part, compute next to nothing and wait for as
long as an accelerator would take.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcomp.plan.profile import BACKWARD_OVER_FORWARD

__all__ = ["WaitingBlock", "WaitingHead", "loss_of_mixtures"]

#: Of the tokens of a sequence, for which a head that waits computes logits.
MIXTURES: Final = 8


class WaitingBlock(nn.Module):
    """A block that mixes the features of a token, and waits.

    Args:
        width: features.
        forward_s: of a forward; a backward takes `BACKWARD_OVER_FORWARD` times that.
    """

    def __init__(self, width: int, forward_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        mixed = x + self.mix(self.norm(x))
        waited: Tensor = _Wait.apply(mixed, self.forward_s)  # type: ignore[no-untyped-call]
        return waited


class WaitingHead(nn.Module):
    """A head that gives logits of a few mixtures of a sequence's tokens, and waits.

    So the gradients of its weight and of every token are dense, for a small part of the arithmetic.

    Args:
        width: features.
        vocab: logits.
        context: tokens of a sequence.
        forward_s: of a forward; a backward takes `BACKWARD_OVER_FORWARD` times that.
    """

    mixing: Tensor

    def __init__(self, width: int, vocab: int, context: int, forward_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.norm = nn.LayerNorm(width)
        self.to_logits = nn.Linear(width, vocab)
        self.register_buffer("mixing", torch.randn(MIXTURES, context) / context**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, context, width] -> [batch, MIXTURES, vocab]."""
        logits: Tensor = self.to_logits(self.mixing @ self.norm(x))
        waited: Tensor = _Wait.apply(logits, self.forward_s)  # type: ignore[no-untyped-call]
        return waited


def loss_of_mixtures(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `WaitingHead`'s logits, to the last targets of each sequence."""
    return F.cross_entropy(logits.flatten(0, 1), targets[:, -MIXTURES:].flatten())


class _Wait(torch.autograd.Function):
    """The identity, after so many seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float) -> Tensor:
        ctx.backward_s = BACKWARD_OVER_FORWARD * forward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_s)
        return grad, None
