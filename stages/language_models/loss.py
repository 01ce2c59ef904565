"""The loss of a language model of transformers, compared with the next token's cross-entropy."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.language_models.decoder import FAMILIES
from stages.language_models.layout import unwrapped
from stages.language_models.line import evaluation

_IGNORED = -100


def check_own_loss(model: nn.Module) -> None:
    """Raise ValueError if a model's own loss is another than the next token's cross-entropy.

    Stages have the logits of the last alone, of a microbatch. A loss that balances experts is made
    of what all layers route, over all rows of the batch, and is no mean of its values elsewhere.
    Numbers are compared on a few tokens; of a model on "meta" the configuration is asked.
    """
    lm: Any = unwrapped(model)[1]
    parameters = inspect.signature(lm.forward).parameters
    if "labels" not in parameters:
        return
    config = lm.config.get_text_config(decoder=True)
    balances = "output_router_logits" in parameters and getattr(
        config, "output_router_logits", False
    )
    weights = next(lm.parameters())
    if weights.is_meta:
        numbers = "has a term beside the cross-entropy of the next token" if balances else ""
    elif lm.config.model_type in FAMILIES and "_loss_function" not in vars(lm):
        numbers = ""
    else:
        numbers = _difference(lm, weights.device)
    if not numbers:
        return
    terms = "; pass loss_fn=f, a function f(logits, labels) that computes it"
    if balances:
        terms = (
            ": output_router_logits=True adds how evenly all layers route all rows of the batch to "
            "experts, which no stage knows. Set model.config.output_router_logits = False to train "
            "without that term"
        )
    raise ValueError(
        f"the loss of {type(lm).__name__} {numbers}{terms}. The cross-entropy alone is "
        "loss_fn=mpcomp.CausalLMLoss()"
    )


def _difference(lm: Any, device: torch.device) -> str:
    """Both numbers, for a message, if a model's own loss is not the cross-entropy; else empty."""
    ids = torch.arange(1, 11, device=device).reshape(2, 5)
    labels = ids.clone()
    labels[0, :2] = _IGNORED
    with evaluation(lm):
        result = lm(input_ids=ids, labels=labels, use_cache=False)
    own, entropy = result.loss, _entropy(result.logits, labels)
    if torch.allclose(own.to(entropy), entropy, rtol=16 * torch.finfo(own.dtype).eps, atol=0):
        return ""
    return (
        f"is {float(own):.6g} for a few tokens, of which the cross-entropy of the next is "
        f"{float(entropy):.6g}"
    )


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=_IGNORED
    )
