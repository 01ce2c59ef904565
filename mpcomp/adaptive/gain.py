"""The gain of a compression ratio, as energies that are summed up over ranks.

A gain is 1 - rest / base. Sums of both over replicas, then the quotient, so that a replica whose
gradient is small does not count as much as one whose gradient is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpcomp.compressors.base import Compressor, shrinks
from mpcomp.core.context import TensorMeta, zero_padding

__all__ = ["base_energy", "gain_of", "rest_energy"]


def base_energy(x: Tensor, padded: Tensor | None, *, centred: bool) -> Tensor:
    """The energy that rests are compared with: ||x||^2, or ||x - mean||^2; fp64, 0-d.

    Args:
        x: zero where it is padded.
        padded: of `mpcomp.core.context.padded_positions`.
        centred: less the mean of each channel: dim 1 of [b, c, h, w], else the last.
    """
    x = x.detach().double()
    if not centred:
        return x.square().sum()
    if padded is not None:
        x = x.reshape(*padded.shape[:2], -1)[~padded[:, :, 0]]  # [positions that count, features]
    channels = 1 if x.dim() == 4 else max(0, x.dim() - 1)
    over = [dim for dim in range(x.dim()) if dim != channels]
    if not over:
        return (x - x.mean()).square().sum()
    return (x - x.mean(dim=over, keepdim=True)).square().sum()


def rest_energy(
    compressor: Compressor,
    x: Tensor,
    padded: Tensor | None,
    draw: Callable[[str], torch.Generator],
) -> Tensor:
    """||x - C(x)||^2, fp64, 0-d; 0 where the compressor would not shrink such a tensor.

    Args:
        compressor: C.
        x: zero where it is padded, as what arrives is.
        padded: of `mpcomp.core.context.padded_positions`.
        draw: a fresh generator for a part of the message.
    """
    meta = TensorMeta.of(x)
    if not shrinks(compressor, meta):
        return torch.zeros((), dtype=torch.float64, device=x.device)
    payload = compressor.compress(x, draw(""))
    arrived = zero_padding(compressor.decompress(payload, meta, draw("")), padded)
    return (x.detach().double() - arrived.double()).square().sum()


def gain_of(base: float, rests: Sequence[float], *, clamped: bool = True) -> list[float] | None:
    """Gains; None where they are not known: nothing was measured, or all zero.

    Args:
        base: what rests are compared with.
        rests: what each ratio leaves out.
        clamped: to 0 and 1. Centred, what is left out may be more than there is (a mean is dropped
            too), a negative gain.
    """
    if not (base > 0 and all(map(math.isfinite, (base, *rests)))):
        return None
    gains = [1.0 - rest / base for rest in rests]
    return [min(1.0, max(0.0, gain)) for gain in gains] if clamped else gains
