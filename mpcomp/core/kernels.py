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

Those for CUDA are in `mpcomp/gpu/`, which the first tensor there loads if ``MPCOMP_TRITON=1``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Final, Generic, ParamSpec, TypeVar

import torch

__all__ = ["KERNELS", "Kernel", "kernel"]

P = ParamSpec("P")
R = TypeVar("R")

#: Environment variable: 1 to run kernels in Triton on GPUs. They are off until a GPU has run them.
_TRITON: Final = "MPCOMP_TRITON"
#: The least that Triton compiles all types for.
_CAPABILITY: Final = (8, 0)


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
        kind = device.type
        if kind == "cuda" and not _in_triton(device):
            return self.anywhere(*args, **kwargs)
        return self.by_device.get(kind, self.anywhere)(*args, **kwargs)

    def own(self, device: torch.device) -> Callable[P, R] | None:
        """The implementation that a device has for itself; None without."""
        if device.type == "cuda" and not _in_triton(device):
            return None
        return self.by_device.get(device.type)


#: All kernels, by module and name.
KERNELS: Final[dict[str, Kernel[Any, Any]]] = {}


def kernel(anywhere: Callable[P, R]) -> Kernel[P, R]:
    """A function of torch's operations, as a `Kernel` of the table."""
    made = Kernel(anywhere)
    KERNELS[f"{anywhere.__module__.removeprefix('mpcomp.')}.{anywhere.__name__}"] = made
    return made


@functools.cache
def _in_triton(device: torch.device) -> bool:
    """Whether a CUDA device has kernels of its own, which this loads.

    Raises:
        ValueError: `MPCOMP_TRITON` is neither 0 nor 1.
    """
    given = os.environ.get(_TRITON, "0")
    if given not in ("0", "1"):
        raise ValueError(
            f"{_TRITON}={given!r}: expected 1, to run kernels in Triton on GPUs, or 0, to run "
            "torch's operations"
        )
    if given == "0" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return False
    importlib.import_module("mpcomp.gpu")
    return True
