"""A grid of rows and seeds, from one command that can be stopped and continued.

Each finished (row, seed) is one line of the results file; those are skipped when the command is
given again. `recipes.cifar10_study` and `recipes.wikitext_study` say what is trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple

import torch
from tqdm import tqdm

from recipes.config import PRECISIONS, AnyConfig, RunConfig
from recipes.ranks import joined
from recipes.run_folder import append_json_line, read_json_lines
from recipes.study_table import Results, Table, render

Line = dict[str, Any]

# What may differ between the runs of one results file: the row and the seed, and what does not
# change what is trained; and what only several processes have.
FREE_OPTIONS: Final = (
    *("act", "grad", "warmup_epochs", "seed", "data", "device", "threads"),
    *("replicas", "schedule", "in_flight", "timeout"),
    *("optimizer", "nesterov", "base_batch", "lr_warmup_epochs", "lr_milestones", "lr_factor"),
    *("depth", "widen"),
    *("dp_comp", "dp_path", "dp_small", "per_machine", "shard", "param_comp"),
)


class Row(NamedTuple):
    """What is special about a row.

    Attributes:
        act: method of activations.
        grad: method of gradients.
        warmup: whether it begins with uncompressed epochs (`--warmup-epochs`).
        also: other options of the configuration.
    """

    act: str
    grad: str
    warmup: bool = False
    also: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Study(Generic[AnyConfig]):
    """What is trained, and what is made of it.

    Attributes:
        name: of the module.
        rows: in the order of the table.
        first: rows that are run with all seeds before the others; these are all run with one seed
            before the next.
        config: of a row and a seed, from the options.
        settings: what all runs of one results file share, by a run and the options.
        train_one: the line of the results file; a function of a module, for other processes.
        table: of the results.
    """

    name: str
    rows: Mapping[str, Row]
    first: Sequence[str] = ()
    config: Callable[[argparse.Namespace, str, int], AnyConfig]
    settings: Callable[[AnyConfig, argparse.Namespace], Line]
    train_one: Callable[[str, AnyConfig, Line], Line]
    table: Table


def study_parser(
    name: str, description: str | None, rows: Iterable[str]
) -> argparse.ArgumentParser:
    """A parser with the options of every study; a study sets their defaults and adds its own."""
    names = list(rows)
    parser = argparse.ArgumentParser(
        prog=f"python -m recipes.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path(f"runs/{name}.jsonl"), help="results file")
    add(
        "--rows",
        nargs="+",
        choices=names,
        default=names,
        metavar="ROW",
        help="; ".join(names).replace("%", "%%"),
    )
    add("--seeds", type=int, default=3, help="seeds 0 to n-1 of every row")
    add("--epochs", type=int, help="(default %(default)s)")
    add("--warmup-epochs", type=int, default=1, help="uncompressed, in the rows that have some")
    add("--eval-every", type=int, help="epochs; default: only the last epoch is evaluated")
    add("--batch-size", type=int, help="(default %(default)s)")
    add("--chunks", type=int, help="microbatches of a batch (default %(default)s)")
    add("--lr", type=float, help="(default %(default)s)")
    add("--precision", choices=PRECISIONS, default="auto")
    add("--device", default="auto")
    add("--workers", type=int, help="processes (default %(default)s); 0: run in this one")
    add("--threads", type=int, default=1, help="of each process, on the CPU")
    add("--table", action="store_true", help="print the table of the results so far, run nothing")
    return parser


def run_study(study: Study[AnyConfig], parse: Callable[[], argparse.Namespace]) -> None:
    """Runs what is missing, then prints the table; `--table` prints only."""
    with joined() as ranks:
        if ranks.size > 1:
            raise ValueError(
                "the study trains each run in one process, and starts those itself (--workers); "
                "start it with python, not with torchrun"
            )
        options = parse()
        if not options.table:
            _run_missing(study, options)
        lines = read_json_lines(options.out)
        if not lines:
            raise ValueError(f"{options.out} has no results yet; run without --table first")
        print(render(Results.of(lines, order=list(study.rows)), study.table))


def chosen_options(
    options: argparse.Namespace, config: type[RunConfig], row: Row, seed: int
) -> dict[str, Any]:
    """The fields of a configuration that the options, the row and the seed determine."""
    names = {field.name for field in dataclasses.fields(config)} & set(vars(options))
    return {
        **{name: getattr(options, name) for name in names},
        "eval_every": options.eval_every or options.epochs,
        "warmup_epochs": options.warmup_epochs if row.warmup else 0,
        "act": (row.act,),
        "grad": (row.grad,),
        "seed": seed,
        **row.also,
    }


def shared_settings(config: RunConfig, options: argparse.Namespace) -> Line:
    """What all runs of one results file share; the warm-up is that of the rows that have one."""
    shared = {name: value for name, value in config.to_json().items() if name not in FREE_OPTIONS}
    return {**shared, "warmup_epochs": options.warmup_epochs}


def line_of(row: str, config: RunConfig, shared: Line, train: Callable[[], Line]) -> Line:
    """The line of the results file of a run that `train` does; a divergence is a result too."""
    outcome: Line
    try:
        outcome = train()
    except FloatingPointError as error:  # no reason to stop the others
        outcome = {"seed": config.seed, "diverged": str(error)}
    return {
        "row": row,
        **outcome,
        "settings": shared,
        "data": Path(config.data).name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
    }


def order_of_runs(
    rows: Sequence[str], first: Sequence[str], num_seeds: int
) -> list[tuple[str, int]]:
    """(row, seed) pairs: the `first` rows with all seeds, then the others seed by seed."""
    early = [row for row in rows if row in first]
    late = [row for row in rows if row not in first]
    return [(row, seed) for part in (early, late) for seed in range(num_seeds) for row in part]


def _run_missing(study: Study[AnyConfig], options: argparse.Namespace) -> None:
    order = order_of_runs(options.rows, study.first, options.seeds)
    todo = [(row, study.config(options, row, seed)) for row, seed in order]
    shared = study.settings(todo[0][1], options)
    finished = _finished(options.out, shared)
    missing = [(row, config) for row, config in todo if (row, config.seed) not in finished]
    print(
        f"{len(todo) - len(missing)} of {len(todo)} runs are finished in {options.out}", flush=True
    )
    if not missing:
        return
    metric = study.table.metric
    # A request to end takes the same way out as Ctrl-C: no worker stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command continues"))
    with tqdm(total=len(missing), unit="run") as bar:

        def finish(line: Line) -> None:
            append_json_line(options.out, line)
            bar.update()
            reached = line.get(metric.on, float("nan"))
            bar.set_postfix_str(f"{line['row']}, seed {line['seed']}: {reached:.3f}")

        if options.workers == 0:
            for row, config in missing:
                finish(study.train_one(row, config, shared))
            return
        pool = ProcessPoolExecutor(
            options.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_end_with_parent,
        )
        try:
            jobs = [pool.submit(study.train_one, row, config, shared) for row, config in missing]
            for future in as_completed(jobs):
                finish(future.result())
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()  # an unfinished run starts anew next time
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _finished(out: Path, here: Line) -> set[tuple[str, int]]:
    """The (row, seed) in the results file.

    Raises:
        ValueError: the file holds runs of other settings, which must not share a table.
    """
    lines = read_json_lines(out)
    for line in lines:
        there = line["settings"]
        if differing := {name: there.get(name) for name in here if there.get(name) != here[name]}:
            raise ValueError(
                f"{out} holds runs with other settings: {differing}, while this command has "
                f"{ {name: here[name] for name in differing} }; pass the same options, or another "
                "--out"
            )
    return {(line["row"], line["seed"]) for line in lines}


def _end_with_parent() -> None:
    """In a worker: end when the study ends, however it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, but the parent ends us
