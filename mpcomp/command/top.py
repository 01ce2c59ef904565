"""`mpcomp top`: shows a run while it trains, from the files in its folder."""

from __future__ import annotations

import argparse
import textwrap
import time
from pathlib import Path
from typing import Any

from mpcomp.command.output import print_json
from mpcomp.view.files import RunFiles
from mpcomp.view.json_files import JsonLinesTail
from mpcomp.view.report import figures_of
from mpcomp.view.run import Run

__all__ = ["add_to"]

EPILOG = """\
examples:
  mpcomp top runs/mine
  mpcomp top runs/mine --once
  mpcomp top runs/mine --json
"""


def add_to(commands: Any) -> None:
    """Adds the command to others."""
    parser = commands.add_parser(
        "top",
        help="watch a run while it trains: its ranks, its links, its loss",
        description=textwrap.dedent(__doc__ or ""),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--once", action="store_true", help="print one picture and end, as with --json"
    )
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="seconds between two (default 1)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Shows the run until it has finished, or somebody interrupts.

    Raises:
        ValueError: the folder has no run with steps, or no time between two pictures.
    """
    from rich.console import Console  # by none of the other commands
    from rich.live import Live

    from mpcomp.view.frame import LAST, WINDOWS, frame

    if not options.every > 0:
        raise ValueError(f"--every {options.every}: pass more than 0 seconds")
    steps = JsonLinesTail(RunFiles(options.run_folder).steps)
    console = Console()
    now = Run.read(options.run_folder, steps)
    if options.once or options.json:
        console.print(frame(now))
        print_json(
            options,
            {
                **figures_of(now, WINDOWS),
                "samples_per_second": now.samples_per_second(LAST),
                "step_seconds": now.step_seconds(LAST),
                "seconds_since_step": now.seconds_since_step,
            },
        )
        return
    try:
        with Live(frame(now), console=console, auto_refresh=False) as live:
            while not now.finished:
                time.sleep(options.every)
                now = Run.read(options.run_folder, steps)
                live.update(frame(now), refresh=True)
    except KeyboardInterrupt:  # of the picture, not of the run
        pass
