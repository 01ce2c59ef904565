"""The tables of results that a bench has written, once more; nothing is measured.

    python -m recipes.lab.show docs/results/slow_link.json docs/results/time_to_95.json
    python -m recipes.lab.show docs/results/slow_link.json --by-rate
    python -m recipes.lab.show docs/results/slow_replicas.json --plot slow_replicas.png

For the files of `recipes.bench.slow_link`, `slow_replicas`, `slow_shards`, `generation`,
`multi_level`, `conef_stability`, `faults`, `soak` and `bad_links`. Those of studies are printed by
the study, with ``--table``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from recipes.bench import (
    bad_links,
    fault_kinds,
    faults,
    generation,
    link_report,
    replica_report,
    shard_report,
    soak,
)
from recipes.lab import conef_stability, multi_level


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables of each file."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.show",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("results", type=Path, nargs="+", metavar="FILE", help="results (.json)")
    add("--by-rate", action="store_true", help="slow_link's steps alone, a column for each rate")
    add("--plot", type=Path, metavar="PNG", help="draws the picture of one file as well")
    add("--variants", nargs="+", metavar="NAME", help="those in slow_link's picture (default: all)")
    options = parser.parse_args(argv)
    if options.plot is not None and len(options.results) > 1:
        parser.error("--plot draws one file: give one")
    if options.variants is not None and options.plot is None:
        parser.error("--variants chooses what is drawn: give --plot too")
    try:
        for path in options.results:
            result = json.loads(path.read_text())
            text = by_rate_of(result) if options.by_rate else tables_of(result)
            print(f"{path.name}\n\n{text}\n")
            if options.plot is not None:
                plot(result, options.plot, variants=options.variants)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def tables_of(result: Any) -> str:
    """The tables of one file.

    Raises:
        ValueError: no bench whose tables can be shown again writes such a file.
    """
    if not isinstance(result, dict):
        raise ValueError("a bench writes an object of JSON")
    if _is_of_links(result):
        return link_report.tables(result["figures"])
    if "runs" in result:
        return generation.tables(result["figures"])
    if "tried" in result:
        return replica_report.tables(result)
    if "trainings" in result:
        return shard_report.tables(result)
    if "smallest" in result:
        return conef_stability.render(result)
    if "winds" in result:
        return fault_kinds.table(result["winds"])
    if "faults" in result:
        return faults.table(result["faults"])
    if "soak" in result:
        return soak.table(result["soak"])
    if "bad_links" in result:
        return bad_links.table(result["bad_links"])
    if "methods" in result:
        rows = multi_level.table(result["methods"])
        return tabulate(rows, multi_level.HEADERS, disable_numparse=True)
    raise ValueError("these are not results of a bench; a study prints its own with --table")


def by_rate_of(result: Any) -> str:
    """The steps of a file of `recipes.bench.slow_link`, a column for each rate.

    Raises:
        ValueError: it is of another bench.
    """
    if not _is_of_links(result):
        raise ValueError("--by-rate is for the results of recipes.bench.slow_link")
    return link_report.table_by_rate(result["figures"])


def plot(result: Any, path: Path, *, variants: Sequence[str] | None = None) -> None:
    """Draws the picture that the bench draws, into a PNG file.

    Args:
        result: of the bench.
        path: of the picture.
        variants: those of `recipes.bench.slow_link` that are drawn; all by default.

    Raises:
        ValueError: the bench draws none, or has no such variants.
    """
    if variants is not None and not _is_of_links(result):
        raise ValueError("--variants is for the results of recipes.bench.slow_link")
    if _is_of_links(result):
        link_report.plot_steps(_of(variants, result["figures"]), path)
    elif "tried" in result:
        replica_report.plot(result, path)
    elif "trainings" in result:
        shard_report.plot(result, path)
    else:
        raise ValueError("--plot is for results of slow_link, slow_replicas and slow_shards")


def _of(
    variants: Sequence[str] | None, figures: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    there = list(dict.fromkeys(figure["variant"] for figure in figures))
    for name in variants or ():
        if name not in there:
            raise ValueError(f"--variants {name!r}: the file has {', '.join(there)}")
    return [f for f in figures if variants is None or f["variant"] in variants]


def _is_of_links(result: Any) -> bool:
    return "compute" in result and "steps" in result


if __name__ == "__main__":
    main()
