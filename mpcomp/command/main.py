"""The commands by name; a mistake in what was typed ends them with one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

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
    options = parser.parse_args(argv)
    try:
        options.run(options)
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"error: {error}")
