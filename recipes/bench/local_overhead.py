"""The cost of the local engine over torchgpipe alone, measured side by side in one process.

    python -m recipes.bench.local_overhead --width 64 --batch 32 --repeats 20

The same stages, microbatches and data; the variants take turns within each repetition, so that a
slow moment of the machine meets all of them, and each time is divided by that of torchgpipe in the
same repetition. A step is forward, loss and backward; gradients are zeroed outside of the clock.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torchgpipe import GPipe
from tqdm import tqdm

import mpcomp
import stages
from recipes.bench.report import quartiles
from recipes.bench.workers import rotated
from recipes.image_config import MODELS

REFERENCE: Final = "torchgpipe"
# What mpcomp adds at a cut, least first.
METHODS: Final[Mapping[str, str]] = {"mpcomp none": "none", "mpcomp topk:0.1": "topk:0.1"}
NUM_STAGES: Final = 4

Step = Callable[[], Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes the figures."""
    options = parse_args(argv)
    for name in ("width", "batch", "chunks", "repeats", "threads"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            sys.exit(f"error: {name} is {getattr(options, name)}; pass at least 1")
    if options.chunks > options.batch:
        sys.exit(f"error: chunks is {options.chunks}; pass at most --batch ({options.batch})")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    seconds = measure(variants(options), repeats=options.repeats, warmups=options.warmups)
    figures = summarise(seconds)
    headers = ("variant", "ms a step, median", "quartiles", "ratio, median", "quartiles", "n")
    rows = [
        (
            name,
            f"{1e3 * one['median_s']:.1f}",
            "{:.1f} to {:.1f}".format(*(1e3 * quartile for quartile in one["quartiles_s"])),
            f"{one['median_ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*one["quartiles_ratio"]),
            options.repeats,
        )
        for name, one in figures.items()
    ]
    print(tabulate(rows, headers, disable_numparse=True))
    if options.out is not None:
        settings = {**vars(options), "out": None, "torch_threads": torch.get_num_threads()}
        del settings["out"]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"settings": settings, "variants": figures}, indent=2))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench.local_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=MODELS[:2], default="resnet18")
    add("--width", type=int, default=64)
    add("--batch", type=int, default=32)
    add("--chunks", type=int, default=4)
    add("--repeats", type=int, default=20)
    add("--warmups", type=int, default=2, help="steps of each variant before the clock runs")
    add("--threads", type=int, help="of torch")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args(argv)


def variants(options: argparse.Namespace) -> dict[str, tuple[nn.Module, Step]]:
    """Name -> (module, a training step of it), all from the same weights on the same batch."""
    generator = torch.Generator().manual_seed(options.seed)
    x = torch.randn(options.batch, 3, 32, 32, generator=generator)
    y = torch.randint(10, (options.batch,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model: nn.Module = getattr(stages, options.model)(num_classes=10, width=options.width)

    gpipe = GPipe(
        nn.Sequential(*stages.split(copy.deepcopy(model), "paper")),
        balance=[1] * NUM_STAGES,
        devices=["cpu"] * NUM_STAGES,
        chunks=options.chunks,
        checkpoint="never",
    )

    def gpipe_step() -> Tensor:
        loss = F.cross_entropy(gpipe(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    made: dict[str, tuple[nn.Module, Step]] = {REFERENCE: (gpipe, gpipe_step)}
    for name, spec in METHODS.items():
        pipe = mpcomp.pipeline(
            copy.deepcopy(model),
            chunks=options.chunks,
            split="paper",
            act_comp=spec,
            grad_comp=spec,
            loss_fn=F.cross_entropy,
        )
        made[name] = (pipe, lambda pipe=pipe: pipe.forward_backward(x, y))  # type: ignore[misc]
    return made


def measure(
    made: Mapping[str, tuple[nn.Module, Step]], *, repeats: int, warmups: int
) -> dict[str, list[float]]:
    """Name -> seconds of each step; the order within a repetition rotates."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    names = list(made)
    for repeat in tqdm(range(-warmups, repeats), unit="round"):
        for name in rotated(names, repeat):
            module, step = made[name]
            module.zero_grad()
            start = time.perf_counter()
            step()
            elapsed = time.perf_counter() - start
            if repeat >= 0:
                seconds[name].append(elapsed)
    return seconds


def summarise(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Medians and quartiles of the times, and of the ratios to torchgpipe in the same round."""
    figures = {}
    for name, times in seconds.items():
        ratios = [own / base for own, base in zip(times, seconds[REFERENCE], strict=True)]
        figures[name] = {
            "median_s": statistics.median(times),
            "quartiles_s": quartiles(times),
            "median_ratio": statistics.median(ratios),
            "quartiles_ratio": quartiles(ratios),
        }
    return figures


if __name__ == "__main__":
    main()
