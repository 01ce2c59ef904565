"""The processor time of a small message, in this checkout and in another one, turn by turn.

    git worktree add ../before HEAD~1
    python -m recipes.bench.small_messages --against ../before --repeats 20 --out small.json

Each checkout has a process of its own, and they take turns, so that a slow moment of the machine
meets both. A turn trains some steps over one cut whose two ends are in the process: coding,
headers, fidelity and what ends a step, without a network. Processor time is counted, and not the
time of the clock, as machines that run this are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

METHODS: Final = ("none", "bf16", "quant:4", "topk:0.1", "auto", "auto:scratch", "auto:memory")
HERE: Final = Path(__file__).resolve()
#: Steps in which methods learn, before any is counted.
WARMUPS: Final = 8


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench.small_messages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--against", type=Path, metavar="FOLDER", help="another checkout; none by default")
    add("--methods", nargs="+", default=list(METHODS), metavar="METHOD")
    add("--shape", type=int, nargs=3, default=[4, 64, 128], help="of a microbatch")
    add("--chunks", type=int, default=4, help="microbatches in a step")
    add("--steps", type=int, default=20, help="in a turn")
    add("--repeats", type=int, default=10, help="turns of each method in each checkout")
    add("--out", type=Path, help="JSON file for the figures")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("chunks", "steps", "repeats"):
        if getattr(options, name) < 1:
            sys.exit(f"error: {name} is {getattr(options, name)}; pass at least 1")
    if options.worker:
        _work(options)
        return
    figures = _summary(_measure(options), options)
    _print(figures)
    if options.out is not None:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        result = {"settings": settings, "figures": figures}
        options.out.write_text(json.dumps(result, indent=1, default=str))


def _measure(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Microseconds of a message by method, of each turn of each checkout."""
    folders = {"here": HERE.parents[2]}
    if options.against is not None:
        folders["before"] = options.against.resolve()
    processes = {name: _started(folder, options) for name, folder in folders.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in processes}
    try:
        for repeat in range(options.repeats):
            for name in sorted(processes, reverse=bool(repeat % 2)):
                stdin, stdout = processes[name].stdin, processes[name].stdout
                assert stdin is not None and stdout is not None
                stdin.write("\n")
                stdin.flush()
                found[name].append(json.loads(stdout.readline()))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return found


def _started(folder: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    """The process of a checkout: this file, with the packages of that folder."""
    given = {name: getattr(options, name) for name in ("methods", "shape", "chunks", "steps")}
    numbers = [
        text
        for name, value in given.items()
        for text in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]
    return subprocess.Popen(
        [sys.executable, "-P", str(HERE), "--worker", *numbers],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
    )


def _work(options: argparse.Namespace) -> None:
    """Takes a turn of all methods for each line of standard input; answers with its times."""
    cuts = {method: _Cut(method, options) for method in options.methods}
    for cut in cuts.values():
        cut.train(WARMUPS)
    for _ in sys.stdin:
        turn = {}
        for method, cut in cuts.items():
            begin = time.process_time()
            messages = cut.train(options.steps)
            turn[method] = (time.process_time() - begin) / messages * 1e6
        print(json.dumps(turn), flush=True)


class _Cut:
    """A cut whose two ends are here."""

    def __init__(self, method: str, options: argparse.Namespace) -> None:
        import torch

        from mpcomp.comm.channels import LocalChannel
        from mpcomp.core.context import TensorMeta
        from mpcomp.links.boundary import ConnectedBoundary
        from mpcomp.links.build import boundaries_of

        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(0)
        (boundary,) = boundaries_of(method, method, ("cut",), seed=0, replica=0, warmup_steps=0)
        for link in boundary.links:
            link.defers_nonfinite = True  # as between ranks
        channels = (LocalChannel(torch.device("cpu")) for _ in range(2))
        self._connected = ConnectedBoundary(boundary, *channels)
        self._x = torch.randn(options.shape, generator=generator)
        self._meta = TensorMeta.of(self._x)
        rows = len(self._x)
        self._ids = tuple(
            tuple((row,) for row in range(m * rows, (m + 1) * rows)) for m in range(options.chunks)
        )
        self._index = 0

    def train(self, steps: int) -> int:
        """Takes so many steps over it; the number of messages."""
        from mpcomp.core.context import Step

        connected, chunks = self._connected, len(self._ids)
        for _ in range(steps):
            step = Step(self._index, train=True, sample_ids=self._ids, num_microbatches=chunks)
            for m in range(chunks):
                connected.act.post(self._meta, step, m)
                connected.act.send(self._x, self._meta, step, m)
                connected.grad.post(self._meta, step, m)
                connected.act.receive(self._meta, step, m)
                connected.grad.send(self._x, self._meta, step, m)
                connected.grad.receive_any(self._meta, step, m)
            for link in connected.boundary.links:
                link.nonfinite.found()
            connected.boundary.finish_step(finite=True)
            self._index += 1
        return 2 * chunks * steps


def _summary(
    found: dict[str, list[dict[str, float]]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Medians of each method, and quartiles of the ratio within a pair of turns."""
    rows = []
    for method in options.methods:
        times = {name: [turn[method] for turn in turns] for name, turns in found.items()}
        row = {"method": method, **{f"{name}_us": median(each) for name, each in times.items()}}
        if "before" in times:
            pairs = zip(times["here"], times["before"], strict=True)
            ratios = sorted(here / before for here, before in pairs)
            row["ratio"] = median(ratios)
            row["quartiles"] = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
        rows.append(row)
    return rows


def _print(figures: Sequence[dict[str, Any]]) -> None:
    for row in figures:
        line = f"{row['method']:14}{row['here_us']:9.0f} us a message, both ends"
        if "before_us" in row:
            low, high = row["quartiles"]
            line += f"; before {row['before_us']:.0f}, ratio {row['ratio']:.3f}"
            line += f" ({low:.3f} to {high:.3f})"
        print(line)


if __name__ == "__main__":
    main()
