"""One command for a machine with a GPU: it tests, counts and times, most valuable first.

    python -m recipes.bench.gpu_check --seconds 420
    python -m recipes.bench.gpu_check --parts coding pipeline --again
    python -m recipes.bench.gpu_check --plan
    python -m recipes.bench.gpu_check --table
    python -m recipes.bench.gpu_check --dry-run          # toy sizes, on the CPU alone

Each part has a process of its own and a deadline, and each of its rows is in the file as soon as it
is there: a run that is cut off keeps what it has. The same command goes on with what is missing.
Parts that this code has been through are not run again. A copy without a git repository is told its
commit by ``--commit``.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tabulate import tabulate

from recipes.bench.evidence import code_id, commit_id, stamp
from recipes.bench.gpu_report import PartFile, tables
from recipes.bench.jobs import Ended, Job, Reporter, Said, run_jobs
from recipes.bench.signals import ending_on_signals

__all__ = ["PARTS", "Part", "main", "run_part", "run_parts"]

OUT: Final = Path("docs/results/gpu_check.json")
#: Of a dry run, which is no result.
DRY_OUT: Final = Path("runs/gpu_check.json")
#: Seconds without which a part is not begun.
LEAST_S: Final = 5.0
#: Of a dry run, times a part's limit: kernels are interpreted, on a CPU that may be busy.
DRY_LIMITS: Final = 4


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: on the command line.
        seconds: its limit on a GPU.
        answers: the question that it answers.
        run: the function, as ``module:name``; called as ``run(reporter, dry)``, it reports rows.
            A row with ``why_skipped`` says why the part cannot be run here.
    """

    name: str
    seconds: float
    answers: str
    run: str

    @property
    def module(self) -> str:
        """The module of the function."""
        return self.run.partition(":")[0]


_HERE: Final = "recipes.bench"
PARTS: Final = (
    Part(
        "machine",
        15,
        "which GPU and software is it, and how fast does it copy?",
        f"{_HERE}.gpu_parts:machine",
    ),
    Part("tests", 125, "do the tests that are marked gpu pass?", f"{_HERE}.gpu_parts:tests"),
    Part(
        "messages",
        15,
        "how many kernels, copies and synchronisations is a message?",
        f"{_HERE}.gpu_messages:messages",
    ),
    Part(
        "kernels",
        40,
        "have kernels the CPU's bits, and how fast are they?",
        f"{_HERE}.gpu_kernels:kernels",
    ),
    Part(
        "lanes",
        15,
        "how many bytes are lanes, and how fast are they coded?",
        f"{_HERE}.gpu_lanes:lanes",
    ),
    Part(
        "coding",
        40,
        "how long is a message of 203M coded, by 1, 4 and 16 threads?",
        f"{_HERE}.gpu_parts:coding",
    ),
    Part(
        "pipeline",
        90,
        "how fast are two stages on one GPU, how idle is it, are losses equal?",
        f"{_HERE}.gpu_ranks:pipeline",
    ),
    Part(
        "races",
        50,
        "are tensors waited for that are late, and is memory used rightly?",
        f"{_HERE}.gpu_races:races",
    ),
    Part(
        "nccl",
        30,
        "which messages does NCCL carry between two ranks?",
        f"{_HERE}.gpu_ranks:nccl",
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the parts that are missing, then prints the tables; `--table` prints only."""
    options = _parse(argv)
    if options.plan:
        print(_plan())
        return
    try:
        chosen = _chosen(options.parts)
        _check(options.seconds)
        file = PartFile(options.out)
        if not options.table:
            with ending_on_signals():
                _run(chosen, file, options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"interrupted; {options.out} has what was said by then", file=sys.stderr)
        sys.exit(130)
    if options.table:
        print(tables(file.parts, [part.name for part in PARTS]))


def _run(chosen: Sequence[Part], file: PartFile, options: argparse.Namespace) -> None:
    ended = run_parts(
        chosen,
        file,
        seconds=options.seconds,
        dry=options.dry_run,
        commit=options.commit,
        again=options.again,
    )
    print(tables(file.parts, [part.name for part in PARTS]))
    print()
    for name, how in ended.items():
        print(f"{name}: {how}")


def run_parts(
    parts: Sequence[Part],
    file: PartFile,
    *,
    seconds: float,
    dry: bool = False,
    commit: str | None = None,
    again: bool = False,
) -> dict[str, str]:
    """Runs parts in their order, and writes what they say as they say it.

    Args:
        parts: to run.
        file: of the results.
        seconds: for all together.
        dry: at toy sizes on the CPU, two at a time as nothing is measured.
        commit: of this copy; by default the repository's, if there is one.
        again: also those that this code has been through.

    Returns:
        The end of each part, in words.
    """
    until = time.monotonic() + seconds
    # Else the question whether there is a GPU would set up CUDA, which no fork survives.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    commit, code = commit or commit_id(), code_id()
    ended = {part.name: "not begun" for part in parts}
    jobs = []
    for part in parts:
        if not again and file.is_done(part.name, code, dry=dry):
            ended[part.name] = "done before, by this code"
        else:
            limit = part.seconds * (DRY_LIMITS if dry else 1)
            jobs.append(Job(part.name, run_part, limit, (part.run, dry, commit)))
    events = run_jobs(
        jobs,
        until=until,
        workers=2 if dry else 1,
        preload=sorted({part.module for part in parts}),
        least_s=LEAST_S,
    )
    try:
        with closing(events):
            for event in events:
                if isinstance(event, Said):
                    file.take(event.job.name, event.row)
                else:
                    ended[event.job.name] = how = _close(file, event)
                    print(f"{event.job.name}: {how}", file=sys.stderr, flush=True)
    finally:
        file.interrupt()
    return ended


def _close(file: PartFile, ended: Ended) -> str:
    """Writes the end of a part; the end in words."""
    state, why = file.end(ended.job.name, ended.state, ended.why, ended.seconds)
    in_words = state + (f": {why}" if why else "")
    return f"{in_words} ({ended.seconds:.0f} s)"


def run_part(reporter: Reporter, run: str, dry: bool, commit: str | None) -> None:
    """A part, in its process.

    Args:
        reporter: gets the stamp of this machine and code, then the rows.
        run: the part's function, as ``module:name``.
        dry: whether it runs at toy sizes, on the CPU.
        commit: of this copy.

    Raises:
        ValueError: there is no GPU, and this is no dry run.
    """
    from recipes.bench.gpu_forks import alone  # it takes seconds, which the parent does not wait

    origin = alone(stamp, commit)  # apart: a process that has touched its GPU cannot be forked
    if origin["gpu"] is None and not dry:
        raise ValueError(
            f"torch {origin['torch']} finds no GPU here; run it where there is one, or give "
            "--dry-run"
        )
    reporter.say({"stamp": {**origin, "dry_run": dry}})
    pkgutil.resolve_name(run)(reporter, dry)


def _plan() -> str:
    rows = [(part.name, f"{part.seconds:g}", part.answers) for part in PARTS]
    rows.append(("all", f"{sum(part.seconds for part in PARTS):g}", ""))
    return tabulate(rows, ("part", "s at most", "answers"), disable_numparse=True)


def _chosen(names: Sequence[str] | None) -> list[Part]:
    """The parts of these names, in their own order."""
    known = [part.name for part in PARTS]
    for name in names or ():
        if name not in known:
            raise ValueError(f"--parts {name!r}: pass some of {', '.join(known)}")
    return [part for part in PARTS if names is None or part.name in names]


def _check(seconds: float) -> None:
    if not seconds > LEAST_S:
        raise ValueError(
            f"--seconds {seconds:g}: pass more than {LEAST_S:g}, without which no part is begun"
        )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    everything = sum(part.seconds for part in PARTS)
    add("--seconds", type=float, default=everything, help="for all parts (default %(default)g)")
    add("--out", type=Path, metavar="JSON", help=f"results (default {OUT}; dry: {DRY_OUT})")
    add("--parts", nargs="+", metavar="NAME", help="some alone")
    add("--commit", metavar="ID", help="of a copy without a repository")
    add("--again", action="store_true", help="also parts that this code has been through")
    add("--dry-run", action="store_true", help="toy sizes, on the CPU")
    add("--plan", action="store_true", help="print the parts, run nothing")
    add("--table", action="store_true", help="print the tables, run nothing")
    options = parser.parse_args(argv)
    if options.out is None:
        options.out = DRY_OUT if options.dry_run else OUT
    return options


if __name__ == "__main__":
    main()
