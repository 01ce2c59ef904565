"""The command line: `mpcomp`, or `python -m mpcomp`."""

from mpcomp.command.main import main

__all__ = ["main"]
