"""The clock of what is measured, on accelerators too."""

from __future__ import annotations

import time

import torch


def now() -> float:
    """Seconds of a clock, read when the accelerator has done all it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
