"""Tensors between an accelerator and its host, through pinned memory.

What comes to the host is there when it is read, and is waited for once. What goes to an accelerator
nobody waits for. Torch keeps pinned memory that was let go of until copies of it have ended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["reached", "to_device", "to_host"]


def to_host(x: Tensor) -> Tensor:
    """The tensor in host memory, contiguous; one that is there already is given as it is."""
    if x.device.type == "cpu":
        return x
    host = _pinned_copy(x, non_blocking=True)
    reached(x.device).synchronize()
    return host


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, before all that this is given from now on."""
    if device.type == "cpu":
        return x
    pinned = x if x.is_pinned() else _pinned_copy(x)
    return pinned.to(device, non_blocking=True)


def _pinned_copy(x: Tensor, *, non_blocking: bool = False) -> Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=non_blocking)


def reached(device: torch.device) -> Any:
    """An event of an accelerator behind all that this thread has given it so far."""
    return torch.cuda.current_stream(device).record_event()
