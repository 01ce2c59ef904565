"""The cost of two selections when the second looks at the survivors of the first alone.

    python -m recipes.lab.multi_level --n 10000000 --repeats 7

An adaptive method such as GraVAC wants a gentle and a strict selection of the same gradient.
Direct, each looks at all elements; multi-level, the strict one looks at what the gentle one kept.
The two take turns within each repetition, so that a slow moment of the machine meets both, and the
time of the direct selections is divided by that of the multi-level ones in the same repetition. The
tensor is normally distributed fp32. Published: GraVAC (Tyagi & Swany, IEEE CLOUD 2023), table 3, on
V100 GPUs, for the gradients of ResNet101, VGG16 and an LSTM at compression factors 10 and 1000.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import mpcomp
from mpcomp.compressors import Selecting
from mpcomp.compressors.base import num_kept
from mpcomp.compressors.multi_level import levels
from stages.clock import now


class Published(NamedTuple):
    """Direct over multi-level time in GraVAC's table 3."""

    resnet101: float
    vgg16: float
    lstm: float


# Our method -> its name there and the published ratios. All selections here are exact in number,
# and all but the random one choose the largest magnitudes.
METHODS: Final[Mapping[str, tuple[str, Published]]] = {
    "topk": ("Top-k", Published(1.83, 1.49, 1.59)),
    "sampledtopk": ("DGC", Published(1.52, 1.27, 1.4)),
    "redsynctopk:search=binary": ("RedSync", Published(1.1, 1.16, 1.5)),
    "randomk": ("Random-k", Published(1.64, 1.34, 1.5)),
}
#: Positions of the gentle and of the strict selection.
Choices = tuple[Tensor, Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes the figures."""
    options = parse_args(argv)
    for name in ("n", "repeats", "threads"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            sys.exit(f"error: {name} is {getattr(options, name)}; pass at least 1")
    gentle, strict = options.cf
    if not 1 <= gentle <= strict:
        sys.exit(f"error: cf is {gentle:g} {strict:g}; pass two factors of 1 or more that ascend")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("error: device is cuda, of which there is none here; pass --device cpu")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    flat = torch.randn(options.n, generator=generator).to(device)
    figures = {}
    with tqdm(total=len(METHODS) * (options.warmups + options.repeats), unit="round") as bar:
        for spec in METHODS:
            figures[spec] = measure(method_of(spec, gentle), strict, flat, options, bar)
    print(tabulate(table(figures), HEADERS, disable_numparse=True))
    print(
        f"{options.n} fp32 elements, cf {gentle:g} and {strict:g}, {options.repeats} repeats: "
        f"median (quartiles), {device.type}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    if options.json is not None:
        settings = {**vars(options), "torch_threads": torch.get_num_threads()}
        del settings["json"]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"settings": settings, "methods": figures}, indent=2))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.multi_level",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--n", type=int, default=10_000_000, help="elements of the tensor")
    add("--cf", type=float, nargs=2, default=(10.0, 1000.0), metavar=("GENTLE", "STRICT"))
    add("--repeats", type=int, default=7)
    add("--warmups", type=int, default=1, help="rounds of each method before the clock runs")
    add("--threads", type=int, help="of torch")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="for the figures")
    return parser.parse_args(argv)


def method_of(spec: str, cf: float) -> Selecting:
    """A method of the list at compression factor ``cf``."""
    name, *settings = spec.split(":")
    method = mpcomp.parse(":".join([name, "1", *settings])).with_cf(cf)
    assert isinstance(method, Selecting)
    return method.over_tensor()


def direct(method: Selecting, cf: float, flat: Tensor, seed: int) -> Choices:
    """Both selections over the whole tensor."""
    generator = torch.Generator().manual_seed(seed)
    n = flat.numel()
    return (
        method.choose(flat, method.num_kept(n), generator),
        method.choose(flat, num_kept(1 / cf, n), generator),
    )


def multi_level(method: Selecting, cf: float, flat: Tensor, seed: int) -> Choices:
    """The second selection among the survivors of the first."""
    return levels(method, 1 / cf, flat, torch.Generator().manual_seed(seed))


def measure(
    method: Selecting, cf: float, flat: Tensor, options: argparse.Namespace, bar: Any
) -> dict[str, Any]:
    """Seconds of both ways, round by round, their ratio, and whether they chose alike.

    Args:
        method: at the gentle factor.
        cf: the strict factor.
        flat: the elements.
        options: those of the command.
        bar: progress, a step for each round.
    """
    ways: dict[str, Callable[[Selecting, float, Tensor, int], Choices]]
    ways = {"direct": direct, "multi_level": multi_level}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    chosen: dict[str, Choices] = {}
    for repeat in range(-options.warmups, options.repeats):
        names = list(ways) if repeat % 2 == 0 else list(reversed(ways))
        for name in names:
            start = now()
            chosen[name] = ways[name](method, cf, flat, options.seed + repeat + options.warmups)
            elapsed = now() - start
            if repeat >= 0:
                seconds[name].append(elapsed)
        bar.update()
    ratios = [a / b for a, b in zip(seconds["direct"], seconds["multi_level"], strict=True)]
    one, two = chosen["direct"], chosen["multi_level"]
    return {
        "direct_s": spread(seconds["direct"]),
        "multi_level_s": spread(seconds["multi_level"]),
        "ratio": spread(ratios),
        "kept": [positions.numel() for positions in two],
        "same_choice": all(torch.equal(a, b) for a, b in zip(one, two, strict=True)),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; of one value itself."""
    if len(values) < 2:
        low = median = high = values[0]
    else:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


HEADERS: Final = (
    "method",
    "published as",
    "direct ms",
    "multi-level ms",
    "direct / multi-level",
    "published: ResNet101, VGG16, LSTM",
    "same choice",
)


def table(figures: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The rows to print."""
    rows: list[tuple[str, ...]] = []
    for spec, figure in figures.items():
        name, published = METHODS[spec]
        rows.append(
            (
                spec,
                name,
                shown(figure["direct_s"], 1e3, 1),
                shown(figure["multi_level_s"], 1e3, 1),
                shown(figure["ratio"], 1, 2),
                ", ".join(f"{ratio:.2f}" for ratio in published),
                "yes" if figure["same_choice"] else "no",
            )
        )
    return rows


def shown(figure: Mapping[str, float], unit: float, digits: int) -> str:
    """Median (quartiles)."""
    median, low, high = (f"{figure[key] * unit:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


if __name__ == "__main__":
    main()
