"""Sizes on the wire of one tensor with each method, the error it arrives with, and the time.

    python -m recipes.bench.wire_sizes
    python -m recipes.bench.wire_sizes --shape 32 64 32 32 --relu topk:0.1+fp16 quant:4
    python -m recipes.bench.wire_sizes --lanes recorded.safetensors step:0.35:centre=true

The tensor is normally distributed fp32 (with ``--relu`` its negative half is zero, as a ReLU does).
Ratios are payload bytes, without the 16-byte header of a message, over the tensor's own bytes, and
over those that it would have in bf16. Without specs: those of docs/methods that need no earlier
message.

With ``--lanes`` the entropy coder's kinds are compared (`mpcomp.entropy.lanes`) on the integers of
a method `ECSQ`. Tensors are recorded ones, as `recipes.lab.rate_audit --record` writes them, and
drawn ones beside them. Kinds take turns, and the processor's time is counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tabulate import tabulate
from torch import Tensor

import mpcomp
from mpcomp import entropy
from mpcomp.compressors.rounding import parts_of
from mpcomp.compressors.tokens import Tokens

#: Shape -> what is measured of it; vectors of 1024 elements for what codes each by itself.
SPECS: Final[Mapping[tuple[int, ...], tuple[str, ...]]] = {
    (16, 65536): (
        "none", "bf16", "fp16", "fp8", "fp8_e5m2", "topk:0.1", "topk:0.1+fp16", "topk:0.1+quant:8",
        "topk:0.01+fp16", "randomk:0.1", "randomk:0.1+fp16", "randomblock:0.1+fp16", "quant:8",
        "quant:4", "quant:2", "quant:4:scale=128", "fixed:4:scale=tensor", "sign", "qsgd:4",
        "sampledtopk:0.01+fp16", "redsynctopk:0.01+fp16", "multilevel:0.01+topk:0.1",
        "samesign:0.01",
    ),
    (1024, 1024): (
        "quant:4:scale=token", "lloyd:3", "lloyd:2", "rotate+lloyd:3", "rotate+quant:4:scale=token",
        "step:0.5", "onebit", "lowrank:4",
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    options = parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.lanes is not None:
        print(_lanes_table(options))
        return
    if options.specs:
        print(_table(options.shape or next(iter(SPECS)), options.specs, options))
        return
    for shape, specs in SPECS.items():
        print(_table(options.shape or shape, specs, options))


def _table(shape: Sequence[int], specs: Sequence[str], options: argparse.Namespace) -> str:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if options.relu:
        x = x.relu()
    rows = []
    for spec in specs:
        try:
            compressor = mpcomp.parse(spec)
        except ValueError as error:
            sys.exit(f"error: {error}")
        if not isinstance(compressor, mpcomp.Compressor):
            sys.exit(f"error: {spec} depends on what was sent before; name a compressor")
        rows.append(measure(compressor, x, options.repeats))
    headers = (
        *("spec", "bytes / fp32 bytes", "/ bf16 bytes", "relative error"),
        *("compress ms", "decompress ms"),
    )
    return (
        f"{tabulate(rows, headers, disable_numparse=True)}\n"
        f"{list(x.shape)} fp32, {options.repeats} repeats: median (quartiles), "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )


class _Integers(mpcomp.ECSQ):
    """`ECSQ` that keeps what it codes."""

    def encode_elements(self, q: Tensor, tokens: Tokens, dither: Tensor | None) -> Tensor:
        offsets = None if dither is None else parts_of(dither, entropy.PARTS).numpy()
        _coded[:] = [(q.numpy(), offsets)]
        return super().encode_elements(q, tokens, dither)


_coded: list[tuple[NDArray[np.int16], NDArray[np.int8] | None]] = []


def _lanes_table(options: argparse.Namespace) -> str:
    """Lanes against the kinds before them, for each tensor and spec."""
    torch.set_num_threads(1)
    tensors = load_file(options.lanes)
    shape = next(iter(tensors.values())).shape
    drawn = torch.Generator().manual_seed(0)
    tensors["Gaussian"] = torch.randn(shape, generator=drawn)
    tensors["Laplace"] = torch.empty(shape).exponential_(generator=drawn) - torch.empty(
        shape
    ).exponential_(generator=drawn)
    rows = []
    for spec in options.specs or ("step:0.35:centre=true", "step:1:rounding=dither"):
        method = mpcomp.parse(spec)
        if type(method) is not mpcomp.ECSQ:
            sys.exit(f"error: {spec} is not step:...; its integers are what is coded here")
        codec = _Integers(**vars(method))
        for name, x in tensors.items():
            codec.compress(x, torch.Generator().manual_seed(1))
            rows.append([spec, name, *_lanes_row(*_coded[0], options.repeats)])
    headers = (
        *("spec", "tensor", "elements", "bits before", "bytes more %"),
        *("encode before / lanes", "decode before / lanes"),
    )
    note = f"one thread, {options.repeats} repeats by turns: median (quartiles) of ratios of times"
    return f"{tabulate(rows, headers, disable_numparse=True)}\n{note}\n"


def _lanes_row(q: NDArray[np.int16], offsets: NDArray[np.int8] | None, repeats: int) -> list[str]:
    """One row of that table."""
    before, after = (entropy.encode(q, None, offsets, in_lanes=on) for on in (False, True))
    rows, columns = q.shape
    ratios = []
    for _ in range(1 + repeats):
        seconds = []
        for message, on in ((before, False), (after, True)):
            start = time.thread_time()
            entropy.encode(q, None, offsets, in_lanes=on)
            encoded = time.thread_time()
            found = entropy.decode(message, rows, columns, None, offsets)
            seconds.append((encoded - start, time.thread_time() - encoded))
            assert np.array_equal(found, q)
        ratios.append([a / b for a, b in zip(*seconds, strict=True)])
    quartiles = (statistics.quantiles(each, n=4) for each in zip(*ratios[1:], strict=True))
    return [
        f"{q.size:,}",
        f"{8 * len(before) / q.size:.2f}",
        f"{100 * (len(after) / len(before) - 1):+.2f}" if after[0] != before[0] else "not taken",
        *(f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in quartiles),
    ]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench.wire_sizes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("specs", nargs="*", metavar="SPEC", help="compressors to measure")
    add("--shape", type=int, nargs="+", help="of the tensor")
    add("--relu", action="store_true", help="zero the negative half")
    add("--repeats", type=int, default=15)
    add("--threads", type=int, help="of torch")
    add("--lanes", metavar="SAFETENSORS", help="compare the coder's kinds on recorded tensors")
    return parser.parse_args(argv)


def measure(compressor: mpcomp.Compressor, x: torch.Tensor, repeats: int) -> list[Any]:
    """One row of the table."""
    meta = mpcomp.TensorMeta.of(x)

    def draw() -> torch.Generator:
        return torch.Generator().manual_seed(1)

    payload = compressor.compress(x, draw())
    arrived = compressor.decompress(payload, meta, draw())
    sent = sum(part.numel() * part.element_size() for part in payload)
    error = ((arrived - x).norm() / x.norm()).item()
    return [
        str(compressor),
        f"{sent / meta.dense_bytes:.4f}",
        f"{2 * sent / meta.dense_bytes:.4f}",
        f"{error:.4f}",
        timed(lambda: compressor.compress(x, draw()), repeats),
        timed(lambda: compressor.decompress(payload, meta, draw()), repeats),
    ]


def timed(function: Callable[[], object], repeats: int) -> str:
    """Milliseconds of a call: median (quartiles)."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    if len(times) == 1:
        return f"{times[0]:.1f}"
    low, median, high = statistics.quantiles(times, n=4)
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


if __name__ == "__main__":
    main()
