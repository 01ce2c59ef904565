"""The part of `recipes.bench.gpu_check` about lanes: bytes and speeds beside the other kinds.

    python -m recipes.bench.gpu_check --parts lanes

Whole numbers of a message are coded on the host, as other kinds and in lanes, and on a GPU in
lanes: blocks alone, by their kernels, and whole messages, whose tables are the host's.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpcomp import entropy
from mpcomp.core import kernels
from mpcomp.core.kernels import KERNELS
from mpcomp.core.randomness import generator_for
from mpcomp.core.spec import parse
from recipes.bench.gpu_kernels import Call, in_triton, noted
from recipes.bench.gpu_parts import device_of
from recipes.bench.jobs import Reporter
from stages.clock import now

__all__ = ["lanes"]

METHODS: Final = ("step:0.35:centre=true", "step:1:rounding=dither")
SHAPE: Final = (8, 1024, 1024)
DRY_SHAPE: Final = (8, 128, 512)
REPEATS: Final = 3
PUSHED, POPPED = "entropy.lanes.pushed", "entropy.lanes.popped"


def lanes(reporter: Reporter, dry: bool) -> None:
    """Reports bytes of each kind, and GB/s of whole numbers; a dry run asks no kernel."""
    x = torch.randn(DRY_SHAPE if dry else SHAPE, generator=torch.Generator().manual_seed(0))
    for method in METHODS:
        for row in _rows_of(method, x.bfloat16(), 1 if dry else REPEATS, dry):
            reporter.say({"method": method, **row})
            if reporter.left_s <= 0:
                return


def _rows_of(method: str, x: Tensor, repeats: int, dry: bool) -> Iterator[dict[str, Any]]:
    q, image, offsets = _numbers_of(method, x)
    rows, columns = q.shape

    def encode(in_lanes: bool) -> NDArray[np.uint8]:
        return entropy.encode(q, image, offsets, in_lanes=in_lanes)

    def decode(message: NDArray[np.uint8]) -> NDArray[np.int16]:
        return entropy.decode(message, rows, columns, image, offsets)

    for kind, in_lanes in (("before", False), ("lanes", True)):
        message = encode(in_lanes)
        same = np.array_equal(decode(message), q)
        yield {
            **{"kind": kind, "coded_on": "host", "num_bytes": len(message), "same": same},
            "encode_gb_s": _gb_s(q.nbytes, repeats, partial(encode, in_lanes)),
            "decode_gb_s": _gb_s(q.nbytes, repeats, partial(decode, message)),
        }
    if dry or importlib.util.find_spec("triton") is None:
        return
    in_triton()  # loads them
    with noted() as calls:
        decode(encode(True))
    asked = {call.name: call for call in calls}
    if PUSHED not in asked:
        raise RuntimeError(f"{method}: no lanes, as another kind takes fewer bytes")
    pushed, popped = asked[PUSHED], asked[POPPED]
    yield {
        **{"kind": "lanes, blocks alone", "coded_on": "GPU", "num_bytes": None},
        "same": not any(call.differing(device_of(dry)) for call in (pushed, popped)),
        "encode_gb_s": _kernel_gb_s(pushed, q.nbytes),
        "decode_gb_s": _kernel_gb_s(popped, q.nbytes),
    }
    device = device_of(dry)
    there = torch.from_numpy(q).to(device)
    by = None if offsets is None else torch.from_numpy(offsets).to(device)
    # Kernels are on, whatever the environment says.
    with mock.patch.object(kernels, "_in_triton", return_value=True):
        encode_there = partial(entropy.encode_tensor, there, image, by)
        coded = encode_there()
        decode_there = partial(entropy.decode_to, device, coded, rows, columns, image, by)
        yield {
            **{"kind": "lanes", "coded_on": "GPU", "num_bytes": len(coded)},
            "same": np.array_equal(coded.numpy(), encode(True))
            and torch.equal(decode_there(), there),
            "encode_gb_s": _gb_s(q.nbytes, repeats, encode_there),
            "decode_gb_s": _gb_s(q.nbytes, repeats, decode_there),
        }


def _numbers_of(method: str, x: Tensor) -> tuple[Any, ...]:
    """The arguments with which a method asks for the entropy coder: numbers, image, offsets."""
    encode, found = entropy.encode_tensor, list[tuple[Any, ...]]()

    def note(q: Tensor, image: Any, offsets: Tensor | None, **others: Any) -> Any:
        found.append((q.numpy(), image, None if offsets is None else offsets.numpy()))
        return encode(q, image, offsets, **others)

    with mock.patch.object(entropy, "encode_tensor", note):
        parse(method).compress(x, generator_for(0))
    return found[0]


def _kernel_gb_s(call: Call, num_bytes: int) -> float:
    there = call.on(device_of(False))
    run = KERNELS[call.name].by_device["cuda"]
    return _gb_s(num_bytes, REPEATS, lambda: run(*there.args))


def _gb_s(num_bytes: int, repeats: int, work: Callable[[], Any]) -> float:
    """The median of some, after what came before has compiled them."""
    seconds = []
    for _ in range(repeats):
        begin = now()
        work()
        seconds.append(now() - begin)
    return num_bytes / statistics.median(seconds) / 1e9
