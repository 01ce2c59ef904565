"""`mpcomp report`: compares the runs in some folders, in a table and on a page."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from mpcomp.command.output import print_json
from mpcomp.view.report import figures_of, table, write_report
from mpcomp.view.run import Run

__all__ = ["add_to"]

EPILOG = """\
examples:
  mpcomp report runs/*
  mpcomp report runs/topk runs/uncompressed --html compare.html
  mpcomp report runs/* --json
"""


def add_to(commands: Any) -> None:
    """Adds the command to others."""
    parser = commands.add_parser(
        "report",
        help="compare runs by their folders: a table, and a page of curves",
        description=textwrap.dedent(__doc__ or ""),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--html", type=Path, metavar="FILE", help="page to write, of one file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the table, and writes the page if there is to be one.

    Raises:
        ValueError: a folder has no run with steps, or there is none for the page.
    """
    if options.html and not options.html.absolute().parent.is_dir():
        raise ValueError(f"--html {options.html}: there is no folder {options.html.parent}")
    runs = [Run.read(folder) for folder in options.runs]
    print(table(runs))
    if options.html:
        write_report(options.runs, options.html)
        print(f"\npage: {options.html.resolve()}")
    page = str(options.html.resolve()) if options.html else None
    print_json(options, {"runs": [figures_of(run) for run in runs], "page": page})
