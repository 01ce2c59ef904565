"""What the memory of error feedback is worth: ConEF on replicas, with sketches of several sizes.

    torchrun --nproc-per-node 4 -m recipes.conef_study --groups images --images digits --seeds 5
    torchrun --nproc-per-node 4 -m recipes.conef_study --groups lstm adam --seeds 5
    python -m recipes.conef_study --table

Every process is a replica. The rows are those of Li et al.: dense SGD; a random block of 10 % of
each gradient, unbiased (rbSGD), with error feedback (EF), and with error feedback whose memory is
60, 80 and 90 % smaller (ConEF) or as large (partial EF); once more with Adam, which the theory says
nothing of. Runs of one seed have the same data, order and first weights, and are compared as pairs.
Each finished (row, seed) is one line of the results file; those are skipped when the command is
given again.

Options for the training are for all groups of a command; where one is not given, each group has its
own (`GROUPS`). The authors' sizes are those of `recipes.cifar10` and `recipes.wikitext` (there).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tabulate import tabulate

from recipes.config import RunConfig, check_at_least
from recipes.image_config import MODELS, ImageConfig
from recipes.metric import ACCURACY, PERPLEXITY, Metric
from recipes.paired_runs import (
    Found,
    Line,
    add_common,
    by_row,
    paired,
    print_tables,
    run_missing,
    spread,
)
from recipes.ranks import joined
from recipes.replica_runs import check_replicas, of_replicas
from recipes.text_config import TextConfig

DENSE: Final = "dense"
EF: Final = "EF"

#: Row -> what compresses gradients between replicas. A percentage is of the memory that is saved.
METHODS: Final[Mapping[str, str]] = {
    DENSE: "none",
    "rbSGD": "randomblock:0.1:unbiased=true",
    EF: "ef+randomblock:0.1",
    "partial EF": "conef:1:beta=0.9+randomblock:0.1",  # a sketch that loses nothing
    "ConEF 60 %": "conef:0.4:beta=0.9+randomblock:0.1",
    "ConEF 80 %": "conef:0.2:beta=0.9+randomblock:0.1",
    "ConEF 90 %": "conef:0.1:beta=0.9+randomblock:0.1",
}


class Group(NamedTuple):
    """What one table is about.

    Attributes:
        metric: its runs are judged by.
        rows: of `METHODS`.
        settings: of the configuration, where the command line has no others.
    """

    metric: Metric
    rows: tuple[str, ...]
    settings: Mapping[str, Any]


_SMALL_TEXT: Final = {"batch_size": 32, "vocab_size": 2048, "precision": "fp32"}

GROUPS: Final[Mapping[str, Group]] = {
    # The rate falls by a cosine, unless milestones are given.
    "images": Group(
        ACCURACY,
        tuple(METHODS),
        {
            **{"model": "resnet18", "width": 16, "epochs": 10, "batch_size": 128, "lr": 0.05},
            **{"train_limit": 8_192, "test_limit": 4_000},
        },
    ),
    # The authors' schedule of 60 epochs, in 12, and their clipping; the model is half as wide.
    "lstm": Group(
        PERPLEXITY,
        tuple(METHODS),
        {
            **{"model": "lstm", "hidden": 320, "epochs": 12, "seq_len": 35, **_SMALL_TEXT},
            **{"optimizer": "sgd", "lr": 2.0, "momentum": 0.9, "clip": 0.25},
            **{"lr_milestones": (3, 6, 9), "lr_factor": 0.25},
        },
    ),
    # Without weight decay AdamW is Adam.
    "adam": Group(
        PERPLEXITY,
        (DENSE, "rbSGD", EF, "ConEF 60 %"),
        {
            **{"model": "tiny", "epochs": 6, "seq_len": 128, **_SMALL_TEXT},
            **{"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.0},
        },
    ),
}

#: Options of the command line that go into a configuration, if it has one of that name.
_TRAINING: Final = (
    *("epochs", "batch_size", "lr", "lr_milestones", "lr_factor", "clip", "train_limit"),
    *("momentum", "width", "depth", "widen", "test_limit"),
    *("hidden", "seq_len", "vocab_size", "eval_limit"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the tables; `--table` prints only."""
    with joined() as ranks:
        options = _parse(argv)
        if not options.table:
            check_replicas(ranks)
            check_at_least("seeds", options.seeds, 1)
            configs = {
                (f"{group}: {row}", seed): configuration(options, group, row, seed, ranks.size)
                for group in options.groups
                for seed in range(options.seeds)
                for row in GROUPS[group].rows
                if row in options.rows
            }
            run_missing(configs, options.out, ranks, of_replicas)
        print_tables(options.out, ranks, render)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.conef_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_common(parser, Path("runs/conef_study.jsonl"))
    rows = "; ".join(METHODS).replace("%", "%%")
    add("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    add("--rows", nargs="+", choices=METHODS, default=list(METHODS), metavar="ROW", help=rows)
    add("--images", default=ImageConfig.data, help="hub name, folder of parquet files, or digits")
    add("--text", default=TextConfig.data, help="hub name, folder, text files, or python-docs")
    add("--model", choices=MODELS, help="of the images (default resnet18)")
    add("--epochs", type=int)
    add("--batch-size", type=int, help="of all replicas together")
    add("--lr", type=float)
    add("--lr-milestones", type=int, nargs="+", metavar="EPOCH", help="where the rate falls")
    add("--lr-factor", type=float, help="by which it falls there")
    add("--momentum", type=float, help="of sgd")
    add("--clip", type=float, metavar="NORM", help="largest global gradient norm")
    add("--train-limit", type=int, help="images, or articles of text")
    add("--width", type=int, help="of the images' model (default 16)")
    add("--depth", type=int, help="of a wide_resnet")
    add("--widen", type=int, help="of a wide_resnet, times its width")
    add("--test-limit", type=int, help="images")
    add("--hidden", type=int, metavar="UNITS", help="of the lstm (default 320, the authors' 672)")
    add("--seq-len", type=int, metavar="TOKENS", help="of a block of text")
    add("--vocab-size", type=int, metavar="TOKENS")
    add("--eval-limit", type=int, metavar="BLOCKS", help="of text")
    return parser.parse_args(argv)


def configuration(
    options: argparse.Namespace, group: str, row: str, seed: int, replicas: int
) -> RunConfig:
    """The run of one row of a group and seed."""
    config = ImageConfig if GROUPS[group].metric is ACCURACY else TextConfig
    known = {field.name for field in dataclasses.fields(config)}
    given: dict[str, Any] = {
        name: value
        for name in _TRAINING
        if name in known and (value := getattr(options, name)) is not None
    }
    if group != "lstm":
        given.pop("hidden", None)
    if "lr_milestones" in given:
        given["lr_milestones"] = tuple(given["lr_milestones"])
    chosen: dict[str, Any] = {**GROUPS[group].settings, **given}
    chosen |= {"device": options.device, "threads": options.threads, "eval_every": chosen["epochs"]}
    if options.precision != "auto":
        chosen["precision"] = options.precision
    if config is ImageConfig:
        chosen |= {"data": options.images, "schedule_epochs": chosen["epochs"]}
        if options.model:
            chosen["model"] = options.model
    else:
        chosen |= {"data": options.text, "tokenizer": "bpe"}
    chosen |= {"split": "1", "chunks": 1, "act": ("none",), "grad": ("none",)}
    return config(**chosen, replicas=replicas, dp_comp=METHODS[row], seed=seed)


def render(lines: Sequence[Line]) -> str:
    """The tables of all groups that have results."""
    found = by_row(lines)
    return "\n\n".join(text for group in GROUPS if (text := _group_table(group, found)))


def _group_table(group: str, found: Found) -> str:
    metric, rows, _ = GROUPS[group]
    names = {row: f"{group}: {row}" for row in rows if f"{group}: {row}" in found}
    if not names:
        return ""
    whole = _memory(found, f"{group}: {EF}")
    table = []
    for row, name in names.items():
        runs = [line for line in found[name].values() if "diverged" not in line]
        diverged = len(found[name]) - len(runs)
        label = f"{row} ({diverged} diverged)" if diverged else row
        if not runs:
            table.append([label, 0])
            continue
        held = _memory(found, name)
        differences = [
            ""
            if row == other
            else paired(
                found, name, f"{group}: {other}", metric.name, percent=90, scale=metric.scale
            )
            for other in (EF, DENSE)
        ]
        steps = [line["replicas"]["wire_bytes"] / line["steps"] for line in runs]
        table.append(
            [
                *(label, len(runs), spread([metric.scale * line[metric.name] for line in runs])),
                *differences,
                1e3 * statistics.median(line["step_s"] for line in runs),
                None if held is None else held / 1e6,
                None if held is None or whole is None or row == DENSE else (whole - held) / 1e6,
                statistics.mean(steps) / 1e3,
                METHODS[row],
            ]
        )
    headers = (
        *("row", "n", f"{metric.name} {metric.unit}".rstrip(), "less EF", "less dense"),
        *("ms a step", "error MB", "saved MB", "kB a step", "method"),
    )
    notes = (
        "Differences are paired by seed, +- half the interval of 90 %. A step is without "
        "evaluations; memory and bytes are those of one replica."
    )
    formats = ("", "d", "", "", "", ".1f", ".3f", ".3f", ".1f")
    text = tabulate(table, headers, floatfmt=formats, disable_numparse=[2, 3, 4])
    return f"{group}\n{text}\n{notes}"


def _memory(found: Found, name: str) -> float | None:
    """Bytes that errors take on a replica, of a row; None where no run of it has ended."""
    held = [line["memory_bytes"] for line in found.get(name, {}).values() if "diverged" not in line]
    return statistics.mean(held) if held else None


if __name__ == "__main__":
    main()
