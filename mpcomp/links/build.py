"""Boundaries of a pipeline, from the methods that a user gave for all cuts or for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from mpcomp.compressors.base import Identity, shrinks
from mpcomp.compressors.rows import InRows
from mpcomp.core.context import TensorMeta
from mpcomp.core.spec import SpecValue, closest, parse
from mpcomp.core.wire import FORMAT, layout_check
from mpcomp.links.auto import AUTO, TIE_COMP, Words
from mpcomp.links.boundary import Boundary
from mpcomp.links.link import ACT, GRAD, Link

__all__ = [
    "MethodLike",
    "Methods",
    "boundaries_of",
    "format_of",
    "given_at",
    "method_of",
    "tie_method_of",
]

#: What may be given for one boundary.
MethodLike = SpecValue | str | None
#: What may be given for all: one for all, a list, or a mapping from cuts.
Methods = MethodLike | Sequence[MethodLike] | Mapping[Any, MethodLike]

#: Ranks compare the layouts of messages for tensors like these.
_METAS: Final = (TensorMeta((2, 24)), TensorMeta((4, 16, 256), torch.bfloat16))


def boundaries_of(
    act_comp: Methods,
    grad_comp: Methods,
    names: Sequence[str],
    *,
    seed: int,
    replica: int,
    warmup_steps: int,
    checked: bool = False,
    words: Sequence[Words] | None = None,
) -> list[Boundary]:
    """The cuts with their links.

    Args:
        act_comp: methods for activations.
        grad_comp: methods for gradients.
        names: of the blocks before the cuts.
        seed: of the run.
        replica: number of this pipeline.
        warmup_steps: training steps that go uncompressed at first.
        checked: whether each message has a sum over its bits.
        words: what words stand for at each cut; `AUTO` by default.

    Raises:
        ValueError: no such cut or method, or two that do not go together.
        TypeError: a compressor that is none.
    """
    at_cuts = [AUTO] * len(names) if words is None else words
    acts, grads = (
        [
            method_of(argument, value, at_cut)
            for value, at_cut in zip(given_at(argument, given, names), at_cuts, strict=True)
        ]
        for argument, given in (("act_comp", act_comp), ("grad_comp", grad_comp))
    )
    boundaries = []
    for i, (act, grad) in enumerate(zip(acts, grads, strict=True)):
        act.check_beside(grad, i)
        grad.check_beside(act, i)
        links = [
            Link(
                method,
                boundary=i,
                direction=way,
                seed=seed,
                replica=replica,
                warmup_steps=warmup_steps,
                checked=checked,
            )
            for method, way in ((act, ACT), (grad, GRAD))
        ]
        boundaries.append(Boundary(*links))
    return boundaries


def format_of(link: Link) -> list[int]:
    """Numbers that two ranks have in common if they would send the same bytes for a tensor.

    The methods' names are not all of it: of one name there may be code of two dates. Of each part
    of a message, layouts of a small tensor and a large one, and what headers are like.
    """
    coders = [*link.endpoint.coders]
    if link.num_rows is not None:
        coders.append(InRows(Identity(), link.num_rows))
    return [
        *FORMAT,
        *(
            layout_check((coder if shrinks(coder, meta) else Identity()).layout(meta))
            for coder in coders
            for meta in _METAS
        ),
    ]


def given_at(argument: str, given: Methods, names: Sequence[str]) -> list[MethodLike]:
    """The entry of each boundary.

    Args:
        argument: of `mpcomp.pipeline`.
        given: for it.
        names: of the blocks before the cuts.

    Raises:
        ValueError: there is no such boundary, or a list of another length.
    """
    if isinstance(given, Mapping):
        chosen: list[MethodLike] = [None] * len(names)
        for key, value in given.items():
            chosen[_boundary_of(argument, key, names)] = value
    elif isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(names):
            raise ValueError(
                f"{argument} has {len(given)} entries for {len(names)} boundaries: "
                "give one for each, or one for all"
            )
        chosen = list(given)
    else:
        chosen = [given] * len(names)
    return chosen


def _boundary_of(argument: str, key: Any, names: Sequence[str]) -> int:
    if isinstance(key, int) and 0 <= key < len(names):
        return key
    for i, name in enumerate(names):
        if isinstance(key, str) and (name == key or name.startswith(f"{key}.")):
            return i
    prefixes = {name.rpartition(".")[0] for name in names} - {""}
    hint = closest(key, [*names, *prefixes]) if isinstance(key, str) else ""
    raise ValueError(
        f"{argument} has no boundary {key!r}{hint}: expected 0 to {len(names) - 1} "
        f"or the block before a cut ({', '.join(names)})"
    )


def tie_method_of(given: MethodLike, *of_cuts: Methods, tied: bool) -> SpecValue:
    """The method of tied weights' gradients: as given, or what a word at the cuts stands for.

    Args:
        given: by the user; None if nothing was.
        of_cuts: methods of activations and of gradients.
        tied: whether stages share a weight.

    Raises:
        ValueError: as `method_of`.
        TypeError: likewise.
    """
    if given is None and tied and any(_has_word(methods) for methods in of_cuts):
        given = TIE_COMP
    return method_of("tie_comp", given)


def _has_word(methods: Methods) -> bool:
    """Whether one of them is a word in place of a spec."""
    if isinstance(methods, Mapping):
        methods = list(methods.values())
    if isinstance(methods, Sequence) and not isinstance(methods, str):
        return any(isinstance(each, str) and each in AUTO for each in methods)
    return isinstance(methods, str) and methods in AUTO


def method_of(argument: str, value: MethodLike, words: Words = AUTO) -> SpecValue:
    """One method from what the user gave for ``argument``.

    Args:
        argument: of `mpcomp.pipeline`.
        value: given for it.
        words: what words in place of a spec stand for.

    Raises:
        ValueError: a spec that is none, or a method that has no place there.
        TypeError: anything else.
    """
    if value is None:
        return Identity()
    if isinstance(value, str):
        value = parse(_spelt_out(argument, value, words))
    if not (isinstance(value, SpecValue) and value.at_cuts):
        raise TypeError(
            f"{argument}={value!r}: expected a compressor such as TopK(0.1), a feedback method "
            "round one, a spec string such as 'topk:0.1', or None"
        )
    value.check_place(argument)
    return value


def _spelt_out(argument: str, spec: str, words: Words) -> str:
    """The spec itself, or the one that its word stands for."""
    if spec not in words:
        return spec
    chosen = words[spec]
    if argument not in chosen:
        raise ValueError(
            f"{argument}={spec!r}: only {' and '.join(chosen)} can be {spec!r}; name a method"
        )
    return chosen[argument]
