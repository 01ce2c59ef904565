"""Compressors under hard tensors: what is finite arrives so, and no NaN is hidden.

    python -m recipes.lab.codec_fuzz --tensors 1000000

Each tensor, drawn by its number and the seed, goes through one compressor after the other (or, with
``--every``, through all of them). A fault is a finite tensor that arrives with a number that is not
(`NONFINITE`), a NaN of which nothing that is not finite arrives although it was sent (`HIDDEN`),
another shape or dtype, or an exception. (Entropy coders have no code for a NaN: the status in a
message's header alone tells of it.) The closing table counts trials and faults by kind of tensor;
below it stands the first fault of each compressor and kind, with the number that ``--first`` draws
it by again, with ``--every``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import mpcomp
from mpcomp import Compressor, TensorMeta
from mpcomp.compressors import Rotate, Selecting
from mpcomp.core.randomness import generator_for
from mpcomp.core.wire import Payload

#: Every compressor, in settings that take different ways through its code.
SPECS: Final = (
    *("none", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"),
    *("topk:0.1", "topk:0.3:scope=row", "topk:0.2+fp16", "topk:0.3+quant:4:rounding=stochastic"),
    *("topk:0.3:scope=tensor+sign", "randomk:0.2", "randomk:0.05:unbiased=true"),
    *("randomk:0.3:unbiased=true+quant:8", "randomblock:0.1", "randomblock:0.1:unbiased=true"),
    *("randomblock:0.2:unbiased=true+fp16", "sampledtopk:0.1", "redsynctopk:0.1"),
    *("redsynctopk:0.1:search=binary", "samesign:0.1", "samesign:0.3:sign=positive", "meanvalue"),
    *("multilevel:keep=0.1+topk:0.3", "multilevel:keep=0.1+randomk:0.5:unbiased=true"),
    *("multilevel:keep=0.05+samesign:0.3", "quant:1", "quant:4", "quant:8", "quant:2:mode=maxabs"),
    *("quant:4:rounding=stochastic", "quant:4:scale=token", "quant:3:scale=channel"),
    *("quant:5:scale=7:mode=minmax:rounding=stochastic", "lloyd:1", "lloyd:4:scale=channel"),
    *("lloyd:3:scale=tensor", "rotate+quant:4:scale=token", "rotate+lloyd:2"),
    *("rotate+randomk:0.3:unbiased=true", "rotate+step:0.5", "fixed:1", "fixed:4"),
    *("fixed:7:scale=tensor", "qsgd:2", "qsgd:4:group=16", "onebit", "lowrank:1"),
    *("lowrank:2:iterations=0", "sign", "sign:token", "sign:24", "step:0.5"),
    *("step:0.35:centre=true", "step:0.02:dead_zone=0.75", "step:2:scale=tensor"),
    "step:2:scale=tensor:rounding=dither",
)
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
SHAPES: Final = ((37,), (5, 23), (1, 64), (3, 6, 5, 4))

NONFINITE: Final = "finite, arrives as inf or NaN"
HIDDEN: Final = "NaN, arrives as finite"


def _signs(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 2, shape, generator=draw).double() * 2 - 1


def _scales(draw: torch.Generator, shape: tuple[int, ...], finfo: torch.finfo) -> Tensor:
    """Magnitudes over the whole range of a dtype, subnormal ones included."""
    low, high = math.log2(finfo.smallest_normal) - 8, math.log2(finfo.max)
    return (torch.rand(shape, generator=draw, dtype=torch.float64) * (high - low) + low).exp2()


def _outlier(draw: torch.Generator, shape: tuple[int, ...], finfo: torch.finfo) -> Tensor:
    size = 10.0 ** int(torch.randint(-6, 3, (), generator=draw))
    x = torch.randn(shape, generator=draw, dtype=torch.float64) * size
    at = int(torch.randint(0, x.numel(), (), generator=draw))
    x.view(-1)[at] = finfo.max * float(_signs(draw, ()))
    return x


def _constant(draw: torch.Generator, shape: tuple[int, ...], finfo: torch.finfo) -> Tensor:
    return (_scales(draw, (), finfo) * _signs(draw, ())).expand(shape).clone()


def _with_nan(draw: torch.Generator, shape: tuple[int, ...], finfo: torch.finfo) -> Tensor:
    x = torch.randn(shape, generator=draw, dtype=torch.float64)
    x.view(-1)[int(torch.randint(0, x.numel(), (), generator=draw))] = torch.nan
    return x


#: What hard tensors are like: a generator, a shape and a dtype's limits make one, in fp64.
KINDS: Final[Mapping[str, Callable[[torch.Generator, tuple[int, ...], torch.finfo], Tensor]]] = {
    "normal": lambda draw, shape, _: torch.randn(shape, generator=draw, dtype=torch.float64),
    "largest": lambda draw, shape, finfo: _signs(draw, shape) * finfo.max,
    "all the largest": lambda draw, shape, finfo: (_signs(draw, ()) * finfo.max).expand(shape),
    "near the largest": lambda draw, shape, finfo: (
        (torch.rand(shape, generator=draw, dtype=torch.float64) * 2 - 1) * finfo.max
    ),
    "subnormal": lambda draw, shape, finfo: (
        torch.randn(shape, generator=draw, dtype=torch.float64) * finfo.smallest_normal / 16
    ),
    "mixed scales": lambda draw, shape, finfo: _signs(draw, shape) * _scales(draw, shape, finfo),
    "constant": _constant,
    "one outlier": _outlier,
    "sparse": lambda draw, shape, finfo: (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        * (torch.rand(shape, generator=draw) < 0.1)
        * finfo.max
        / 8
    ),
    "one NaN": _with_nan,
}


def tensor_of(number: int, seed: int = 0) -> tuple[str, Tensor]:
    """The kind of a tensor, and the tensor: kinds, then dtypes, then shapes take turns."""
    names = list(KINDS)
    kind = names[number % len(names)]
    number_of_kind = number // len(names)
    dtype = DTYPES[number_of_kind % len(DTYPES)]
    shape = SHAPES[number_of_kind // len(DTYPES) % len(SHAPES)]
    finfo = torch.finfo(dtype)
    x = KINDS[kind](generator_for("fuzz", seed, number), shape, finfo)
    return kind, x.clamp(-finfo.max, finfo.max).to(dtype).contiguous()


def fault_of(compressor: Compressor, x: Tensor, seed: int = 0) -> str | None:
    """The fault in what arrives for ``x``; None if there is none."""
    meta = TensorMeta.of(x)
    try:
        payload = compressor.compress(x, generator_for("codec", seed))
        y = compressor.decompress(payload, meta, generator_for("codec", seed))
        sent = _sent(compressor, x, payload, seed)
    except Exception as error:  # whatever it is, it is what this looks for
        return f"{type(error).__name__}: {error}"
    if y.shape != x.shape or y.dtype != x.dtype:
        return f"arrives as {list(y.shape)} {y.dtype}"
    if bool(x.isfinite().all()):
        return None if bool(y.isfinite().all()) else NONFINITE
    if compressor.variable_length:
        return None
    if bool(sent.isfinite().all()):  # what was not chosen is not in the message
        return None
    return HIDDEN if bool(y.isfinite().all()) else None


def _sent(compressor: Compressor, x: Tensor, payload: Payload, seed: int) -> Tensor:
    """The elements of ``x``, or of what a rotation makes of it, that a message tells of."""
    if isinstance(compressor, Rotate):
        return _sent(compressor.inner, compressor.rotate(x), payload, seed)
    if isinstance(compressor, Selecting):
        meta = TensorMeta.of(x)
        chosen = compressor.indices(payload, meta, generator_for("codec", seed))
        return meta.flatten(x).reshape(-1)[chosen]
    return x


def fuzz(
    compressors: Sequence[Compressor],
    numbers: range,
    *,
    seed: int = 0,
    every: bool = False,
    progress: bool = False,
) -> tuple[Counter[str], dict[tuple[str, str], tuple[int, str]], Counter[str]]:
    """Sends tensors through compressors.

    Args:
        compressors: each gets tensors of all kinds, dtypes and shapes in turn.
        numbers: of the tensors.
        seed: of what is drawn.
        every: each tensor through all compressors, not through one.
        progress: show a bar.

    Returns:
        Trials by kind; of each compressor and kind with a fault the number of the first tensor and
        what it was; faults by kind.
    """
    trials: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    first: dict[tuple[str, str], tuple[int, str]] = {}
    turns = len(KINDS) * len(DTYPES) * len(SHAPES)
    for number in tqdm(numbers, unit="tensor", disable=not progress):
        kind, x = tensor_of(number, seed)
        chosen = compressors if every else [compressors[number // turns % len(compressors)]]
        for compressor in chosen:
            trials[kind] += 1
            fault = fault_of(compressor, x, number)
            if fault is not None:
                faults[kind] += 1
                first.setdefault((str(compressor), kind), (number, fault))
    return trials, first, faults


def main(argv: Sequence[str] | None = None) -> None:
    """Sends the tensors, and prints the table; ends with an error if there is a fault."""
    options = parse_args(argv)
    if options.tensors < 1 or options.first < 0:
        sys.exit(
            f"error: tensors is {options.tensors}, first is {options.first}; pass at least 1, 0"
        )
    torch.set_num_threads(1)
    compressors = [mpcomp.parse(spec) for spec in options.compressors]
    strange = [str(one) for one in compressors if not isinstance(one, Compressor)]
    if strange:
        sys.exit(f"error: {strange[0]} is no compressor; pass specs such as topk:0.1")
    numbers = range(options.first, options.first + options.tensors)
    trials, first, faults = fuzz(
        compressors, numbers, seed=options.seed, every=options.every, progress=True
    )
    rows = [[kind, trials[kind], faults[kind]] for kind in KINDS]
    rows.append(["all", sum(trials.values()), sum(faults.values())])
    print(tabulate(rows, headers=["kind", "trials", "faults"]))
    for (spec, kind), (number, fault) in first.items():
        print(f"{spec}, {kind}, tensor {number}: {fault}")
    if first:
        sys.exit(1)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, default=100_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", action="store_true", help="each through all compressors")
    parser.add_argument("--compressors", nargs="+", default=SPECS, metavar="SPEC")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
