"""Randomness that both ends of a link can draw alike, and that nobody else feels.

Every draw comes from a seed that is a hash of *what it is for* (link, step,
microbatch), so engines may visit microbatches in any order, a resumed run goes on
exactly, and the global generators of torch are never advanced.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp.core.compiled import compiled
from mpcomp.core.kernels import kernel
from mpcomp.core.threads import each, slices_of

__all__ = [
    "default_generator",
    "derive_seed",
    "fill_uniform",
    "generator_for",
    "normal",
    "stage_randomness",
    "uniform",
]

_MANY: Final = 1 << 15  # numbers, from which on machine code is worth loading


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from numbers and words, the same on every machine and Python."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else struct.pack("<q", part)
        digest.update(struct.pack("<I", len(raw)) + raw)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator_for(*parts: int | str) -> torch.Generator:
    """A fresh CPU generator seeded with `derive_seed` of ``parts``."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def uniform(generator: torch.Generator, numel: int, device: torch.device) -> Tensor:
    """Uniform fp32 numbers in [0, 1), bitwise equal on every device; shape [numel].

    A counter-based generator: a 32-bit integer hash of the element's index, keyed by two
    draws from ``generator``. So no random tensor is made on the host for an accelerator,
    and kernels may compute any element alone. int32 products wrap around.
    """
    keys = torch.randint(-(1 << 31), 1 << 31, (2,), generator=generator).tolist()
    return hashed(device, numel, *keys)


@kernel
def hashed(device: torch.device, numel: int, first: int, second: int) -> Tensor:
    """The numbers of `uniform`, for its two keys: fp32 [numel]."""
    x = torch.arange(numel, dtype=torch.int32, device=device) + first
    x ^= (x >> 16) & 0xFFFF  # >> of a signed number copies the sign: mask it away
    x *= 0x7FEB352D
    x ^= second  # in the middle, so that two streams are not one stream shifted
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    mantissa: Tensor = (x >> 8) & 0xFFFFFF
    return mantissa.to(torch.float32) / (1 << 24)


@hashed.on("cpu")
def _hashed_on_cpu(device: torch.device, numel: int, first: int, second: int) -> Tensor:
    if numel < _MANY:
        return hashed.anywhere(device, numel, first, second)
    numbers = np.empty(numel, np.float32)
    each(
        lambda some: fill_uniform(numbers[some], first + some.start, second),
        slices_of(numel, 1),
    )
    return torch.from_numpy(numbers)


@compiled
def fill_uniform(out: NDArray[Any], first: int, second: int) -> None:
    """The numbers of `uniform` in one pass over memory.

    Args:
        out: takes them, fp32.
        first: key, an int32, and the index of the first one, added.
        second: likewise.
    """
    for i in range(len(out)):
        x = (i + first) & 0xFFFFFFFF
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= second & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        x ^= x >> 16
        out[i] = np.float32(np.int32(x >> 8)) * np.float32(1 / (1 << 24))  # both exact


def normal(generator: torch.Generator, numel: int, device: torch.device) -> Tensor:
    """Standard normal fp32 numbers, the same for every device; shape [numel].

    The inverse distribution function of `uniform`'s numbers, each in the middle of its interval. It
    is computed on the CPU, as functions round otherwise on other devices, and in fp64, so that its
    rounding to fp32 hides in what way the CPU's own differ.
    """
    middle = uniform(generator, numel, torch.device("cpu")).double() + 0.5 / (1 << 24)
    numbers: Tensor = torch.special.ndtri(middle)
    return numbers.to(device, torch.float32)


@contextmanager
def stage_randomness(
    device: torch.device, seed: int, step: int, stage: int, microbatch: int
) -> Iterator[None]:
    """Runs a block whose dropout depends on (seed, step, stage, microbatch) alone.

    The surrounding state of the device's generator is put back afterwards. Recomputing a
    stage under the same arguments draws the same numbers.
    """
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(derive_seed("stage", seed, step, stage, microbatch))
    try:
        yield
    finally:
        generator.set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch draws from on ``device`` where it is given none."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
