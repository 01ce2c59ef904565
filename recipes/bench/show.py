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
    try:
        for path in parser.parse_args(argv).results:
            print(f"{path.name}\n\n{tables_of(json.loads(path.read_text()))}\n")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


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
