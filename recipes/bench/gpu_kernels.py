"""The part of `recipes.bench.gpu_check` about kernels: are they right, and how fast are they?

    python -m recipes.bench.gpu_check --parts kernels
    compute-sanitizer python -m recipes.bench.gpu_kernels cuda      # some calls, on a GPU

What compressors ask of kernels on the CPU is asked of a GPU's again. They are right where each
result has the CPU's bits. A dry run interprets them on the CPU, which says nothing of how a GPU
divides or rounds.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from mpcomp import ECSQ
from mpcomp.compressors.base import Compressor
from mpcomp.core.checks import has_nonfinite
from mpcomp.core.context import TensorMeta
from mpcomp.core.kernels import KERNELS, Kernel
from mpcomp.core.randomness import generator_for
from mpcomp.core.spec import parse
from mpcomp.entropy import lanes
from recipes.bench.gpu_parts import device_of
from recipes.bench.jobs import Reporter
from stages.clock import now

__all__ = [
    "Call",
    "calls_of",
    "differing",
    "drawn",
    "in_triton",
    "kernels",
    "methods",
    "noted",
]

#: Of a message whose coding is timed, and methods that ask for every kernel.
SHAPE: Final = (8, 1024, 1024)
TIMED: Final = ("quant:4", "step:1:centre=true:rounding=dither", "topk:0.1")
REPEATS: Final = 20
#: Rounds of drawn arguments, and the most elements of each; of a dry run too.
ROUNDS, MOST = 12, 100_000
DRY_ROUNDS, DRY_MOST = 1, 2000

#: Kernels without operations of torch: where they do not run, the host codes.
ON_HOST: Final = ("entropy.lanes.popped", "entropy.lanes.pushed")
#: Results that may differ in their last bits: sums of many numbers.
SUMS: Final = ("compressors.rounding.norms_of", "compressors.rounding.sums_of")
_WHOLE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SCALES: Final = ("tensor", "sample", "channel", "token", "37", "128")


def kernels(reporter: Reporter, dry: bool) -> None:
    """Reports, of each kernel, calls that were compared with the CPU, and its speed."""
    if importlib.util.find_spec("triton") is None:
        reporter.say({"why_skipped": "Triton is not installed"})
    elif dry:
        # Apart, as Triton asks whether it is to interpret when it is loaded.
        command = [sys.executable, "-m", "recipes.bench.gpu_kernels"]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        for line in told.stdout.splitlines():
            reporter.say(json.loads(line))
    else:
        _report(reporter)


def _report(reporter: Reporter) -> None:
    device, until = device_of(False), now() + reporter.left_s / 2
    rows = _compared(device, ROUNDS, MOST, until)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    for method in TIMED:
        for call in calls_of(method, x):
            if call.name in rows and reporter.left_s > 0:
                rows[call.name] |= _speeds(call.on(device))
    for row in rows.values():
        reporter.say(row)


def _compared(
    device: torch.device, rounds: int, most: int, until: float
) -> dict[str, dict[str, Any]]:
    """The row of each kernel, without speeds.

    Args:
        device: of the kernels.
        rounds: of drawn arguments.
        most: elements of each.
        until: no call is begun after this time.
    """
    row = {"calls": 0, "differing": 0, "gb_s": None, "torch_gb_s": None}
    rows: dict[str, dict[str, Any]] = {name: {"kernel": name, **row} for name in in_triton()}
    generator = torch.Generator().manual_seed(0)
    for method in methods(generator) * rounds:
        for call in calls_of(method, drawn(generator, most)):
            if call.name in rows and now() < until:
                rows[call.name]["calls"] += 1
                rows[call.name]["differing"] += call.differing(device) > 0
    return rows


def _speeds(call: Call) -> dict[str, float]:
    """GB/s of a kernel and of what runs in its place, by arguments and results."""
    kernel = KERNELS[call.name]
    else_on = call.on(torch.device("cpu")) if call.name in ON_HOST else call
    ways = (("gb_s", kernel.by_device["cuda"], call), ("torch_gb_s", kernel.anywhere, else_on))
    speeds = {}
    for of, run, (_, args) in ways:
        num_bytes = _num_bytes(args) + _num_bytes((torch.as_tensor(run(*args)),))
        begin = now()
        for _ in range(REPEATS):
            run(*args)
        speeds[of] = REPEATS * num_bytes / (now() - begin) / 1e9
    return speeds


def _num_bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_num_bytes, argument)) if isinstance(argument, tuple) else 0


class Call(NamedTuple):
    """A request to a kernel.

    Attributes:
        name: of the kernel.
        args: its arguments.
    """

    name: str
    args: tuple[Any, ...]

    def on(self, device: torch.device) -> Call:
        """The same of tensors on a device."""
        return Call(self.name, _moved(self.args, device))

    def differing(self, device: torch.device) -> int:
        """Elements of the result by a GPU's kernel that differ from the CPU's.

        Args:
            device: whose kernel it is; the CPU interprets it.
        """
        kernel = KERNELS[self.name]
        expected = kernel.by_device.get("cpu", kernel.anywhere)(*self.args)
        found = kernel.by_device["cuda"](*self.on(device).args)
        return differing(found, expected, exact=self.name not in SUMS)


def _moved(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, Tensor):
        return argument.to(device)
    if isinstance(argument, torch.device):
        return device
    if isinstance(argument, tuple):
        moved = [_moved(each, device) for each in argument]
        return type(argument)(*moved) if hasattr(argument, "_fields") else tuple(moved)
    return argument


def differing(found: Any, expected: Any, *, exact: bool = True) -> int:
    """Elements of two results that have other bits; where shape or type differ, all.

    Args:
        found: a tensor or an array; NaN is equal to NaN, of which devices have their own.
        expected: likewise.
        exact: else a relative difference of 1e-12 counts for nothing.
    """
    found, expected = torch.as_tensor(found).cpu(), torch.as_tensor(expected).cpu()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return max(1, int(expected.numel()))
    if not exact:
        return int((~torch.isclose(found, expected, rtol=1e-12, atol=1e-12)).sum())
    whole = _WHOLE[expected.dtype.itemsize]
    other = found.contiguous().view(whole) != expected.contiguous().view(whole)
    return int((other & ~((found != found) & (expected != expected))).sum())


def in_triton() -> list[str]:
    """The kernels that are written for GPUs."""
    import mpcomp.gpu  # noqa: F401 - fills the table; it needs Triton

    return sorted(name for name, kernel in KERNELS.items() if "cuda" in kernel.by_device)


def calls_of(method: str, x: Tensor) -> list[Call]:
    """Requests to kernels by a look for NaN, coding a tensor, and decoding the message."""
    compressor: Compressor = parse(method)
    if isinstance(compressor, ECSQ):
        compressor = replace(compressor, lanes=True)
    with noted() as calls, _all_in_lanes():
        has_nonfinite(x)
        payload = compressor.compress(x, generator_for(0))
        compressor.decompress(payload, TensorMeta.of(x), generator_for(0))
    return calls


@contextmanager
def noted() -> Iterator[list[Call]]:
    """A context that notes what kernels are asked, with arguments as they are then."""
    calls = list[Call]()
    call = Kernel.__call__

    def note(kernel: Kernel[..., Any], *args: Any) -> Any:
        calls.append(Call(_name_of(kernel), _copied(args)))
        return call(kernel, *args)

    with mock.patch.object(Kernel, "__call__", note):
        yield calls


@contextmanager
def _all_in_lanes() -> Iterator[None]:
    """Lanes are taken by few integers too, in small blocks, and where another kind is shorter."""
    small: dict[str, Any] = {"MANY": 1, "_MOST": math.inf, "_LEAST": 10, "_LARGEST": 10}
    with mock.patch.multiple(lanes, **small):
        yield


def _name_of(kernel: Kernel[..., Any]) -> str:
    return next(name for name, each in KERNELS.items() if each is kernel)


def _copied(argument: Any) -> Any:
    """Tensors as they are now, in their own layout."""
    if isinstance(argument, Tensor):
        return argument.detach().clone()
    if isinstance(argument, tuple):
        copied = [_copied(each) for each in argument]
        return type(argument)(*copied) if hasattr(argument, "_fields") else tuple(copied)
    return argument


def methods(generator: torch.Generator) -> list[str]:
    """A method for each form that a kernel has, with the rest drawn."""
    scales = [_one_of(generator, *_SCALES) for _ in range(8)]
    modes = [_one_of(generator, "minmax", "maxabs") for _ in range(8)]
    roundings = [_one_of(generator, "nearest", "stochastic") for _ in range(8)]
    each = zip(range(1, 9), scales, modes, roundings, strict=True)
    return [
        *(f"quant:{b}:scale={s}:mode={m}:rounding={r}" for b, s, m, r in each),
        "step:0.3:centre=true:spikes=16",
        "step:0.5:dead_zone=0.8",
        "step:1:scale=tensor",
        "step:0.7:rounding=dither",
        "step:0.4:centre=true:rounding=dither",
        *(f"topk:0.1:scope={scope}" for scope in ("row", "sample", "tensor")),
    ]


def drawn(generator: torch.Generator, most: int) -> Tensor:
    """A tensor of up to ``most`` elements: any shape, type, layout, and kind of numbers.

    Among those are exact quotients and halves, the smallest and largest numbers, only zeros, those
    of a ReLU, and NaN and infinities.
    """
    dims = int(torch.randint(1, 5, (), generator=generator))
    sizes, left = [], most
    for _ in range(dims - 1):
        sizes.append(_size(generator, int(left ** (1 / 2))))
        left //= sizes[-1]
    shape = (*sizes, _size(generator, left))
    x = torch.randn(shape, generator=generator)
    kind = _one_of(generator, "normal", "halves", "wide", "zero", "relu", "broken")
    if kind == "halves":
        x = torch.randint(-40, 41, shape, generator=generator) * 0.46875
    elif kind == "wide":
        x *= torch.exp2(torch.randint(-140, 127, shape, generator=generator).float())
    elif kind == "zero":
        x.zero_()
    elif kind == "relu":
        x.relu_()
    elif kind == "broken":
        places = torch.randint(x.numel(), (3,), generator=generator)
        x.view(-1)[places] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    x = x.to(_one_of(generator, torch.float32, torch.bfloat16, torch.float16))
    if dims == 4 and _one_of(generator, False, True):
        x = x.contiguous(memory_format=torch.channels_last)
    return x


def _size(generator: torch.Generator, most: int) -> int:
    """A size from 1 on, as often small as large, as often a multiple of 64 as not."""
    size = int(most ** float(torch.rand((), generator=generator)))
    return min(most, size if _one_of(generator, False, True) else -(-size // 64) * 64)


def _one_of(generator: torch.Generator, *what: Any) -> Any:
    return what[int(torch.randint(len(what), (), generator=generator))]


if __name__ == "__main__":
    _on = torch.device(*(sys.argv[1:] or ["cpu"]))
    for each in _compared(_on, DRY_ROUNDS, DRY_MOST, math.inf).values():
        print(json.dumps(each))
