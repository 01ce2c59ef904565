"""A study: runs by row and seed, from one command that can be stopped and continued.

Each finished (row, seed) is one line of the results file; those are skipped when the command is
given again. Which rows there are, and how one is trained, is a `Study`'s: `recipes.cifar10_study`,
`recipes.wikitext_study`, `recipes.gpt2_study`, `recipes.finetune_study`, `recipes.sorting_study`,
`recipes.adaptive_study`, `recipes.conef_study`, `recipes.replica_study`, `recipes.local_study`,
`recipes.lab.memory_length`, `recipes.lab.old_weights`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import platform
import signal
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from tqdm import tqdm

from recipes.config import PRECISIONS, AnyConfig, RunConfig, check_at_least
from recipes.metric import ACCURACY, PERPLEXITY
from recipes.ranks import Ranks, joined
from recipes.run_folder import append_json_line, read_json_lines
from recipes.signals import ending_on_signals

AnyData = TypeVar("AnyData")

Line: TypeAlias = dict[str, Any]
#: Row and seed, in the order in which they are to be run -> what is trained.
Runs: TypeAlias = Mapping[tuple[str, int], AnyConfig]

# Of this process, which its runs share.
_loaded: dict[Hashable, Any] = {}


@dataclass(frozen=True, kw_only=True)
class Study(Generic[AnyConfig]):
    """A choice of runs, and what is made of each and of all.

    Attributes:
        parse: the options; those of `study_parser` are among them.
        runs: from the options and the number of processes.
        train: one run on all ranks; what its line says besides what `line_of` adds. A function of a
            module, as other processes call it, too.
        settings: of a run and the options, for its line.
        same_settings: whether `settings` are those of all lines of one results file.
        on_replicas: whether every process is a replica; else a run takes one process.
        render: the tables.
    """

    parse: Callable[[Sequence[str] | None], argparse.Namespace]
    runs: Callable[[argparse.Namespace, int], Runs[AnyConfig]]
    train: Callable[[AnyConfig, Line, Ranks], Line]
    settings: Callable[[AnyConfig, argparse.Namespace], Line]
    same_settings: bool = False
    on_replicas: bool = False
    render: Callable[[Sequence[Line]], str]


def study_parser(
    name: str, description: str | None, rows: Iterable[str], *, seeds: int
) -> argparse.ArgumentParser:
    """A parser with the options of every study; a study adds its own."""
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
    add("--seeds", type=int, default=seeds, help="seeds 0 to n-1 of every row")
    add("--precision", choices=PRECISIONS, default="auto")
    add("--device", default="auto")
    add("--threads", type=int, default=1, help="of each process, on the CPU")
    add("--table", action="store_true", help="print the tables of the results, run nothing")
    return parser


def given(options: argparse.Namespace, config: type[RunConfig]) -> dict[str, Any]:
    """The fields of a configuration that the command line says something of."""
    names = {field.name for field in dataclasses.fields(config)} & set(vars(options))
    said = {name: value for name in names if (value := getattr(options, name)) is not None}
    if "lr_milestones" in said:
        said["lr_milestones"] = tuple(said["lr_milestones"])
    return said


def run_study(study: Study[AnyConfig], argv: Sequence[str] | None) -> None:
    """Runs what is missing, then prints the tables; `--table` prints only."""
    with joined() as ranks:
        if ranks.size > 1 and not study.on_replicas:
            raise ValueError(
                "the study trains each run in one process; start it with python, not with torchrun"
            )
        options = study.parse(argv)
        if not options.table:
            if study.on_replicas and ranks.size == 1:
                raise ValueError(
                    "every process is a replica; start this with torchrun --nproc-per-node 4, or "
                    "pass --table"
                )
            check_at_least("seeds", options.seeds, 1)
            _run_missing(study, options, ranks)
        if ranks.speaks:
            lines = read_json_lines(options.out)
            if not lines:
                raise ValueError(f"{options.out} has no results yet; run without --table first")
            print(study.render(lines))


def _run_missing(study: Study[AnyConfig], options: argparse.Namespace, ranks: Ranks) -> None:
    runs = study.runs(options, ranks.size)
    first = next(iter(runs.values()))
    shared = study.settings(first, options) if study.same_settings else None

    def finished() -> list[list[Any]]:
        lines = read_json_lines(options.out)
        if shared is not None:
            _check_settings(options.out, lines, shared, defaults=_defaults_of(first))
        return [[line["row"], line["seed"]] for line in lines]

    done = ranks.gather(ranks.together(finished))[0]
    missing = [
        (row, config, study.settings(config, options) if shared is None else shared)
        for (row, seed), config in runs.items()
        if [row, seed] not in done
    ]
    print(
        f"{len(runs) - len(missing)} of {len(runs)} runs are finished in {options.out}", flush=True
    )
    if not missing:
        return
    workers = getattr(options, "workers", 0)
    lines = _in_workers(study, missing, workers) if workers else _here(study, missing, ranks)
    saying = "stopped; the same command continues"
    with (
        # With no worker left behind; of several ranks all are ended by torchrun.
        ending_on_signals(saying) if ranks.size == 1 else nullcontext(),
        closing(lines),  # which ends the workers
        tqdm(total=len(missing), unit="run", disable=not ranks.speaks) as bar,
    ):
        for line in lines:
            if ranks.speaks:
                append_json_line(options.out, line)
                bar.write(f"{line['row']}, seed {line['seed']}: {_shown(line)}")
            bar.update()


def _here(
    study: Study[AnyConfig], jobs: Sequence[Any], ranks: Ranks
) -> Generator[Line, None, None]:
    """The lines of the jobs, trained one after the other by this process, or by all ranks."""
    for row, config, settings in jobs:
        yield line_of(study.train, row, config, settings, ranks)
        gc.collect()  # the last pipeline's connections, and a thread for each, end with it


def _in_workers(
    study: Study[AnyConfig], jobs: Sequence[Any], num_workers: int
) -> Generator[Line, None, None]:
    """The lines of the jobs, each trained by one of so many processes."""
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_end_with_parent,
    )
    try:
        for future in as_completed([pool.submit(line_of, study.train, *job) for job in jobs]):
            yield future.result()
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()  # an unfinished run starts anew next time
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent() -> None:
    """In a worker: end when the study ends, however it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, but the parent ends us


def line_of(
    train: Callable[[AnyConfig, Line, Ranks], Line],
    row: str,
    config: AnyConfig,
    settings: Line,
    ranks: Ranks | None = None,
) -> Line:
    """The line of the results file of a run; a divergence is a result too."""
    try:
        outcome = train(config, settings, ranks or Ranks())
    except FloatingPointError as error:  # on all ranks; no reason to stop the others
        outcome = {"diverged": str(error)}
    return {
        "row": row,
        "seed": config.seed,
        **outcome,
        "settings": settings,
        "data": Path(config.data).name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
    }


def _defaults_of(config: RunConfig) -> Line:
    return {
        field.name: field.default
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING
    }


def _check_settings(out: Path, lines: Iterable[Line], here: Line, *, defaults: Line) -> None:
    """Raises ValueError for runs of other settings, which must not share a table."""
    defaults, here = (json.loads(json.dumps(one)) for one in (defaults, here))  # lists, no tuples
    for line in lines:
        # Before there was an option, a run did what is its default now.
        there = {**defaults, **line["settings"]}
        if differing := {name: there.get(name) for name in here if there.get(name) != here[name]}:
            raise ValueError(
                f"{out} holds runs with other settings: {differing}, while this command has "
                f"{ {name: here[name] for name in differing} }; pass the same options, or another "
                "--out"
            )


def _shown(line: Line) -> str:
    if "diverged" in line:
        return "diverged"
    metrics = [
        f"{metric.name} {metric.scale * line[key]:.2f} {metric.unit}".rstrip()
        for metric in (ACCURACY, PERPLEXITY)
        for key in (metric.name, metric.on)
        if key in line
    ]
    saved = line["dense_bytes"] / line["wire_bytes"] if line["wire_bytes"] else 1.0
    shown = [*metrics, f"{saved:.1f} x fewer bytes", f"{line['seconds']:.0f} s"]
    return ", ".join(shown)


def data_of(config: AnyConfig, load: Callable[[AnyConfig], AnyData], ranks: Ranks) -> AnyData:
    """The data of a run: from ``load``, unless an earlier run of this process had the same."""
    key = (type(config), *(getattr(config, name) for name in config.data_options))
    if key not in _loaded:
        _loaded[key] = ranks.together(lambda: load(config))
    data: AnyData = _loaded[key]
    return data
