"""`mpcomp train`: runs a recipe of the checkout, as `python -m recipes.NAME` does."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pkgutil
import runpy
import sys
from pathlib import Path
from typing import Any

from mpcomp.command.output import print_json
from mpcomp.core.spec import closest
from mpcomp.view.files import RunFiles
from mpcomp.view.json_files import read_json
from mpcomp.view.report import figures_of
from mpcomp.view.run import Run

__all__ = ["add_to"]

#: The package of recipes: by name, as it is no part of what is installed.
PACKAGE = "recipes"
EPILOG = """\
examples:
  mpcomp train cifar10 --data digits --epochs 3
  mpcomp train --json cifar10 --data digits --epochs 3 --out runs/mine
"""


def add_to(commands: Any) -> None:
    """Adds the command to others."""
    parser = commands.add_parser(
        "train",
        help="run a recipe, as in: mpcomp train cifar10 --data digits",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("recipe", metavar="RECIPE", help="cifar10, wikitext, ...")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the recipe")


def run(options: argparse.Namespace) -> None:
    """Runs the recipe in this process.

    Raises:
        ValueError: there is no such recipe, or no checkout; or no folder whose run is told of.
    """
    folder = _folder(options.arguments) if options.json else None
    if options.json and folder is None:
        raise ValueError(
            "--json tells of the run in a folder: pass the recipe --out FOLDER, or --resume FOLDER"
        )
    # An installed command does not look in the current folder by itself.
    sys.path.insert(0, str(Path.cwd()))
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise ValueError(
            "recipes are not installed with mpcomp: clone its repository and run this in the "
            "checkout's folder"
        )
    folders = list(package.submodule_search_locations)
    known = sorted(
        module.name
        for module in pkgutil.iter_modules(folders)
        if not module.ispkg
        and '\nif __name__ == "__main__":' in Path(folders[0], f"{module.name}.py").read_text()
    )
    if options.recipe not in known:
        raise ValueError(
            f"no recipe {options.recipe!r}{closest(options.recipe, known)}: expected one of "
            f"{', '.join(known)}"
        )
    name = f"{PACKAGE}.{options.recipe}"
    sys.argv = [f"mpcomp train {options.recipe}", *options.arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=False)
    if folder is not None and os.environ.get("RANK", "0") == "0":
        summary = read_json(RunFiles(folder).summary)
        print_json(options, {**figures_of(Run.read(folder)), "summary": summary})


def _folder(arguments: list[str]) -> Path | None:
    """The folder of the run, among the arguments of a recipe."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", "--resume", type=Path, nargs="?")
    folder: Path | None = parser.parse_known_args(arguments)[0].out
    return folder
