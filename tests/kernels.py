"""Kernels as they run on devices that have no implementation of their own."""

from __future__ import annotations

import pytest

import mpcomp.compressors.rounding
import mpcomp.compressors.rows
import mpcomp.compressors.threshold  # noqa: F401
from mpcomp.core.kernels import KERNELS


def run_anywhere(patch: pytest.MonkeyPatch) -> None:
    """Has every kernel run by operations of torch, as on a device that is not in the table."""
    for each in KERNELS.values():
        patch.setattr(each, "by_device", {})
