"""Sizes on the wire of one tensor with each method, the error it arrives with, and the time.

    python -m recipes.bench.wire_sizes
    python -m recipes.bench.wire_sizes --shape 32 64 32 32 --relu topk:0.1+fp16 quant:4

The tensor is normally distributed fp32 (with ``--relu`` its negative half is zero, as a ReLU does).
Ratios are payload bytes, without the 16-byte header of a message, over the tensor's own bytes, and
over those that it would have in bf16. Without specs: those of docs/methods that need no earlier
message.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from tabulate import tabulate

import mpcomp

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
