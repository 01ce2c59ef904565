"""Spec strings: the one place where a method is read from a command line.

    spec      = part ("+" part)*         outermost first: feedback, compressor, value compressor
    part      = name (":" setting)*
    setting   = value | key "=" value    a bare value sets the next field in order

``topk:0.1``, ``ef21+topk:0.1+quant:8``, ``aqsgd:storage=fp16+quant:4:scale=128``. A method that is
itself a setting is written with ``/`` and ``,`` for ``:`` and ``+``, as in
``aqsgd:first=quant/8+quant:4``; two numbers as in ``gravac:cf=10-1000+topk:0.1``. Nothing in them
needs quoting in a shell. ``str(method)`` gives a spec back.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import operator
import pkgutil
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

__all__ = [
    "SpecValue",
    "closest",
    "import_all",
    "nested_spec",
    "of_inner",
    "parse",
    "registered",
    "shown",
]

_T = TypeVar("_T")


class SpecValue:
    """A method: a value that has a spec string, ``name[:positional][:key=value]...``.

    What the rest of the library wants to know of a method it asks by the capabilities below, never
    by its class, so that a method from elsewhere is taken as one of its own. Those of compressors
    alone are in `mpcomp.Compressor`.
    """

    spec: ClassVar[str]
    #: Short names for common settings: alias -> constructor arguments.
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Field that takes what stands behind the next ``+`` of a spec, or None.
    spec_inner: ClassVar[str | None] = None

    #: Whether every element is sent as it is, in the tensor's own dtype: no compression.
    sends_dense: bool = False
    #: Whether a message carries one selection of the elements, which another message may reuse.
    selects: bool = False
    #: Whether it chooses by itself, while training, how much is compressed.
    adapts: ClassVar[bool] = False
    #: Whether its compressor may be replaced by one of another ratio in the course of a run.
    adaptable: ClassVar[bool] = False
    #: Whether a slot of its state belongs to a training sample, and not to a row of a microbatch.
    by_sample: ClassVar[bool] = False
    #: Whether it can send the tensors of a cut.
    at_cuts: ClassVar[bool] = False
    #: Whether it can send gradients between replicas.
    between_replicas: ClassVar[bool] = False

    def check_place(self, argument: str) -> None:
        """Raises ValueError where a cut's argument is no place for it.

        Args:
            argument: of `mpcomp.pipeline`: "act_comp", "grad_comp" or "tie_comp".
        """

    def check_beside(self, other: SpecValue, boundary: int) -> None:
        """Raises ValueError where it does not go with the method of the cut's other direction.

        Args:
            other: that method.
            boundary: number of the cut.
        """

    def __str__(self) -> str:
        """The spec string: ``parse(str(value)) == value``."""
        assert dataclasses.is_dataclass(self)
        given = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name != self.spec_inner
            and (f.default is dataclasses.MISSING or getattr(self, f.name) != f.default)
        }
        for alias, arguments in self.aliases.items():
            if given and given == dict(arguments):
                head = alias
                break
        else:
            head = self.spec
            first = next((f.name for f in dataclasses.fields(self)), None)
            for name, value in given.items():
                text = nested_spec(value)
                head += f":{text}" if name == first else f":{name}={text}"
        inner = getattr(self, self.spec_inner) if self.spec_inner else None
        return head if inner is None else f"{head}+{inner}"


def nested_spec(value: Any) -> str:
    """A setting's text; a method as a setting has ``/`` and ``,`` for its ``:`` and ``+``.

    Several numbers have a ``-`` between them.
    """
    if isinstance(value, tuple):
        return "-".join(f"{x:.0f}" if float(x).is_integer() else str(x) for x in value)
    text = str(value)
    return text.translate(str.maketrans(":+", "/,")) if isinstance(value, SpecValue) else text


def shown(value: Any) -> str:
    """A value for an error message: a method as its spec, anything else as Python writes it."""
    return str(value) if isinstance(value, SpecValue) else repr(value)


def of_inner(name: str, inner: str = "inner") -> Any:
    """A capability that a method has as far as the one inside it does, as a property.

    Args:
        name: of the attribute.
        inner: name of the field with the method inside.
    """
    return property(operator.attrgetter(f"{inner}.{name}"))


def import_all(package: str, folders: Iterable[str]) -> None:
    """Imports every module of a package, so that `parse` knows the methods in it.

    A package of methods ends with ``import_all(__name__, __path__)``; a module that is put into its
    folder is found without a line elsewhere.
    """
    for module in pkgutil.iter_modules(folders):
        importlib.import_module(f"{package}.{module.name}")


def registered(base: type[_T]) -> Iterator[type[_T]]:
    """All concrete classes below ``base`` that have a spec name, nearest first."""
    _load_methods()
    for cls in base.__subclasses__():
        if "spec" in cls.__dict__:
            yield cls
        yield from registered(cls)


def closest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for an error message, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


#: Rooms whose modules define methods. By name: what reads specs imports none of those who have one.
_ROOMS = ("compressors", "feedback", "adaptive", "data_parallel")
_loaded: set[str] = set()


def _load_methods() -> None:
    """Imports every module that may define a method, once: a class registers by being there."""
    for room in _ROOMS:
        if room not in _loaded:
            package = importlib.import_module(f"{__name__.partition('.')[0]}.{room}")
            import_all(package.__name__, package.__path__)
            _loaded.add(room)


def _names() -> dict[str, tuple[type[SpecValue], dict[str, Any]]]:
    """Every name a part may begin with: its class and the settings it stands for."""
    names: dict[str, tuple[type[SpecValue], dict[str, Any]]] = {}
    for cls in registered(SpecValue):
        names[cls.spec] = (cls, {})
        names.update({alias: (cls, dict(given)) for alias, given in cls.aliases.items()})
    return names


def parse(spec: str) -> Any:
    """The compressor or feedback method that a spec string names.

    Args:
        spec: ``[feedback+]compressor[+value compressor]``, for example ``topk:0.1``,
            ``quant:4``, ``ef21+topk:0.1+quant:8``, ``aqsgd+quant:4``, ``topk:0.1+fp16``.

    Returns:
        A `Compressor`, a `Feedback` or `SameIndices`.

    Raises:
        ValueError: an unknown name or setting (the nearest one is named), a value of the wrong
            type or outside its range, or parts that do not go together.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"spec {spec!r}: expected text such as 'topk:0.1' or 'ef21+topk:0.1'")
    inner: Any = None
    for part in reversed(spec.strip().split("+")):
        inner = _part(part, inner, spec)
    return inner


def _part(part: str, inner: Any, spec: str) -> Any:
    name, *settings = part.split(":")
    names = _names()
    if name not in names:
        raise ValueError(
            f"unknown method {name!r} in spec {spec!r}{closest(name, names)} "
            f"(known: {', '.join(sorted(names))})"
        )
    cls, arguments = names[name]
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    fields = [f.name for f in dataclasses.fields(cls) if f.name != cls.spec_inner]
    positional = iter([f for f in fields if f not in arguments])
    for i, setting in enumerate(settings):
        key, has_key, value = setting.partition("=")
        if not has_key and inner is None and cls.spec_inner is not None and setting in names:
            outer, inside = ":".join([name, *settings[:i]]), ":".join(settings[i:])
            raise ValueError(
                f"spec {spec!r}: {setting} is a method and no setting of {name}, which takes a "
                f"method behind a '+'; write {outer}+{inside}"
            )
        if not has_key:
            key, value = next(positional, ""), setting
            if not key:
                raise ValueError(f"{part!r} in spec {spec!r}: {name} takes no further {value!r}")
        if key not in fields:
            raise ValueError(
                f"unknown setting {key!r} of {name} in spec {spec!r}{closest(key, fields)} "
                f"(known: {', '.join(fields) or 'none'})"
            )
        arguments[key] = _convert(value, hints[key], f"{key} of {name} in spec {spec!r}")
    if inner is not None:
        if cls.spec_inner is None:
            raise ValueError(
                f"spec {spec!r}: {name} takes nothing behind a '+'; "
                "the form is [feedback+]compressor[+value compressor]"
            )
        arguments[cls.spec_inner] = inner
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in arguments
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        if missing == [cls.spec_inner]:
            example = f"{name}+topk:0.1"
        else:  # only the first setting can be told by its place
            key = "" if missing[0] == fields[0] else f"{missing[0]}="
            example = f"{name}:{key}<{missing[0]}>"
        raise ValueError(f"spec {spec!r}: {name} needs {', '.join(missing)}; write {example}")
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"spec {spec!r}: {error}") from error


def _convert(text: str, hint: Any, what: str) -> Any:
    """``text`` as the first type of ``hint`` that takes it."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    accepted = typing.get_args(hint) if union else (hint,)
    if type(None) in accepted and text in ("none", "None"):
        return None
    for kind in (bool, int, float, str):
        if kind not in accepted:
            continue
        if kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            continue
        try:
            return kind(text)
        except ValueError:
            continue
    words = [w for kind in accepted for w in typing.get_args(kind) if _is_literal(kind)]
    if text in words:
        return text
    for kind in accepted:
        if typing.get_origin(kind) is tuple:
            return _numbers(text, typing.get_args(kind), what)
    if any(isinstance(kind, type) and issubclass(kind, SpecValue) for kind in accepted):
        try:
            return parse(text.translate(str.maketrans("/,", ":+")))
        except ValueError as error:
            if not words:
                raise
            raise ValueError(f"{what}: {text!r} is none of {', '.join(words)}; {error}") from error
    expected = " or ".join(t.__name__ for t in accepted if t is not type(None))
    raise ValueError(f"{what}: {text!r} is not {expected}")


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal


def _numbers(text: str, kinds: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """``10-1000`` as numbers of these types."""
    words = text.split("-")
    if len(words) != len(kinds):
        example = "-".join(str(10 ** (index + 1)) for index in range(len(kinds)))
        raise ValueError(f"{what}: {text!r} is not {len(kinds)} numbers; write {example}")
    return tuple(_convert(word, kind, what) for word, kind in zip(words, kinds, strict=True))
