"""Trainings at full size on a GPU, in order of worth, within the minutes that there are.

    python -m recipes.lab.gpu_studies --seconds 500 --images FOLDER --text FOLDER
    python -m recipes.lab.gpu_studies --plan        # minutes of each, before there is a GPU
    python -m recipes.lab.gpu_studies --table

Each run is a process. Some share the GPU, and a row is written when its run has ended. The
same command goes on with what is missing: runs that were cut off begin anew, but for those with a
checkpoint that is small enough to be carried (`--resume`). Messages are counted instead of coded
(`recipes.lab.counted`), so that no run waits for a processor; the rows say so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from mpcomp.view.json_files import read_json
from recipes.bench.jobs import FAILED, Ended, Job, Said, run_jobs
from recipes.bench.signals import ending_on_signals
from recipes.lab.estimate import measure_plan, render_plan
from recipes.lab.full_size import STUDIES, Study
from recipes.lab.studies_report import render
from recipes.lab.timed import train
from recipes.run_folder import append_json_line, read_json_lines, write_json

#: Files of committed results, of a dry run's, and of the plan.
RESULTS: Final = Path("docs/results/gpu_studies.jsonl")
TRIED: Final = Path("runs/gpu_studies.jsonl")
PLAN: Final = Path("docs/results/gpu_plan.json")
#: Seconds without which no run is begun.
_LEAST_S: Final = 15.0


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the tables; `--table` and `--plan` print only."""
    options = parse_args(argv)
    if options.plan:
        before = read_json(options.out) or {"rows": []}
        if not options.table:
            before = {"rows": measure_plan(options, before["rows"])}
            write_json(options.out, before)
        print(render_plan(before["rows"]))
        return
    if not options.table:
        run_missing(options)
    print(render(read_json_lines(options.out)))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.gpu_studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=500.0, help="for all (default %(default)s)")
    add("--studies", nargs="+", choices=STUDIES, default=list(STUDIES), help="in their order")
    add("--rows", nargs="+", metavar="ROW", help="of those; default: all")
    add("--seeds", type=int, default=3, help="seeds 0 to n-1; all studies of one before the next")
    add("--workers", type=int, default=3, help="runs that share the GPU (default %(default)s)")
    add("--images", metavar="FOLDER", help="of CIFAR-10's parquet files")
    add("--text", metavar="DATA", default="python-docs", help="(default %(default)s)")
    add("--tokenizer", metavar="FOLDER", default="bpe", help="of GPT-2 (default: a new one)")
    add("--smollm2", metavar="FILE", help="of the released model")
    add("--out", type=Path, help=f"results file (default {RESULTS}, {TRIED} or {PLAN})")
    add("--resume", type=Path, default=Path("runs/gpu_studies"), metavar="FOLDER",
        help="checkpoints of runs that were cut off (default %(default)s)")  # fmt: skip
    add("--carry-mb", type=float, default=40.0, metavar="MB",
        help="the most that the checkpoint of a run may take (default %(default)s)")  # fmt: skip
    add("--commit", help="of this code, where there is no repository")
    add("--device", default="cuda:0", help="(default %(default)s)")
    add("--dry-run", action="store_true", help="toy sizes on the CPU: shows that they run")
    add("--plan", action="store_true", help="measure on the CPU what each row would take")
    add("--table", action="store_true", help="print what the results file has, run nothing")
    options = parser.parse_args(argv)
    if options.dry_run:
        options.device, options.images, options.smollm2 = "cpu", "digits", "tiny"
        options.seeds = 1
    if options.out is None:
        options.out = PLAN if options.plan else TRIED if options.dry_run else RESULTS
    for name, least in (("seconds", 1), ("seeds", 1), ("workers", 1), ("carry_mb", 0)):
        if getattr(options, name) < least:
            parser.error(f"{name} is {getattr(options, name)}; pass at least {least}")
    known = {row for name in options.studies for row in STUDIES[name].rows}
    if unknown := sorted(set(options.rows or ()) - known):
        parser.error(f"no row {', '.join(unknown)}; pass some of {', '.join(sorted(known))}")
    return options


def run_missing(options: argparse.Namespace) -> None:
    """Runs in their order what has no row yet, until the time is over."""
    done = {key_of(line) for line in read_json_lines(options.out) if "stopped" not in line}
    jobs = [job for job in _jobs(options) if key_of(_origin(job)) not in done]
    print(f"{len(done)} runs are finished in {options.out}, {len(jobs)} are missing", flush=True)
    begun: set[str] = set()
    said: set[str] = set()
    events = run_jobs(
        jobs,
        until=time.monotonic() + options.seconds,
        workers=options.workers,
        preload=("recipes.lab.timed", "transformers.models.gpt2.modeling_gpt2"),
        least_s=min(_LEAST_S, options.seconds / 4),
    )
    with ending_on_signals("stopped; the same command continues"), closing(events):
        for event in events:
            begun.add(event.job.name)
            if isinstance(event, Said):
                said.add(event.job.name)
                append_json_line(options.out, {**_origin(event.job), **event.row})
                print(f"{event.job.name}: {event.row.get('stopped', 'finished')}", flush=True)
            elif event.job.name not in said:
                _note_end(options.out, event)
    if len(begun) < len(jobs):
        print(f"{len(jobs) - len(begun)} were not begun: no time was left", flush=True)


def key_of(line: Mapping[str, Any]) -> tuple[str, str, int]:
    """The run of a line: study, row, seed."""
    return line["study"], line["row"], line["seed"]


def _jobs(options: argparse.Namespace) -> Iterable[Job]:
    """All runs, all studies of a seed before the next seed."""
    for seed in range(options.seeds):
        for name in options.studies:
            study = STUDIES[name]
            if option := study.missing(options):
                if seed == 0:
                    print(f"{name}: left out, as {option} is missing", flush=True)
                continue
            for row in _rows(study, options):
                arguments = name, row, seed, options
                yield Job(f"{name}, {row}, seed {seed}", train, options.seconds, arguments)


def _rows(study: Study, options: argparse.Namespace) -> list[str]:
    rows = study.toy_rows if options.dry_run and not options.rows else study.rows
    return [row for row in rows if options.rows is None or row in options.rows]


def _origin(job: Job) -> dict[str, Any]:
    name, row, seed, _ = job.arguments
    return {"study": name, "row": row, "seed": seed}


def _note_end(out: Path, event: Ended) -> None:
    """Notes the end of a run that has said nothing itself."""
    why = event.why or "it said nothing"
    print(f"{event.job.name}: {why}", flush=True)
    if event.state != FAILED:
        append_json_line(out, {**_origin(event.job), "stopped": why})


if __name__ == "__main__":
    main()
