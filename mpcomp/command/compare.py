"""`mpcomp compare`: tries methods on one's own pipeline and data, and recommends one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mpcomp.api.pipeline import Pipeline
from mpcomp.command.models import function_named
from mpcomp.command.output import print_json

__all__ = ["add_to"]

EPILOG = """\
FUNCTION takes nothing and gives (pipeline, data), or (pipeline, data, optimizer): then each method
trains over the batches. examples:
  mpcomp compare my_training.py:make --mbps 100 --latency-ms 20
  mpcomp compare my_training.py:make --method quant:4 --method quant:4 quant:8
  torchrun --nproc-per-node 4 -m mpcomp compare my_training.py:make
"""


def add_to(commands: Any) -> None:
    """Adds the command to others."""
    parser = commands.add_parser(
        "compare",
        help="try methods on your own model and data, and recommend one",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("function", metavar="FUNCTION", help="module:function or file.py:function")
    add(
        "--method",
        nargs="+",
        action="append",
        metavar="SPEC",
        help="of activations and gradients, or one for both; again for another pair (default: "
        "those that were studied for such models)",
    )
    add("--batches", type=int, default=20, metavar="N", help="at most (default %(default)s)")
    add("--mbps", type=float, metavar="RATE", help="predict steps on links of so many Mbit/s")
    add("--latency-ms", type=float, default=0.0, metavar="MS", help="one way (default 0)")
    add(
        "--floor",
        type=float,
        default=1.0,
        metavar="PERCENT",
        help="the most that the loss may rise by (default %(default)s)",
    )
    add("--seconds", type=float, default=60.0, help="that it may take (default %(default)s)")


def run(options: argparse.Namespace) -> None:
    """Compares and prints.

    Raises:
        ValueError, TypeError: no such function, or it gives something else.
    """
    for given in options.method or ():
        if len(given) > 2:
            raise ValueError(f"--method {' '.join(given)}: pass two at most, and --method again")
    made = function_named(options.function)()
    if not (isinstance(made, Sequence) and len(made) in (2, 3) and isinstance(made[0], Pipeline)):
        raise ValueError(
            f"{options.function} gave a {type(made).__name__}: expected (pipeline, data) or "
            "(pipeline, data, optimizer), with a pipeline of mpcomp.pipeline"
        )
    pipe = made[0]
    found = pipe.compare(
        [(given[0], given[-1]) for given in options.method] if options.method else None,
        data=made[1],
        batches=options.batches,
        optimizer=made[2] if len(made) == 3 else None,
        mbps=options.mbps,
        latency_ms=options.latency_ms,
        floor=options.floor,
        seconds=options.seconds,
        show=not options.json,
    )
    if pipe.rank == 0:
        print_json(options, found.to_dict())
