"""A grid of methods at the cuts of a pipeline, which a study trains seed by seed.

Studies of it (`recipes.lab.cifar10_study`, `wikitext_study`, `gpt2_study`, `finetune_study`,
`sorting_study`, `topics_study`, `memory_length`) have the rows, what else differs between models
and data, and the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from recipes.config import AnyConfig, RunConfig
from recipes.lab.study import Line, Runs, Study, given, run_study, study_parser
from recipes.ranks import Ranks

# What may differ between the runs of one results file: the row and the seed, and what does not
# change what is trained.
FREE_OPTIONS: Final = (
    *("act", "grad", "warmup_epochs", "seed", "data", "device", "threads", "timeout"),
    *("save_every_steps", "save_every_minutes", "keep", "connections"),
)


class Row(NamedTuple):
    """The methods of a row.

    Attributes:
        act: method of activations, or of each cut.
        grad: method of gradients, likewise.
        warmup: whether it begins with uncompressed epochs (`--warmup-epochs`).
        also: other options of the configuration.
    """

    act: str | tuple[str, ...]
    grad: str | tuple[str, ...]
    warmup: bool = False
    also: Mapping[str, Any] = MappingProxyType({})


def grid_parser(name: str, description: str | None, rows: Iterable[str]) -> argparse.ArgumentParser:
    """A parser with the options of every grid; a study sets their defaults and adds its own."""
    parser = study_parser(name, description, rows, seeds=3)
    add = parser.add_argument
    add("--epochs", type=int, help="(default %(default)s)")
    add("--warmup-epochs", type=int, default=1, help="uncompressed, in the rows that have some")
    add("--eval-every", type=int, help="epochs; default: only the last epoch is evaluated")
    add("--batch-size", type=int, help="(default %(default)s)")
    add("--chunks", type=int, help="microbatches of a batch (default %(default)s)")
    add("--lr", type=float, help="(default %(default)s)")
    add("--workers", type=int, help="processes (default %(default)s); 0: run in this one")
    return parser


def need_row(parser: argparse.ArgumentParser, options: argparse.Namespace, row: str) -> None:
    """Refuses ``--rows`` without the one that all others are compared with."""
    if row not in options.rows:
        parser.error(f"--rows without {row}, which is what the others are held to")


def chosen_options(
    options: argparse.Namespace, config: type[RunConfig], row: Row, seed: int
) -> dict[str, Any]:
    """The fields of a configuration that the options, the row and the seed determine."""
    return {
        **given(options, config),
        "eval_every": options.eval_every or options.epochs,
        "warmup_epochs": options.warmup_epochs if row.warmup else 0,
        "act": _of_cuts(row.act),
        "grad": _of_cuts(row.grad),
        "seed": seed,
        **row.also,
    }


def _of_cuts(methods: str | tuple[str, ...]) -> tuple[str, ...]:
    return (methods,) if isinstance(methods, str) else methods


def shared_settings(config: RunConfig, options: argparse.Namespace) -> Line:
    """Settings of all runs of one results file; the warm-up is that of the rows that have one."""
    shared = {name: value for name, value in config.to_json().items() if name not in FREE_OPTIONS}
    return {**shared, "warmup_epochs": options.warmup_epochs}


def order_of_runs(
    rows: Sequence[str], first: Sequence[str], num_seeds: int
) -> list[tuple[str, int]]:
    """(row, seed) pairs: the `first` rows with all seeds, then the others seed by seed."""
    early = [row for row in rows if row in first]
    late = [row for row in rows if row not in first]
    return [(row, seed) for part in (early, late) for seed in range(num_seeds) for row in part]


def run_grid(
    argv: Sequence[str] | None,
    *,
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    configuration: Callable[[argparse.Namespace, str, int], AnyConfig],
    first: Sequence[str] = (),
    train: Callable[[AnyConfig, Line, Ranks], Line],
    settings: Callable[[AnyConfig, argparse.Namespace], Line] = shared_settings,
    render: Callable[[Sequence[Line]], str],
) -> None:
    """Runs what is missing of a grid, then prints the tables; `--table` prints only.

    Args:
        configuration: of a row and seed.
        first: rows that the findings rest on; see `order_of_runs`.

    Other arguments as for `Study`, in which all runs of one results file share settings.
    """

    def runs(options: argparse.Namespace, num_processes: int) -> Runs[AnyConfig]:
        order = order_of_runs(options.rows, first, options.seeds)
        return {(row, seed): configuration(options, row, seed) for row, seed in order}

    study = Study(
        parse=parse, runs=runs, train=train, settings=settings, same_settings=True, render=render
    )
    run_study(study, argv)
