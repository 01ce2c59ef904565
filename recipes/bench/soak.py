"""A soak: long trainings whose copies must stay equal and whose processes must not grow.

    python -m recipes.bench.soak
    python -m recipes.bench.soak --steps 20000 --out runs/soak.json
    python -m recipes.bench.soak --methods "ef21+topk:0.1" "dp: dgc:0.01" --steps 4000

Each row is a training on two ranks, with checkpoints. Both ends of its links, and the weights of
its replicas, are compared every 100 steps (`mpcomp.links.equal_copies`), and copies that differ end
the training and this program. All the while each rank looks at what it holds: memory of its own,
threads, open files, and files in the run's and the temporary folder. Growth is from the second
tenth of the steps, when all samples have been met, to the last; the rank that grew most counts.
Memory may grow by `GROWTH`, numbers not at all. Methods of cuts compress both directions; those
that begin with ``dp:`` compress between two replicas.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tabulate import tabulate
from tqdm import tqdm

from recipes.bench.row_file import RowFile
from recipes.bench.signals import ending_on_signals
from recipes.bench.training_worker import Job
from recipes.bench.workers import num_cores

RANKS: Final = 2
METHODS: Final = (
    *("ef+topk:0.1", "ef:decay=0.9+randomk:0.1", "efmixed+topk:0.1", "conef:0.5+topk:0.1"),
    *("ef21+topk:0.1", "ef21+step:0.5", "aqsgd+quant:4", "aqsgd:location={slots}+quant:4"),
    *("lowrank:2", "klt+step:0.5", "dp: ef+topk:0.1", "dp: ef21+topk:0.1", "dp: dgc:0.01"),
    *("dp: redsync:0.01", "dp: powersgd:2", "dp: gravac:cf=5-100:eps=0.1+topk:0.1"),
    *("dp: diloco:30+ef+quant:4",),
)
#: Looks at what a process holds, over a training.
LOOKS: Final = 200
#: Part of its own memory by which a process may grow.
GROWTH: Final = 0.02
NUMBERS: Final = ("threads", "open_files", "files")
HEADERS: Final = (
    *("method", "steps", "first loss", "last loss", "ms a step"),
    *("MiB", "at the end", "growth", "threads", "open files", "files"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains by every method and prints the table.

    Raises:
        SystemExit: a process grew, or copies came apart, or a training failed otherwise.
    """
    options = _parse(argv)
    try:
        file = RowFile(options.out, "soak", {"steps": options.steps, "cores": num_cores()})
    except ValueError as error:
        sys.exit(f"error: {error}")
    with ending_on_signals():
        for method in tqdm(file.missing(options.methods), unit="method"):
            file.add(measure(method, options.steps))
            tqdm.write(table(file.rows[-1:]))
    rows = file.rows
    print(table(rows))
    grown = [row["method"] for row in rows if has_grown(row)]
    if grown:
        sys.exit(f"error: processes grow: {', '.join(grown)}")


def measure(method: str, steps: int) -> dict[str, Any]:
    """One row: a training, and what its processes held."""
    with tempfile.TemporaryDirectory(prefix="mpcomp-soak-") as folder:
        job = Job.of(
            method,
            RANKS,
            Path(folder) / "run",
            steps=steps,
            save_every=steps // LOOKS,
            watch_every=steps // LOOKS,
        )
        job.run()
        return {"method": method, "steps": job.steps, **figures(job.journals())}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--methods", nargs="+", default=list(METHODS), metavar="SPEC")
    add("--steps", type=int, default=2000)
    add("--out", type=Path, help="results (.json); those it has are kept")
    options = parser.parse_args(argv)
    if options.steps < 2 * LOOKS:
        parser.error(f"--steps {options.steps}: pass at least {2 * LOOKS}")
    return options


def figures(journals: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """A row of the ranks' journals: the losses of a training, and what its processes held."""
    steps = journals[0]
    tenth = max(1, len(steps) // 10)
    losses = [float.fromhex(step["loss"]) for step in steps]
    of_ranks = [_growth(journal) for journal in journals]
    return {
        "first_loss": statistics.fmean(losses[:tenth]),
        "last_loss": statistics.fmean(losses[-tenth:]),
        "step_s": statistics.median(step["trained"] - step["began"] for step in steps),
        **max(of_ranks, key=lambda found: float(found["growth"])),
        **{name: max(found[name] for found in of_ranks) for name in NUMBERS},
    }


def _growth(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Growth of what a rank holds, from the second tenth of its steps to the last."""
    held = [step["held"] for step in steps if "held" in step]
    tenth = len(held) // 10
    early, late = held[tenth : 2 * tenth], held[-tenth:]
    before, after = (statistics.median(look["memory"] for look in looks) for looks in (early, late))
    numbers = {
        name: max(look[name] for look in late) - max(look[name] for look in early)
        for name in NUMBERS
    }
    return {"memory": before, "memory_at_end": after, "growth": after / before - 1, **numbers}


def has_grown(row: Mapping[str, Any]) -> bool:
    """Whether processes of a row held more in the end."""
    return row["growth"] > GROWTH or any(row[name] > 0 for name in NUMBERS)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of what processes held; threads and files are those that came to it."""
    cells = [
        [
            row["method"],
            row["steps"],
            f"{row['first_loss']:.3f}",
            f"{row['last_loss']:.3f}",
            f"{1e3 * row['step_s']:.1f}",
            f"{row['memory'] / 2**20:.1f}",
            f"{row['memory_at_end'] / 2**20:.1f}",
            f"{100 * row['growth']:+.1f} %",
            *(f"{row[name]:+d}" for name in NUMBERS),
        ]
        for row in rows
    ]
    return tabulate(cells, HEADERS, disable_numparse=True)


if __name__ == "__main__":
    main()
