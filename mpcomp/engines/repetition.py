"""Forwards of a stage that run twice, and change what modules hold once.

Recomputing a stage in backward must read what the forward read, and leave what later forwards have
written since::

    forward 0       reads buffer 0, writes 1; draws 0 from a generator
    forward 1       reads buffer 1, writes 2; draws 1
    repetition 0    reads a copy of buffer 0; draws 0. Afterwards there are buffer 2 and draw 2

Copies, rather than old values in the tensor itself: autograd checks that nobody wrote to it. They
are kept of what forwards write alone, as the first one shows: masks and tables may be large.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mpcomp.core.side_effects import attributes_back, generators_back, own_attributes, way_back

__all__ = ["Repetitions"]

#: Bytes of a buffer that is copied before each forward, though none has been seen to write to it.
_SMALL: Final = 1 << 16


@dataclass(slots=True)
class _Held:
    """A tensor of a module before a forward.

    Attributes:
        name: for messages.
        dict: that it is in, buffers say.
        key: its name there.
        tensor: itself.
        version: autograd's count of writes to it.
        copy: of its values; None where it will hardly be written.
    """

    name: str
    dict: dict[str, Any]
    key: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    @property
    def place(self) -> tuple[int, str]:
        """The same for what the tensor is before other forwards."""
        return id(self.dict), self.key

    def changed(self) -> bool:
        """Whether it was written since. BatchNorm's kernels and `.data` count no version."""
        if self.tensor._version != self.version:
            return True
        return self.copy is not None and not torch.equal(self.tensor.detach(), self.copy)


class Repetitions:
    """The forwards of one stage, which can be repeated.

    Buffers, attributes of modules and generators are in a repetition as they were in the forward,
    and after it as they were before it.

    Args:
        stage: the module.
        device: of the stage.
    """

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        self._stage = stage
        self._device = device
        self._written: set[tuple[int, str]] = set()
        self._has_run = False

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of the forward that follows, and of its repetition."""
        with torch.no_grad():
            attributes, tensors = self._attributes(), list(self._tensors())
        return self._noting(tensors), self._again(attributes, tensors)

    def way_back(self) -> Callable[[], None]:
        """A function that puts back all that the forward which follows changes."""
        with torch.no_grad():
            attributes, tensors = self._attributes(), list(self._tensors())

        def back() -> None:
            for each in attributes:
                each()
            for held in tensors:
                if held.copy is not None and held.changed():
                    held.tensor.detach().copy_(held.copy)

        return back

    def _attributes(self) -> list[Callable[[], None]]:
        return [*generators_back(self._device), *attributes_back(self._stage)]

    def _tensors(self) -> Iterator[_Held]:
        """All tensors of the stage; with copies where the next forward may write to them."""
        for name, module in self._stage.named_modules():
            attributes = own_attributes(module)
            renormed = attributes.get("max_norm") is not None  # an embedding's weight
            yield from self._held(name, module._buffers, module._buffers)
            yield from self._held(name, vars(module), attributes)
            yield from self._held(name, module._parameters, module._parameters, renormed)

    def _held(
        self,
        name: str,
        place: dict[str, Any],
        values: Mapping[str, Any],
        copied: bool | None = None,
    ) -> Iterator[_Held]:
        """The tensors of one dict; copied where the forward is likely to write to them, or so."""
        for key, x in values.items():
            if not isinstance(x, Tensor) or isinstance(x, DTensor):
                continue
            if x.grad_fn is not None or x.is_inference():
                continue  # made by a forward
            held = _Held(f"{name}.{key}", place, key, x, x._version, None)
            likely = x.nbytes <= _SMALL or not self._has_run if copied is None else copied
            if likely or held.place in self._written:
                held.copy = x.clone()
            yield held

    @contextmanager
    def _noting(self, tensors: list[_Held]) -> Iterator[None]:
        """Notes what a forward writes; keeps no large copy of anything else."""
        yield
        for held in tensors:
            if held.copy is None:
                if held.changed():
                    self._written.add(held.place)
                    held.copy = held.tensor.detach().clone()
                    warnings.warn(
                        f"with recompute=True a forward wrote to {held.name}, as none before it "
                        "did: this one is repeated on what it wrote, those that follow on what "
                        "was there before. If that matters, write to it in the first forward too, "
                        "or leave recompute out",
                        stacklevel=2,
                    )
            elif not self._has_run and held.changed():
                self._written.add(held.place)
            elif held.tensor.nbytes > _SMALL and held.place not in self._written:
                held.copy = None
        self._has_run = True

    @contextmanager
    def _again(self, before: list[Callable[[], None]], tensors: list[_Held]) -> Iterator[None]:
        """Lets a forward run as it did before; puts back what is there now."""
        swapped = [held for held in tensors if held.copy is not None]
        parameters = [held for held in swapped if isinstance(held.tensor, nn.Parameter)]
        now = [*self._attributes(), *filter(None, (way_back(held.dict) for held in parameters))]
        made: dict[int, Tensor] = {}  # one for one, where it has several names
        try:
            for back in before:
                back()
            for held in swapped:
                if id(held.tensor) not in made:
                    made[id(held.tensor)] = _like(held)
                held.dict[held.key] = made[id(held.tensor)]
            yield
        finally:
            for back in now:
                back()


def _like(held: _Held) -> Tensor:
    """A tensor in place of one, with the values that it had."""
    assert held.copy is not None
    values = held.copy.clone()
    if isinstance(held.tensor, nn.Parameter):
        return nn.Parameter(values, held.tensor.requires_grad)
    return values.requires_grad_(held.tensor.requires_grad)
