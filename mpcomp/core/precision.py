"""The precision that a device computes in."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["PRECISIONS", "compute_dtype"]

PRECISIONS: Final = ("auto", "fp32", "bf16", "fp16")


def compute_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast; None for plain fp32. `auto`: bf16 where the device computes in it."""
    if precision == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            # Processors without these instructions emulate bf16, which is slower than fp32.
            features = torch.cpu.get_capabilities()
            fast = bool(features.get("amx_tile") or features.get("avx512_bf16"))
        precision = "bf16" if fast else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
