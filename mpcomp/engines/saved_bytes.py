"""Bytes that autograd keeps of a microbatch for its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["SavedBytes"]


class SavedBytes:
    """Counts what autograd keeps for backward, each piece of memory once."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum(self._storages.values())

    def add(self, x: Tensor) -> None:
        """Counts the memory of a tensor."""
        storage = x.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes()

    @contextmanager
    def counting(self, anyway: Sequence[Tensor]) -> Iterator[None]:
        """Counts within a block what is not among the tensors that are kept ``anyway``."""
        own = {x.untyped_storage().data_ptr() for x in anyway}

        def pack(x: Tensor) -> Tensor:
            if x.untyped_storage().data_ptr() not in own:
                self.add(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield
