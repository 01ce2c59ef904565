"""Time to a loss: how long until a model is as good as it would be without compression?

python -m recipes.lab.time_to_loss --data FOLDER --seeds 3
python -m recipes.lab.time_to_loss --table
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from recipes.bench.gpu_parts import METHODS
from recipes.bench.workers import write
from recipes.decoder import SIZES
from recipes.lab.race import RaceConfig, load, race
from recipes.lab.race_report import ASYNCHRONOUS, render
from recipes.lab.race_speed import measure
from recipes.lab.study import (
    Line,
    Runs,
    Study,
    by_seed,
    data_of,
    given,
    run_study,
    study_parser,
)
from recipes.placement import devices_of
from recipes.ranks import Ranks, joined


class Row(NamedTuple):
    """An entrant: methods of activations and gradients, or a rival that changes the model.

    Attributes:
        act: method of activations.
        grad: method of gradients.
        rival: the model, and its rank ÷ the width.
        updates: steps between which the pipeline does not drain; NAdam then makes them.
        tied: the head's weight is the embedding's, and the last stage is on the first rank.
        unit: the tied embedding's output is N(0, 1), as without a tie.
    """

    act: str = "none"
    grad: str = "none"
    rival: str | None = None
    updates: int = 1
    tied: bool = False
    unit: bool = False


_SYNCHRONOUS: Final[dict[str, Row]] = {
    **{name: Row(*methods) for name, methods in METHODS.items()},
    # The ratio of rank and width is that of the benchmark's own record, 160 of 1024.
    "subspace, rank 5/32": Row(rival="subspace:5/32"),
    "learned basis, rank 1/4": Row(rival="learned-basis:1/4"),
    "learned basis, rank 1/8": Row(rival="learned-basis:1/8"),
}
#: Steps in a call of an asynchronous row, from one reading of the loss to the next.
UPDATES: Final = 25
_BOTH_WAYS: Final = (
    *("bf16", "tiles of 64, 4 bits", "auto:scratch", "klt, step 0.4 / 1, dithered"),
    "subspace, rank 5/32",
)
#: In both ways as well.
_TIED: Final = {
    "bf16, tied": _SYNCHRONOUS["bf16"]._replace(tied=True),
    "bf16, tied, of 1": _SYNCHRONOUS["bf16"]._replace(tied=True, unit=True),
}
ROWS: Final[dict[str, Row]] = {
    **_SYNCHRONOUS,
    **{
        f"{name}{ASYNCHRONOUS}": _SYNCHRONOUS[name]._replace(updates=UPDATES) for name in _BOTH_WAYS
    },
    **_TIED,
    **{f"{name}{ASYNCHRONOUS}": row._replace(updates=UPDATES) for name, row in _TIED.items()},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the tables; `--table` prints only."""
    options = parse_args(argv)
    if options.measure:
        with joined() as ranks:
            device = _device_of(configuration(options, options.rows[0], 0), ranks)
        write(measure(SIZES[options.model], METHODS, device), options.speed)
    speed = json.loads(options.speed.read_text()) if options.speed.exists() else None
    own_shape = None if options.speed_203M is None else json.loads(options.speed_203M.read_text())
    study = Study(
        parse=lambda _: options,
        runs=runs,
        train=train,
        settings=settings,
        same_settings=True,
        render=lambda lines: render(lines, speed, own_shape, list(ROWS)),
    )
    run_study(study, argv)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the race."""
    parser = study_parser("time_to_loss", __doc__, ROWS, seeds=3)
    add = parser.add_argument
    add("--data", default="python-docs", help="folder, text file or python-docs")
    add("--model", choices=SIZES, default="small", help="size; 203M is for GPUs")
    add("--target", type=float, default=4.4, help="loss in nats (default %(default)s)")
    add("--max-steps", type=int, default=900, help="(default %(default)s)")
    add("--lr", type=float, help="after its rise, constant")
    add("--workers", type=int, default=2, help="processes; 0: run in this one")
    add("--speed", type=Path, default=Path("runs/time_to_loss_speed.json"), metavar="JSON",
        help="what a stage computes and codes, for the seconds (default %(default)s)")  # fmt: skip
    add("--speed-203M", type=Path, metavar="JSON",
        help="likewise, of --model 203M --measure: a column at its shape")  # fmt: skip
    add("--measure", action="store_true", help="measure that first, on an idle machine")
    return parser.parse_args(argv)


def runs(options: argparse.Namespace, num_processes: int) -> Runs[RaceConfig]:
    """All rows of a seed before the next."""
    return by_seed(options.rows, options.seeds, partial(configuration, options))


def configuration(options: argparse.Namespace, row: str, seed: int) -> RaceConfig:
    """The race of one row and seed."""
    entrant = ROWS[row]._asdict()
    methods = {name: (entrant.pop(name),) for name in ("act", "grad")}
    chosen = {**given(options, RaceConfig), "precision": "fp32", "seed": seed}
    return RaceConfig(**{**chosen, **methods, **entrant})


def settings(config: RaceConfig, options: argparse.Namespace) -> Line:
    """Settings that all lines of a results file share."""
    names = ("model", "target", "max_steps", "lr", "clip", "read_every", "eval_blocks", "rise")
    shared: dict[str, Any] = {name: getattr(config, name) for name in names}
    return shared


def train(config: RaceConfig, settings: Line, ranks: Ranks) -> Line:
    """Races one entrant."""
    return race(config, data_of(config, load, ranks), _device_of(config, ranks))


def _device_of(config: RaceConfig, ranks: Ranks) -> torch.device:
    (device,) = devices_of(config, ranks)
    return device


if __name__ == "__main__":
    main()
