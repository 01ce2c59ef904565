"""The grid of Rudakov et al. on CIFAR-10, from one command that can be stopped and continued.

    python -m recipes.cifar10_study --data FOLDER --epochs 3 --train-limit 10000 --seeds 3
    python -m recipes.cifar10_study --table

Each finished (row, seed) is one line of the results file; those are skipped when the command is
given again. Full size: ``--width 64 --epochs 100 --device cuda --workers 1``.
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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tqdm import tqdm

from recipes.config import MODELS, PRECISIONS, Config
from recipes.data import Dataset
from recipes.ranks import joined
from recipes.run_folder import append_json_line, read_json_lines
from recipes.study_table import Results, render
from recipes.training import load_data, run


class Row(NamedTuple):
    """Methods of a row, and whether it begins with uncompressed epochs (`--warmup-epochs`)."""

    act: str
    grad: str
    warmup: bool = False


# Quantization fwA-bwB: A bits forward, B bits backward. As in the paper, methods with memory start
# from an uncompressed warm-up (there 10 to 20 of 100 epochs), and AQ-SGD remembers activations
# while gradients go as plain Top-K; "after warm-up" is what they are to be compared with.
ROWS: Final[dict[str, Row]] = {
    "none": Row("none", "none"),
    "quant fw4-bw8": Row("quant:4", "quant:8"),
    "quant fw4-bw4": Row("quant:4", "quant:4"),
    "quant fw2-bw8": Row("quant:2", "quant:8"),
    "top 50 %": Row("topk:0.5", "topk:0.5"),
    "top 20 %": Row("topk:0.2", "topk:0.2"),
    "top 10 %": Row("topk:0.1", "topk:0.1"),
    "top 5 %": Row("topk:0.05", "topk:0.05"),
    "top 2 %": Row("topk:0.02", "topk:0.02"),
    "top act 5 % grad 20 %": Row("topk:0.05", "topk:0.2"),
    "top act 20 % grad 5 %": Row("topk:0.2", "topk:0.05"),
    "top 10 %, same indices": Row("topk:0.1", "same"),
    "top 10 %, after warm-up": Row("topk:0.1", "topk:0.1", warmup=True),
    "top 10 %, EF": Row("ef+topk:0.1", "ef+topk:0.1", warmup=True),
    "top 10 %, EF on gradients": Row("topk:0.1", "ef+topk:0.1", warmup=True),
    "top 10 %, EF21": Row("ef21+topk:0.1", "ef21+topk:0.1", warmup=True),
    "top 10 %, EFMixed": Row("efmixed+topk:0.1", "efmixed+topk:0.1", warmup=True),
    "top 10 %, AQ-SGD": Row("aqsgd+topk:0.1", "topk:0.1", warmup=True),
    "top 30 %, AQ-SGD": Row("aqsgd+topk:0.3", "topk:0.3", warmup=True),
}

# What may differ between the runs of one results file: the row and the seed, and what does not
# change what is trained; and what only several processes have.
FREE_OPTIONS: Final = (
    *("act", "grad", "warmup_epochs", "seed", "data", "device", "threads"),
    *("replicas", "schedule", "in_flight", "timeout"),
)

_dataset: Dataset | None = None  # of this worker process, loaded once for all its runs


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the table; `--table` prints only."""
    with joined() as ranks:
        if ranks.size > 1:
            raise ValueError(
                "the study trains each run in one process, and starts those itself (--workers); "
                "start it with python, not with torchrun"
            )
        options = parse_args(argv)
        if not options.table:
            _run_missing(options)
        lines = read_json_lines(options.out)
        if not lines:
            raise ValueError(f"{options.out} has no results yet; run without --table first")
        print(render(Results.of(lines, order=list(ROWS))))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the study."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.cifar10_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", default=Config.data, help="hub name, folder of parquet files, or digits")
    add("--out", type=Path, default=Path("runs/cifar10_study.jsonl"), help="results file")
    add(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=list(ROWS),
        metavar="ROW",
        help=", ".join(ROWS).replace("%", "%%"),
    )
    add("--seeds", type=int, default=3, help="seeds 0 to n-1 of every row")
    add("--model", choices=MODELS, default="resnet18")
    add("--width", type=int, default=16)
    add("--epochs", type=int, default=3)
    add("--warmup-epochs", type=int, default=1, help="uncompressed, in the rows that have some")
    add("--schedule-epochs", type=int, default=Config.schedule_epochs)
    add("--eval-every", type=int, help="epochs; default: only the last epoch is evaluated")
    add("--batch-size", type=int, default=Config.batch_size)
    add("--chunks", type=int, default=Config.chunks)
    add("--lr", type=float, default=Config.lr)
    add("--precision", choices=PRECISIONS, default="auto")
    add("--train-limit", type=int, help="images; default: all")
    add("--test-limit", type=int, help="images; default: all")
    add("--device", default="auto")
    add("--workers", type=int, default=2, help="processes; 0: run in this one")
    add("--threads", type=int, default=1, help="of each process, on the CPU")
    add("--table", action="store_true", help="print the table of the results so far, run nothing")
    return parser.parse_args(argv)


def configuration(options: argparse.Namespace, row: str, seed: int) -> Config:
    """The run of one row and seed."""
    methods = ROWS[row]
    names = {field.name for field in dataclasses.fields(Config)} & set(vars(options))
    chosen = {name: getattr(options, name) for name in names}
    chosen["eval_every"] = options.eval_every or options.epochs
    chosen["warmup_epochs"] = options.warmup_epochs if methods.warmup else 0
    return Config(**chosen, act=(methods.act,), grad=(methods.grad,), seed=seed)


def settings(config: Config, warmup_epochs: int) -> dict[str, Any]:
    """What all runs of one results file share; the warm-up is that of the rows that have one."""
    shared = {name: value for name, value in config.to_json().items() if name not in FREE_OPTIONS}
    return {**shared, "warmup_epochs": warmup_epochs}


def train_one(row: str, config: Config, shared: dict[str, Any]) -> dict[str, Any]:
    """Trains one (row, seed) and gives its line of the results file, with the shared settings."""
    global _dataset
    if _dataset is None:
        _dataset = load_data(config)
    outcome: dict[str, Any]
    try:
        outcome = run(config, dataset=_dataset, progress=False).to_json()
    except FloatingPointError as error:  # a result too, and no reason to stop the others
        outcome = {"seed": config.seed, "diverged": str(error)}
    return {
        "row": row,
        **outcome,
        "settings": shared,
        "data": Path(config.data).name,
        "device": _device_name(),
        "torch": torch.__version__,
    }


def _run_missing(options: argparse.Namespace) -> None:
    todo = [
        (row, configuration(options, row, seed))
        for seed in range(options.seeds)  # all rows with the first seed first: a table early on
        for row in options.rows
    ]
    shared = settings(todo[0][1], options.warmup_epochs)
    finished = _finished(options.out, shared)
    missing = [(row, config) for row, config in todo if (row, config.seed) not in finished]
    print(
        f"{len(todo) - len(missing)} of {len(todo)} runs are finished in {options.out}", flush=True
    )
    if not missing:
        return
    # A request to end takes the same way out as Ctrl-C: no worker stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command continues"))
    with tqdm(total=len(missing), unit="run") as bar:

        def finish(line: dict[str, Any]) -> None:
            append_json_line(options.out, line)
            bar.update()
            accuracy = line.get("accuracy_compressed", float("nan"))
            bar.set_postfix_str(f"{line['row']}, seed {line['seed']}: {accuracy:.3f}")

        if options.workers == 0:
            for row, config in missing:
                finish(train_one(row, config, shared))
            return
        pool = ProcessPoolExecutor(
            options.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_end_with_parent,
        )
        try:
            jobs = [pool.submit(train_one, row, config, shared) for row, config in missing]
            for future in as_completed(jobs):
                finish(future.result())
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()  # an unfinished run starts anew next time
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _finished(out: Path, here: dict[str, Any]) -> set[tuple[str, int]]:
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


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


if __name__ == "__main__":
    main()
