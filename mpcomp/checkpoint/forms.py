"""The forms of the plain values in a checkpoint, checked before anything is made of them.

A form is a type, None, a list of one form, a tuple of forms of which one has to fit, `Whole`
numbers, `ANY`, or a mapping: ``{str: form}`` for any names, else a form under each name, where one
that ends in "?" may be absent. More names may be there, unless the mapping is an `Only`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpcomp.core.traffic import Meter, Traffic

__all__ = ["OF_PART", "OF_SEVERAL", "check_form", "check_like", "plain_value"]


@dataclass(frozen=True)
class Whole:
    """The whole numbers that counts and sizes can be."""

    least: int = 0


class Only(dict[str, Any]):
    """A mapping with no other names than these."""


ANY = object()
COUNT, NUMBER = Whole(), (int, float)
_TRAFFIC = Only(
    dict.fromkeys(Traffic.counts(), COUNT)
    | {"seconds": NUMBER, "energies": (None, [NUMBER]), "lags?": [NUMBER]}
)
_PHASES = Only({f"{phase}?": _TRAFFIC for phase in Meter().phases})
_CUT = {"chunks": Whole(1), "stages": [[str]]}
_WAY = Only(
    {"method": str} | dict.fromkeys(("encode_s", "decode_s", "wire_bytes", "bf16_bytes"), NUMBER)
)
_REPLICAS = {
    "method": str,
    "network": {"path": str, "per_machine": COUNT},
    "held": bool,
    "totals": {str: NUMBER},
}

#: ``checkpoint.json`` of one process, or of one rank's part.
OF_PART = {
    "token": str,
    "num_steps": COUNT,
    "cut": _CUT,
    "links": {
        str: {
            "method": str,
            "chosen?": str,
            "sample": (None, {"shape?": [COUNT], "channels_last?": bool}),
            "traffic": _PHASES,
        }
    },
    "replicas": (None, {**_REPLICAS, "step": COUNT}),
    "optimizer": (
        None,
        {"class": str, "groups": [{"params": [str], "settings": {str: ANY}}], "plain": {str: ANY}},
    ),
    "scheduler": (None, {str: ANY}),
    "scaler": (None, {str: ANY}),
    "dial?": {"step_s?": (None, NUMBER), "ways?": {str: _WAY}},
    "extra": {str: ANY},
    "checksums": Only({"weights": {str: COUNT}, "state": {str: COUNT}}),
}

#: ``checkpoint.json`` beside several parts.
OF_SEVERAL = {
    "token": str,
    "num_steps": COUNT,
    "cut": _CUT,
    "placement": [[COUNT]],
    "num_replicas": Whole(1),
    "links": {str: {"method": str, "chosen?": str, "held": bool, "traffic": _PHASES}},
    "replicas": (None, _REPLICAS),
}


def check_form(value: Any, form: Any, where: str = "it") -> None:
    """Checks that a value of JSON has a form.

    Args:
        value: what was read.
        form: as this module describes.
        where: the value's place, for the message.

    Raises:
        ValueError: it has not; the message names the innermost place.
    """
    if isinstance(form, tuple):
        fitting = [one for one in form if _is_kind(value, one)]
        if not fitting:
            raise ValueError(f"{where} is {_shown(value)}")
        return check_form(value, fitting[0], where)
    if not _is_kind(value, form):
        raise ValueError(f"{where} is {_shown(value)}")
    if isinstance(form, list):
        for i, item in enumerate(value):
            check_form(item, form[0], f"{where}[{i}]")
    elif isinstance(form, Mapping):
        _check_mapping(value, form, where)
    return None


def _check_mapping(value: Mapping[str, Any], form: Mapping[Any, Any], where: str) -> None:
    if str in form:
        for name, item in value.items():
            check_form(item, form[str], f"{where}.{name}")
        return
    for name, of_item in form.items():
        key = name.removesuffix("?")
        if key in value:
            check_form(value[key], of_item, f"{where}.{key}")
        elif key == name:
            raise ValueError(f"{where} lacks {key}")
    known = {name.removesuffix("?") for name in form}
    if isinstance(form, Only) and (unknown := sorted(value.keys() - known)):
        raise ValueError(f"{where} has the unknown {unknown[0]!r}")


def plain_value(value: Any, where: str) -> Any:
    """A value as JSON holds it: tensors, such as a learning rate, become numbers.

    Args:
        value: numbers, texts, tensors, None, and lists, tuples and mappings of these.
        where: the value's place, for the message.

    Raises:
        TypeError: it is, or has in it, another kind of value.
    """
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: plain_value(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, str | int | float | None):
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}: a checkpoint holds numbers, texts, tensors, and "
        "lists and mappings of these"
    )


def check_like(own: Any, saved: Any, where: str) -> Any:
    """A value of JSON in the types of the present one, which went through JSON as well.

    Numbers may become other numbers, and None anything; what is no number may become None. Where
    the present value is a tensor, a tensor is made.

    Args:
        own: the present value.
        saved: what was read.
        where: the value's place, for the message.

    Raises:
        ValueError: it is of another kind.
    """
    if isinstance(own, Tensor):
        check_like(own.tolist(), saved, where)
        return own.new_tensor(saved)
    of_number = isinstance(own, int | float) and not isinstance(own, bool)
    if own is None or (saved is None and not of_number):
        return saved
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        # JSON has no other names than text, as a schedule's milestones have.
        numbered = bool(own) and all(type(name) is int for name in own)
        values = {int(k) if numbered and k.isdecimal() else k: v for k, v in saved.items()}
        found = {k: check_like(own.get(k), v, f"{where}.{k}") for k, v in values.items()}
        kind: Any = type(own)
        return kind(found) if numbered else found
    if isinstance(own, list | tuple) and isinstance(saved, list):
        known = own if len(own) == len(saved) else [None] * len(saved)
        pairs = zip(known, saved, strict=True)
        kept = [check_like(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(pairs)]
        return tuple(kept) if isinstance(own, tuple) else kept
    if _is_kind(saved, NUMBER) if of_number else type(saved) is type(own):
        return saved
    raise ValueError(f"{where} is {_shown(saved)}, here it is {_shown(own)}")


def _is_kind(value: Any, form: Any) -> bool:
    """Whether the outermost part of a value has the form."""
    if form is ANY:
        return True
    if form is None:
        return value is None
    if isinstance(form, tuple):
        return any(_is_kind(value, one) for one in form)
    if isinstance(form, Whole):
        return type(value) is int and form.least <= value < 2**53
    if isinstance(form, list):
        return isinstance(value, list)
    if isinstance(form, Mapping):
        return isinstance(value, dict)
    return type(value) is form  # a bool is no int


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
