"""Buffers that no file has: what a language model on "meta" computes from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def fill_buffers(lm: nn.Module) -> None:
    """Give values to the buffers of `lm` that are on "meta" and not in its state_dict.

    Rotary embeddings have such. transformers computes them where it initialises weights, which
    changes nothing in weights on "meta". What it does not compute there stays on "meta".
    """
    for module in lm.modules():
        names = [
            name
            for name in module._non_persistent_buffers_set
            if (buffer := module._buffers.get(name)) is not None and buffer.is_meta
        ]
        if names and all(parameter.is_meta for parameter in module.parameters()):
            # Twice on different ground: what has been written is equal, what has not is not.
            zero, one = (_initialised(lm, module, names, ground) for ground in (0, 1))
            for name in names:
                if torch.equal(zero[name], one[name]):
                    module._buffers[name] = one[name]


def _initialised(
    lm: Any, module: nn.Module, names: Sequence[str], ground: int
) -> dict[str, Tensor]:
    """The buffers of these names as transformers initialises them, on the CPU."""
    buffers: dict[str, Any] = module._buffers
    before = {name: buffers[name] for name in names}
    for name, buffer in before.items():
        buffers[name] = torch.full_like(buffer, ground, device="cpu")
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            lm._init_weights(module)
        return {name: buffers[name] for name in names}
    finally:
        buffers.update(before)
