"""Messages that are counted instead of coded, for studies on an accelerator in one process.

A coder on the host would take most of the minutes that there are with a GPU. What arrives is
exactly what the coder's other end would give, as that loses nothing; how many bytes it takes
follows from its tables (`mpcomp.entropy.count_bytes`). So a counted message is as long as the coded
one would be, and has nothing in it but the number under which its content is kept.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpcomp import ECSQ, entropy
from mpcomp.compressors.tokens import Tokens
from mpcomp.core.spec import SpecValue

__all__ = ["Counted", "counted", "is_counted"]

AnyMethod = TypeVar("AnyMethod", bound=SpecValue)

_TICKET: Final = 8  # bytes
_NEWEST: Final = 16  # messages; in one process each is read as soon as it is sent


class Counted(ECSQ):
    """`ECSQ` whose elements are counted. It is no method of its own: its spec is the same.

    Both ends must be this very object, and so in one process.
    """

    @cached_property
    def _kept(self) -> _Kept:
        return _Kept()

    def encode_elements(self, q: Tensor, tokens: Tokens, dither: Tensor | None) -> Tensor:
        """Bytes as many as the coder would give; the first ones say where the numbers are kept."""
        offsets = None
        if dither is not None:
            offsets = (dither * entropy.PARTS).floor_().to(torch.int8)
        num_bytes = entropy.count_bytes(q, tokens.image, offsets, in_lanes=self.lanes)
        data = np.zeros(max(num_bytes, _TICKET), np.uint8)
        data[:_TICKET] = np.array([self._kept.put(q)], "<i8").view(np.uint8)
        return torch.from_numpy(data)

    def decode_elements(
        self, data: Tensor, tokens: Tokens, dither: Tensor | None, device: torch.device
    ) -> Tensor:
        """The numbers that are kept.

        Raises:
            RuntimeError: they are no longer; the message was read too late, or by another object.
        """
        (ticket,) = data[:_TICKET].numpy().copy().view("<i8").tolist()
        return self._kept.get(ticket)


class _Kept:
    """The newest messages' contents, by number."""

    def __init__(self) -> None:
        self._contents: OrderedDict[int, Tensor] = OrderedDict()
        self._number = 0

    def put(self, content: Tensor) -> int:
        """Keeps a content; gives its number."""
        self._number += 1
        self._contents[self._number] = content
        if len(self._contents) > _NEWEST:
            self._contents.popitem(last=False)
        return self._number

    def get(self, number: int) -> Tensor:
        """The content of a number."""
        if number not in self._contents:
            raise RuntimeError(f"nothing is kept of the counted message {number}")
        return self._contents[number]


def counted(method: AnyMethod) -> AnyMethod:
    """The method with all its entropy coding counted."""
    parts = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    parts = {k: counted(v) if isinstance(v, SpecValue) else v for k, v in parts.items()}
    kind: Any = Counted if type(method) is ECSQ else type(method)
    made: AnyMethod = kind(**parts)
    return made


def is_counted(method: SpecValue) -> bool:
    """Whether some of a method's coding is counted."""
    if isinstance(method, Counted):
        return True
    parts = (getattr(method, field.name) for field in dataclasses.fields(method))  # type: ignore[arg-type]
    return any(is_counted(part) for part in parts if isinstance(part, SpecValue))
