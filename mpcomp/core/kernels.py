"""The table of kernels: operations that have an implementation a device.

    @kernel
    def count_set(mask: Tensor) -> int:  # operations of torch: any device
        return int(mask.sum())

    @count_set.on("cpu")
    def _(mask: Tensor) -> int:  # numpy counts bools many times as fast
        return int(np.count_nonzero(mask.numpy()))

A kernel is called as a function, and runs where its first argument lies. A kernel for another
device is one function more; nothing else changes. All implementations give the same bits, which
`tests/core/test_kernels.py` and the laws of compressors hold, so that ends on different devices
understand each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Generic, ParamSpec, TypeVar

__all__ = ["KERNELS", "Kernel", "kernel"]

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(Generic[P, R]):
    """An operation on tensors, to be called as its functions are.

    Args:
        anywhere: implementation by operations of torch, for devices that have none of their own.

    Attributes:
        by_device: the others, by the device's type.
    """

    def __init__(self, anywhere: Callable[P, R]) -> None:
        functools.update_wrapper(self, anywhere)
        self.anywhere = anywhere
        self.by_device: dict[str, Callable[P, R]] = {}

    def on(self, device_type: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Makes a function the implementation for a type of devices, such as "cuda"."""

        def of_device(implementation: Callable[P, R]) -> Callable[P, R]:
            self.by_device[device_type] = implementation
            return implementation

        return of_device

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of the implementation for the device of the first argument."""
        first: Any = args[0]  # a tensor, or a device
        device = getattr(first, "device", first)
        return self.by_device.get(device.type, self.anywhere)(*args, **kwargs)


#: All kernels, by module and name.
KERNELS: Final[dict[str, Kernel[Any, Any]]] = {}


def kernel(anywhere: Callable[P, R]) -> Kernel[P, R]:
    """A function of torch's operations, as a `Kernel` of the table."""
    made = Kernel(anywhere)
    KERNELS[f"{anywhere.__module__.removeprefix('mpcomp.')}.{anywhere.__name__}"] = made
    return made
