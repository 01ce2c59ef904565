"""Kills, and faults of other kinds: a training beside the same one left alone.

    python -m recipes.bench.faults
    python -m recipes.bench.faults --ranks 4 --steps 5000 --kill-every 50 --out runs/faults.json
    python -m recipes.bench.faults --methods "ef21+topk:0.1" "dp: powersgd:2" --step-s 1

Each row trains twice, by `mpcomp.heal` under torchrun: once in peace, and once with a random rank
killed by SIGKILL in every so many steps, at a random moment of a step or of the save after it.
Every loss of every attempt and the last weights are compared bit for bit. Methods of cuts compress
both directions; those that begin with ``dp:`` compress between two replicas of half as many stages.

Recovery is from the signal to the first end of a step thereafter, less a step of the quiet run.
The throughput is that of a training with a second a step and a kill every `PERIOD` steps: what
recoveries, repeated steps and saves, as they were measured, leave of it.

    sudo python -m recipes.bench.faults --kinds all --faults 200 --steps 2000 --out winds.json
    sudo python -m recipes.bench.faults --kinds stop,loop,reset,connect-kill,launcher-kill,sigterm
    sudo python -m recipes.bench.faults --kinds reset:50,away:3 --away-s 300

With ``--kinds`` ranks are on two hosts, and faults are of all kinds that are named
(`recipes.bench.fault_kinds`): as many as ``--faults`` says, drawn from them, or as many of a kind
as stands behind its name.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from tabulate import tabulate
from tqdm import tqdm

from recipes.bench import fault_kinds
from recipes.bench.hosts import HostsUnavailable
from recipes.bench.row_file import RowFile
from recipes.bench.signals import ending_on_signals
from recipes.bench.training_worker import Job, Kill, differing_weights
from recipes.bench.workers import num_cores

METHODS: Final = (
    "none",
    "ef+topk:0.1",
    "ef21+topk:0.1",
    "aqsgd+quant:4",
    "aqsgd:location={slots}+quant:4",
    "conef:0.5+topk:0.1",
    "dp: gravac:cf=5-100:eps=0.1+topk:0.1",
    "dp: dgc:0.01",
    "dp: powersgd:2",
    "dp: diloco:30+ef+quant:4",
)
#: Steps between two kills, for the throughput.
PERIOD: Final = 50
#: The steps of each rank, of all attempts.
Journals: TypeAlias = Sequence[Sequence[Mapping[str, Any]]]

HEADERS: Final = (
    *("method", "kills", "aimed at a save", "differing losses", "differing weights"),
    *("repeated", "recovery s", "longest s", "ms a step", "ms a save", "throughput"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every method twice and prints the table.

    Raises:
        SystemExit: a loss or a weight differs, or a training did not come to its end.
    """
    options = _parse(argv)
    windy = options.kinds is not None
    measured, shown = (fault_kinds.measure, fault_kinds.table) if windy else (measure, table)
    try:
        file = RowFile(options.out, "winds" if windy else "faults", _settings(options))
        with ending_on_signals():
            for method in tqdm(file.missing(options.methods), unit="method"):
                with tempfile.TemporaryDirectory(prefix="mpcomp-faults-") as folder:
                    file.add(measured(method, options, Path(folder)))
                tqdm.write(shown(file.rows[-1:]))
    except (ValueError, HostsUnavailable, fault_kinds.Stuck) as error:
        sys.exit(f"error: {error}")
    print(shown(file.rows))
    if any(
        row["differing_losses"] or row["differing_weights"] or row.get("lost_files")
        for row in file.rows
    ):
        sys.exit("error: a training with faults is not the one that was left alone")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--methods", nargs="+", metavar="SPEC", help="default: ten, or with --kinds one")
    add("--ranks", type=int, help="processes (even; default: 4, or with --kinds 2)")
    add("--steps", type=int, default=500)
    add("--kill-every", type=int, default=50, metavar="STEPS")
    add("--kinds", metavar="KIND,KIND:NUMBER", help="of faults on two hosts, or all")
    add("--faults", type=int, default=20, help="number of those that are drawn from kinds")
    add("--minutes", type=float, default=math.inf, help="after which no faults come any more")
    add("--away-s", type=float, help="of a link (default: drawn, half to twice the timeout)")
    add("--timeout", type=float, default=10.0, help="of a wait for another rank, with --kinds")
    add("--save-every", type=int, default=5, metavar="STEPS")
    add("--step-s", type=float, default=0.0, help="least seconds of a step")
    add("--seed", type=int, default=0, help="of the kills")
    add("--out", type=Path, help="results (.json); those it has are kept")
    options = parser.parse_args(argv)
    try:
        options.kinds = fault_kinds.parse_kinds(options.kinds) if options.kinds else None
    except ValueError as error:
        parser.error(str(error))
    if options.ranks is None:
        options.ranks = 4 if options.kinds is None else 2
    if options.methods is None:
        options.methods = list(METHODS if options.kinds is None else METHODS[2:3])
    if options.ranks < 2 or options.ranks % 2:
        parser.error(f"--ranks {options.ranks}: expected an even number, 2 or more")
    return options


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    own = ("kinds", "faults", "away_s", "timeout") if options.kinds else ("kill_every",)
    names = ("ranks", "steps", *own, "save_every", "step_s", "seed")
    return {**{name: getattr(options, name) for name in names}, "cores": num_cores()}


def measure(method: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row: the quiet run, the other, and how they differ."""
    quiet = Job.of(
        method,
        options.ranks,
        folder / "quiet",
        steps=options.steps,
        save_every=options.kill_every,  # seldom: it has nothing to come back from
        step_s=options.step_s,
    )
    quiet.run()
    calm = quiet.journals()
    step_s = statistics.median(s["trained"] - s["began"] for s in calm[0])
    save_s = statistics.median(s["ended"] - s["trained"] for s in calm[0] if _saves(s, quiet))
    kills = tuple(_kills(options, step_s, save_s))
    killed = replace(
        quiet,
        folder=str(folder / "killed"),
        save_every=options.save_every,
        kills=kills,
        restarts=2 * len(kills),
    )
    killed.run()
    return {
        "method": method,
        **compare(killed, calm, killed.journals()),
        "differing_weights": differing_weights(quiet, killed, options.ranks),
    }


def _kills(options: argparse.Namespace, step_s: float, save_s: float) -> Iterator[Kill]:
    """Kills at random moments of a step; every fourth in the save after one."""
    drawn = random.Random(options.seed)
    periods = range(0, options.steps - options.kill_every + 1, options.kill_every)
    for number, first in enumerate(periods):
        step, after_s = first + drawn.randrange(options.kill_every), drawn.random() * step_s
        if number % 4 == 0:
            step += options.save_every - 1 - step % options.save_every
            after_s = step_s + drawn.random() * save_s
        if step < options.steps:
            yield Kill(step=step, rank=drawn.randrange(options.ranks), after_s=after_s)


def _saves(step: Mapping[str, Any], job: Job) -> bool:
    return (int(step["step"]) + 1) % job.save_every == 0


def compare(
    job: Job,
    calm: Sequence[Sequence[Mapping[str, Any]]],
    steps: Sequence[Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """The journals of a run with kills beside those of the quiet one."""
    expected = {step["step"]: step["loss"] for step in calm[0]}
    everything = [step for of_rank in steps for step in of_rank]
    deaths = [json.loads(path.read_text()) for path in sorted(Path(job.folder).glob("kill-*.json"))]
    step_s = statistics.median(step["trained"] - step["began"] for step in calm[0])
    save_s = statistics.median(
        step["ended"] - step["trained"] for step in steps[0] if _saves(step, job)
    )
    recoveries = []
    for death in deaths:
        after = [step["ended"] for step in steps[0] if step["began"] > death["time"]]
        if after:
            recoveries.append(max(0.0, min(after) - death["time"] - step_s))
    repeated = len(steps[0]) - len({step["step"] for step in steps[0]})
    lost = (sum(recoveries) + repeated) / max(1, len(deaths)) + PERIOD / job.save_every * save_s
    return {
        "step_s": step_s,
        "save_s": save_s,
        "kills": len(deaths),
        "kills_in_saves": sum(_in_a_save(death, job, step_s) for death in deaths),
        "differing_losses": sum(step["loss"] != expected[step["step"]] for step in everything),
        "repeated_steps": repeated / max(1, len(deaths)),
        "recovery_s": statistics.median(recoveries) if recoveries else 0.0,
        "longest_recovery_s": max(recoveries, default=0.0),
        "throughput": PERIOD / (PERIOD + lost),
    }


def _in_a_save(death: Mapping[str, Any], job: Job, step_s: float) -> bool:
    kill = next(kill for kill in job.kills if kill.step == death["step"])
    return kill.after_s > step_s and (kill.step + 1) % job.save_every == 0


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of what was survived, and what it cost."""
    cells = [
        [
            row["method"],
            row["kills"],
            row["kills_in_saves"],
            row["differing_losses"],
            row["differing_weights"],
            f"{row['repeated_steps']:.1f}",
            f"{row['recovery_s']:.2f}",
            f"{row['longest_recovery_s']:.2f}",
            f"{1e3 * row['step_s']:.0f}",
            f"{1e3 * row['save_s']:.0f}",
            f"{100 * row['throughput']:.1f} %",
        ]
        for row in rows
    ]
    return tabulate(cells, HEADERS, disable_numparse=True)


if __name__ == "__main__":
    main()
