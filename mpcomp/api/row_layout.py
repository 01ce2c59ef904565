"""Layers whose dim 0 is time, in a model that a pipeline cuts along dim 0."""

from __future__ import annotations

import warnings

from torch import nn

__all__ = ["warn_of_sequence_first"]


def warn_of_sequence_first(model: nn.Module) -> None:
    """Warns if the model has a recurrent or attention layer that takes sequences first.

    It is torch's default, ``batch_first=False``. Such a model is right if it transposes before the
    layer, which nobody can tell from outside, and so this is no error.

    Args:
        model: to be cut.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
    }
    if not found:
        return
    name, module = next(iter(found.items()))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    warnings.warn(
        f"{name or 'the model'} ({type(module).__name__}){more} has batch_first=False: its dim 0 "
        "is time, and microbatches are cut along dim 0, whose entries must be samples. Pass "
        "batch_first=True and batches [rows, time, features]. If the model transposes before "
        "this layer, and takes rows first itself, all is well",
        stacklevel=4,
    )
