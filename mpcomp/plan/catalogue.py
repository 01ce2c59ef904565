"""The methods that there are, and their figures on one tensor, measured on this machine."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mpcomp.core.context import TensorMeta
from mpcomp.core.sent import below_bf16
from mpcomp.core.spec import SpecValue, parse, registered
from mpcomp.core.wire import Form
from mpcomp.feedback import Feedback
from mpcomp.plan.coding import measure_cut
from mpcomp.plan.planner import CHANGES

__all__ = ["KINDS", "Entry", "Figures", "entries", "entry_of", "figures_of"]

#: Kinds of methods, in the order in which they are listed.
KINDS = ("compressor", "feedback", "adaptive", "replicas")
#: The activation's method where one is measured that reuses its selection.
SELECTION = "topk:0.1"
_LITERAL = re.compile(r"``([^`]+)``")
#: The end of a first line that names specs, which have a column of their own.
_SPECS = re.compile(r"[\s;]*(Specs? )?``[^`]+``( \([^)]*\))?(, ``[^`]+``( \([^)]*\))?)*\.?$")


@dataclass(frozen=True)
class Entry:
    """A method of the registry.

    Attributes:
        spec: an example of it.
        kind: of `KINDS`.
        summary: in a line.
        is_measured: whether it has figures on one tensor: it is for cuts, and its ratio is fixed.
    """

    spec: str
    kind: str
    summary: str
    is_measured: bool


@dataclass(frozen=True)
class Figures:
    """The figures of a method on one tensor.

    Attributes:
        wire_bytes: of a message, header included.
        below_bf16: times fewer bytes than bf16 has; None of a message without bytes.
        below_own: bytes of an uncompressed message over those.
        relative_error: ||x - y|| / ||x|| of what arrives.
        encode_melems_s: million elements a second, a median.
        decode_melems_s: likewise.
        notes: warnings of the library about this method and tensor.
    """

    wire_bytes: int
    below_bf16: float | None
    below_own: float
    relative_error: float
    encode_melems_s: float
    decode_melems_s: float
    notes: tuple[str, ...]


def entries() -> list[Entry]:
    """An entry for each example in the first line of each class of methods, by kind and spec."""
    classes = dict.fromkeys(registered(SpecValue))
    found = [entry_of(spec) for cls in classes for spec in _examples(cls)]
    return sorted(found, key=lambda entry: (KINDS.index(entry.kind), entry.spec))


def entry_of(spec: str) -> Entry:
    """The entry of one method.

    Raises:
        ValueError: no such method.
    """
    method: SpecValue = parse(spec)
    if not method.at_cuts:
        kind = "replicas"
    elif method.adapts:
        kind = "adaptive"
    else:
        kind = "feedback" if isinstance(method, Feedback) else "compressor"
    return Entry(spec, kind, _summary(type(method)), kind in ("compressor", "feedback"))


def _is_for_activations(spec: str) -> bool:
    try:
        parse(spec).check_place("act_comp")
    except ValueError:
        return False
    return True


def figures_of(entry: Entry, x: Tensor, *, repeats: int) -> Figures:
    """The figures of a method that `is_measured`, as the two ends of a cut have them.

    A method with a memory is shown the tensor again and again, a little changed each time
    (`mpcomp.plan.planner.CHANGES`); its figures are those of the last message.

    Args:
        entry: the method.
        x: [rows, ...], floating point.
        repeats: of which times are medians.

    Raises:
        ValueError: the method does not take such a tensor.
    """
    reuses = not _is_for_activations(entry.spec)
    pair = (SELECTION, entry.spec) if reuses else (entry.spec, "none")
    share = CHANGES[0] if entry.kind == "feedback" else 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cost, *errors = measure_cut(*pair, x, x, repeats=repeats, changes=(share, share))
    coding, way = cost.coding, int(reuses)
    encode_s = (coding.encode_act_s, coding.encode_grad_s)[way]
    decode_s = (coding.decode_act_s, coding.decode_grad_s)[way]
    meta = TensorMeta.of(x)
    wire_bytes = int(cost.messages[way])
    return Figures(
        wire_bytes=wire_bytes,
        below_bf16=below_bf16(wire_bytes, meta.numel),
        below_own=Form((meta,)).num_bytes / wire_bytes,
        relative_error=errors[way],
        encode_melems_s=x.numel() / encode_s / 1e6,
        decode_melems_s=x.numel() / decode_s / 1e6,
        notes=tuple(dict.fromkeys(str(warning.message) for warning in caught)),
    )


def _examples(cls: type[SpecValue]) -> Iterator[str]:
    """Specs in a class's docstring: of its first line, else the first there is.

    A method without one is shown by its name, a feedback method round a compressor.
    """
    names = {cls.spec, *cls.aliases}
    documentation = inspect.getdoc(cls) or ""
    first_line = documentation.partition("\n")[0]
    for text, most in ((first_line, None), (documentation, 1)):
        specs = [spec for spec in _LITERAL.findall(text) if re.split("[:+]", spec)[0] in names]
        if specs:
            yield from dict.fromkeys(specs[:most])
            return
    yield f"{cls.spec}+{SELECTION}" if issubclass(cls, Feedback) else cls.spec


def _summary(cls: type[SpecValue]) -> str:
    """The first line of a class's docstring, without specs at its end and marks of literals."""
    first_line = (inspect.getdoc(cls) or "").partition("\n")[0]
    return _SPECS.sub("", first_line).replace("``", "").rstrip(" .;")
