"""Checks of a language model's batch, before anything runs, on every rank alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stages.hints import listing
from stages.stage import StageState

#: What a batch may hold for the model; labels are for the loss.
INPUTS = ("input_ids", "attention_mask", "position_ids")
_WHOLE = (torch.int64, torch.int32)


def check_tokens(lm: nn.Module, batch: object) -> None:
    """Raise ValueError for a batch that `lm`, a model of transformers, cannot take."""
    whole: Any = lm.config
    config: Any = whole.get_text_config(decoder=True)
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in _WHOLE:
        raise ValueError(
            f"input_ids is {_described(ids)}; a language model takes whole numbers [b, s], alone "
            "or in a mapping under that name, int64 or int32"
        )
    accepted = (*INPUTS, "past_key_values", "logits_to_keep")
    if unknown := [name for name in given if name not in accepted]:
        raise ValueError(
            f"the batch has {listing(unknown)}; accepted are {listing(INPUTS)} and, for the loss, "
            "'labels'"
        )
    past = given.get("past_key_values")
    if past is not None and not isinstance(past, StageState):
        raise ValueError(
            f"past_key_values is {_described(past)}, but each stage has a cache of its own; leave "
            "it out"
        )
    seen = int(getattr(past, "length", 0))
    rows, length = ids.shape
    if rows and not length:
        raise ValueError(f"input_ids has shape {[rows, length]}; expected a token or more a row")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and seen + length > positions:
        raise ValueError(
            f"sequences of {seen + length} tokens are longer than the model's {positions} "
            "positions; cut them, or take a model with more"
        )
    mask = given.get("attention_mask")
    if mask is not None and not _fits_mask(mask, rows, seen + length):
        raise ValueError(
            f"attention_mask is {_described(mask)}; expected one number for each token, "
            f"{[rows, seen + length]}, 0 where there is padding"
        )
    places = given.get("position_ids")
    if places is not None and not (
        isinstance(places, Tensor) and places.shape == ids.shape and places.dtype in _WHOLE
    ):
        raise ValueError(
            f"position_ids is {_described(places)}; expected whole numbers {[rows, length]}, as "
            "input_ids"
        )
    if bad := _outside(ids, config.vocab_size):
        raise ValueError(
            f"input_ids holds {bad[0]}, but the model's vocabulary has the tokens 0 to "
            f"{config.vocab_size - 1}; is the tokenizer another model's?"
        )
    if places is not None and positions is not None and (bad := _outside(places, positions)):
        raise ValueError(
            f"position_ids holds {bad[0]}, but the model has the positions 0 to {positions - 1}"
        )


def _fits_mask(mask: object, rows: int, length: int) -> bool:
    # One of 4 dimensions says for every pair of tokens what it sees; the model checks that.
    return isinstance(mask, Tensor) and (mask.dim() == 4 or tuple(mask.shape) == (rows, length))


def _outside(numbers: Tensor, count: int) -> list[int]:
    """The least and the greatest of `numbers`, where they are not from 0 to `count` - 1."""
    if numbers.device.type != "cpu" or not numbers.numel():
        return []  # looking would wait for the device
    return [n for n in (int(numbers.min()), int(numbers.max())) if not 0 <= n < count]


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    return "missing" if value is None else f"a {type(value).__name__}"
