"""The commands by name; a mistake in what was typed ends them with one line.

Exit status: 0 it is done; 1 a mistake, a problem that was found, or a failure; 2 the command line
itself cannot be read; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from mpcomp.command import compare, doctor, methods, plan, report, top, train
from mpcomp.version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the arguments name; those of the process by default."""
    parser = argparse.ArgumentParser(prog="mpcomp", description="Training over slow links.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (doctor, plan, methods, compare, train, top, report):
        command.add_to(commands)
    for command_parser in commands.choices.values():
        command_parser.add_argument(
            "--json",
            action="store_true",
            help="print one JSON object on standard output, and all else on standard error",
        )
    options = parser.parse_args(argv)
    options.out = sys.stdout
    try:
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            options.run(options)
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
