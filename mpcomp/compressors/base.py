"""The contract of a compressor: a frozen value that maps one tensor to wire tensors and back.

A compressor is pure. It never changes its input, keeps nothing, and touches no global
generator. What it puts on the wire has a layout that follows from `TensorMeta` alone, so
buffers can be posted, and bytes counted, before there is data.

A new compressor is one module in this folder: a frozen dataclass deriving from
`Compressor`, whose class attribute ``spec`` is its name on command lines. `mpcomp.parse`
and the law tests find it by its class.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from mpcomp.tensor_meta import TensorMeta

__all__ = ["Compressor", "Payload", "Selecting", "SpecValue", "check_keep", "registered"]

Payload = tuple[Tensor, ...]

_T = TypeVar("_T")


class SpecValue:
    """A value that has a spec string: ``name[:positional][:key=value]...``, see `mpcomp.parse`."""

    spec: ClassVar[str]
    #: Short names for common settings: alias -> constructor arguments.
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Field that takes what stands behind the next ``+`` of a spec, or None.
    spec_inner: ClassVar[str | None] = None

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
    """A setting's text; a method as a setting has ``/`` and ``,`` for its ``:`` and ``+``."""
    text = str(value)
    return text.translate(str.maketrans(":+", "/,")) if isinstance(value, SpecValue) else text


def shown(value: Any) -> str:
    """A value for an error message: a method as its spec, anything else as Python writes it."""
    return str(value) if isinstance(value, SpecValue) else repr(value)


def registered(base: type[_T]) -> Iterator[type[_T]]:
    """All concrete classes below ``base`` that have a spec name, nearest first."""
    for cls in base.__subclasses__():
        if "spec" in cls.__dict__:
            yield cls
        yield from registered(cls)


class Compressor(SpecValue, ABC):
    """Maps a dense floating-point tensor to a payload and back."""

    #: Whether payloads of the same layout may be added elementwise (all-reduce).
    summable: bool = False

    @abstractmethod
    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        """Shapes and dtypes of the wire tensors for an input like ``meta``."""

    @abstractmethod
    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> Payload:
        """The payload of ``x``: tensors exactly as `layout` says, on the device of ``x``.

        Args:
            x: floating-point tensor of any shape; it is not changed.
            generator: CPU generator for methods that draw; both ends of a link are given
                equal ones.
        """

    @abstractmethod
    def decompress(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        """The dense tensor, of ``meta``'s shape, dtype and memory order, that ``payload`` says.

        Args:
            payload: what `compress` returned, possibly after a journey.
            meta: describes the tensor that was compressed.
            generator: equal to the one `compress` was given; read by methods whose choice of
                elements is shared rather than sent.
        """

    def wire_bytes(self, meta: TensorMeta) -> int:
        """Bytes of the payload of a tensor like ``meta``, without a message header."""
        return sum(part.dense_bytes for part in self.layout(meta))

    def wire_ratio(self, meta: TensorMeta) -> float:
        """Payload bytes over the dense bytes of the tensor's own dtype; lower is better."""
        return self.wire_bytes(meta) / meta.dense_bytes if meta.numel else 1.0

    def with_cf(self, cf: float) -> Compressor:
        """The same method at compression factor ``cf``: elements of the input per element sent.

        Raises:
            TypeError: the method has no ratio to set.
        """
        raise TypeError(
            f"{self} has no compression factor to set; "
            "selecting compressors (topk, randomk, randomblock) have one"
        )


class Selecting(Compressor):
    """A compressor that sends some of the elements and drops the others."""

    keep: float
    values: Compressor | None

    @abstractmethod
    def indices(
        self, payload: Payload, meta: TensorMeta, generator: torch.Generator | None = None
    ) -> Tensor:
        """Ascending int64 positions, in memory order, of the elements that ``payload`` carries."""

    def with_cf(self, cf: float) -> Selecting:
        if not cf >= 1:
            raise ValueError(f"cf={cf}: a compression factor is a number of at least 1")
        return dataclasses.replace(self, keep=1 / cf)  # type: ignore[type-var]


def check_keep(keep: float) -> None:
    """Raises ValueError unless ``keep`` is a fraction in (0, 1]."""
    if not 0 < keep <= 1:
        raise ValueError(
            f"keep={keep}: the fraction of elements to send is in (0, 1]; "
            "for 10 % write 0.1 (topk:0.1)"
        )


def num_kept(keep: float, n: int) -> int:
    """How many of ``n`` elements a selection keeps: max(1, ceil(keep n - 1e-9)), 0 of none."""
    # The 1e-9 takes back the rounding of products such as 0.1 * 30 = 3.0000000000000004.
    return min(n, max(1, -int(-(keep * n - 1e-9) // 1))) if n else 0
