"""Configurations of language models, with entries that were typed as text."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn

from mpcomp.core.spec import closest

__all__ = ["model_of"]

_WORDS: Final = {"true": True, "yes": True, "false": False, "no": False, "none": None}


def model_of(architecture: str, sizes: Mapping[str, int], entries: Mapping[str, str]) -> nn.Module:
    """A causal language model on the meta device, of a configuration with these entries.

    Args:
        architecture: as transformers calls it.
        sizes: entries that are known.
        entries: others, as text. A field's type says how its text is read.

    Raises:
        ValueError: there is no such entry, its value has another type, or no model can be made of
            all of them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    chosen = dict(sizes)
    if entries:
        default = AutoConfig.for_model(architecture)
        chosen |= dict(_entry(default, key, text) for key, text in entries.items())
    try:
        # Made anew: entries such as a kind for each layer follow from others.
        config = AutoConfig.for_model(architecture, **chosen)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:
        if not entries:
            raise
        given = " ".join(f"{key}={text}" for key, text in entries.items())
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"--config {given}: transformers makes no {architecture} of it ({said}); change these "
            "entries, or leave some out"
        ) from error
    return model


def _entry(default: Any, key: str, text: str) -> tuple[str, Any]:
    """The field that an entry is for, and its value."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    kinds = {field.name: field.type for field in dataclasses.fields(default)}
    field = default.attribute_map.get(key, key)
    if field not in kinds:
        raise ValueError(
            f"--config {key}={text}: {default.model_type} has no such entry"
            f"{closest(key, [*kinds, *default.attribute_map])}"
        )
    kind, present = kinds[field], getattr(default, field)
    for value in _readings(text):
        # Python takes a flag for a number; here it is none.
        if isinstance(value, bool) and kind in (int, float):
            continue
        with suppress(StrictDataclassFieldValidationError):  # which the next reading may pass
            setattr(default, field, value)
            return field, value
    said = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    said = said.replace("bool", "bool (true, false, yes or no)")
    raise ValueError(
        f"--config {key}={text}: {default.model_type} takes {said} there; pass such a value, as in "
        f"{key}={_written(present)}"
    )


def _readings(text: str) -> Iterator[Any]:
    """All values that a text may mean: flag or None, number, literal of Python, word.

    A list, as in ``[1,2]`` or ``[a,b]``, has elements of one kind.
    """
    listed = text.startswith("[") and text.endswith("]")
    parts = [part.strip() for part in text[1:-1].split(",")] if listed else [text]
    readers: tuple[Callable[[str], Any], ...] = (_word, int, float, str)
    for read in readers:
        with suppress(ValueError):
            values = [read(part) for part in parts]
            yield values if listed else values[0]
        if read is float:
            with suppress(ValueError, SyntaxError):
                yield ast.literal_eval(text)


def _word(text: str) -> bool | None:
    if text.lower() not in _WORDS:
        raise ValueError(text)
    return _WORDS[text.lower()]


def _written(value: Any) -> str:
    """A value as an entry's text."""
    flag = isinstance(value, bool) or value is None
    return str(value).lower() if flag else str(value).replace(" ", "")
