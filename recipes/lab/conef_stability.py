"""The smallest sketch with which contracted error feedback stays bounded, for each beta.

    python -m recipes.lab.conef_stability --json conef_stability.json

SGD on a quadratic of a matrix, with noise in the gradients; of each step a random block of the
elements is sent, and what is left goes into a count sketch (`mpcomp.ConEF`):

    p = g + (1 - beta) e,    x <- x - lr Q(p),    S <- S + sketch(g - Q(p)),    e = estimate of S

A setting is stable if the error, the norm of S, is not larger at the end than before, up to a
factor, for every seed. The smallest stable fraction is that from which all larger ones are stable,
too. Every row of the matrix has cells of its own, so the shape matters: a block that covers whole
rows is what a small beta cannot stand. Published: Li et al., with the murmur hash; on what they
found it is not said. `mpcomp.ConEF` refuses some of the settings that are tried here, so this
takes its sketch alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from mpcomp.compressors.base import num_kept
from mpcomp.feedback.sketch import HASHES, CountSketch

#: Beta -> the smallest stable fraction of the sources.
PUBLISHED: Final[Mapping[float, float]] = {
    **{0.1: 0.9, 0.2: 0.8, 0.3: 0.7, 0.4: 0.6, 0.5: 0.4},
    **{0.6: 0.4, 0.7: 0.3, 0.8: 0.2, 0.9: 0.1},
}
BETAS: Final = tuple(PUBLISHED)
FRACTIONS: Final = tuple(i / 10 for i in range(1, 11))


def main(argv: Sequence[str] | None = None) -> None:
    """Tries all settings, prints the table, and writes the figures."""
    options = parse_args(argv)
    for name in ("rows", "columns", "seeds", "steps"):
        least = 8 if name == "steps" else 1
        if getattr(options, name) < least:
            sys.exit(f"error: {name} is {getattr(options, name)}; pass at least {least}")
    for name, upper in (("keep", 1.0), ("lr", float("inf")), ("growth", float("inf"))):
        if not 0 < getattr(options, name) <= upper:
            sys.exit(f"error: {name} is {getattr(options, name)}; pass more than 0, keep at most 1")
    torch.set_num_threads(1)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    growths: dict[str, dict[str, list[float]]] = {name: {} for name in HASHES}
    with tqdm(total=len(HASHES) * len(FRACTIONS), unit="sketch") as bar:
        for name in HASHES:
            for fraction in FRACTIONS:
                growths[name][f"{fraction:g}"] = growth(name, fraction, **settings)
                bar.update()
    result = {
        "settings": settings,
        "torch": torch.__version__,
        "betas": BETAS,
        "published": PUBLISHED,
        "growth": growths,  # hash -> fraction -> of each beta; null where it is not finite
        "smallest": {name: smallest(growths[name], options.growth) for name in HASHES},
    }
    print(render(result))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(finite(result), indent=1, allow_nan=False) + "\n")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.conef_stability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=32, help="of the matrix (default %(default)s)")
    add("--columns", type=int, default=64, help="of the matrix (default %(default)s)")
    add("--keep", type=float, default=0.1, help="part that a block has (default %(default)s)")
    add("--lr", type=float, default=0.1, help="of SGD (default %(default)s)")
    add("--noise", type=float, default=1.0, help="of an element's gradient (default %(default)s)")
    add("--steps", type=int, default=400, help="of SGD (default %(default)s)")
    add("--seeds", type=int, default=3, help="all of which must be stable (default %(default)s)")
    add("--growth", type=float, default=2.0, help="that is still stable (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="for the figures")
    return parser.parse_args(argv)


def growth(
    hash: str,
    fraction: float,
    *,
    rows: int,
    columns: int,
    keep: float,
    lr: float,
    noise: float,
    steps: int,
    seeds: int,
    **_: Any,
) -> list[float]:
    """The norm of the error in the last quarter of the steps over that in the second one.

    Returns:
        The largest over the seeds, for each of `BETAS`; what is not finite is infinite.
    """
    sketch = CountSketch(columns, fraction, hash)
    found = [_growth(sketch, rows, keep, lr, noise, steps, seed) for seed in range(seeds)]
    worst: list[float] = torch.stack(found).amax(0).tolist()
    return worst


def _growth(
    sketch: CountSketch, rows: int, keep: float, lr: float, noise: float, steps: int, seed: int
) -> Tensor:
    """The growth for one seed, [betas]; all betas see the same noise and the same blocks."""
    draw = torch.Generator().manual_seed(seed)
    n, num = rows * sketch.columns, len(BETAS)
    curvature = torch.linspace(0.1, 1.0, n)
    block = torch.arange(num_kept(keep, n))
    back = 1.0 - torch.tensor(BETAS)[:, None]
    x = torch.randn(n, generator=draw).repeat(num, 1)
    held = torch.zeros(num * rows, sketch.width)
    norms = []
    for _ in range(steps):
        gradient = curvature * x + noise * torch.randn(n, generator=draw)
        wanted = gradient + back * sketch.estimate(held).reshape(num, n)
        positions = (block + torch.randint(n, (), generator=draw)) % n
        sent = torch.zeros(num, n)
        sent[:, positions] = wanted[:, positions]
        x = x - lr * sent
        held += sketch.sketch((gradient - sent).reshape(num * rows, -1))
        norms.append(held.reshape(num, -1).norm(dim=1))
    quarters = torch.stack(norms).tensor_split(4)
    return (quarters[3].mean(0) / quarters[1].mean(0)).nan_to_num(torch.inf, torch.inf)


def smallest(growths: Mapping[str, Sequence[float]], bound: float) -> list[float | None]:
    """For each of `BETAS` the fraction from which on nothing grows beyond the bound."""
    found: list[float | None] = []
    for i in range(len(BETAS)):
        least = None
        for fraction in reversed(FRACTIONS):
            if not growths[f"{fraction:g}"][i] < bound:
                break
            least = fraction
        found.append(least)
    return found


def render(result: Mapping[str, Any]) -> str:
    """The smallest stable fractions beside the published ones, and where those are unstable."""
    table = [
        [beta, 1 - beta, PUBLISHED[beta], *(result["smallest"][name][i] for name in HASHES)]
        for i, beta in enumerate(BETAS)
    ]
    headers = ("beta", "1 - beta", "published", *HASHES)
    text = tabulate(table, headers, floatfmt="g", missingval="none")
    return f"smallest stable fraction of a sketch\n{text}"


def finite(value: Any) -> Any:
    """The same for JSON: None in place of what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and value == float("inf") else value


if __name__ == "__main__":
    main()
