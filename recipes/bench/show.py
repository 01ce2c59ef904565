"""The tables of results that a bench has written, once more; nothing is measured.

    python -m recipes.bench.show docs/results/slow_link.json docs/results/time_to_95.json

For the files of `recipes.bench.slow_link`, `slow_replicas`, `slow_shards`, `generation`,
`multi_level` and `conef_stability`. Those of studies are printed by the study, with ``--table``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from recipes.bench import (
    conef_stability,
    generation,
    link_report,
    multi_level,
    replica_report,
    shard_report,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables of each file."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench.show",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE", help="results (.json)")
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="also draw steps of `slow_link`, of one FILE"
    )
    parser.add_argument(
        "--variants", nargs="+", metavar="NAME", help="the variants in the plot (default: all)"
    )
    args = parser.parse_args(argv)
    if args.plot is not None and len(args.results) > 1:
        parser.error(f"--plot draws one file, and {len(args.results)} are given")
    if args.variants is not None and args.plot is None:
        parser.error("--variants chooses what is drawn: give --plot too")
    try:
        for path in args.results:
            result = json.loads(path.read_text())
            print(f"{path.name}\n\n{tables_of(result)}\n")
            if args.plot is not None:
                _plot(result, args.variants, args.plot)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def _plot(result: Any, variants: Sequence[str] | None, path: Path) -> None:
    """The steps of a file of `slow_link`, of all variants or of those named, as a picture.

    Raises:
        ValueError: another bench's file, or a variant that is not in it.
    """
    if not isinstance(result, dict) or "compute" not in result or "steps" not in result:
        raise ValueError("--plot draws files of recipes.bench.slow_link only")
    there = list(dict.fromkeys(figure["variant"] for figure in result["figures"]))
    for name in variants or ():
        if name not in there:
            raise ValueError(f"--variants {name!r}: the file has {', '.join(there)}")
    chosen = [f for f in result["figures"] if variants is None or f["variant"] in variants]
    link_report.plot_steps(chosen, path)


def tables_of(result: Any) -> str:
    """The tables of one file.

    Raises:
        ValueError: no bench whose tables can be shown again writes such a file.
    """
    if not isinstance(result, dict):
        raise ValueError("a bench writes an object of JSON")
    if "compute" in result and "steps" in result:
        return link_report.tables(result["figures"])
    if "runs" in result:
        return generation.tables(result["figures"])
    if "tried" in result:
        return replica_report.tables(result)
    if "trainings" in result:
        return shard_report.tables(result)
    if "smallest" in result:
        return conef_stability.render(result)
    if "methods" in result:
        rows = multi_level.table(result["methods"])
        return tabulate(rows, multi_level.HEADERS, disable_numparse=True)
    raise ValueError("these are not results of a bench; a study prints its own with --table")


if __name__ == "__main__":
    main()
