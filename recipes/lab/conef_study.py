"""The worth of error feedback's memory: ConEF on replicas, with sketches of several sizes.

    torchrun --nproc-per-node 4 -m recipes.lab.conef_study --groups images --images digits --seeds 5
    torchrun --nproc-per-node 4 -m recipes.lab.conef_study --groups lstm adam --seeds 5
    python -m recipes.lab.conef_study --table

Every process is a replica. The rows are those of Li et al.: dense SGD; a random block of 10 % of
each gradient, unbiased (rbSGD), with error feedback (EF), and with error feedback whose memory is
60, 80 and 90 % smaller (ConEF) or as large (partial EF); once more with Adam, which the theory says
nothing of. Runs of one seed have the same data, order and first weights, and are compared as pairs;
`recipes.lab.study` runs it.

Options for the training are for all groups of a command; where one is not given, each group has its
own (`GROUPS`). The authors' sizes are those of `recipes.cifar10` and `recipes.wikitext` (there).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tabulate import tabulate

from recipes.config import RunConfig
from recipes.image_config import MODELS, ImageConfig
from recipes.lab.study import Line, Runs, given, study_parser
from recipes.lab.study_runs import run_on_replicas
from recipes.lab.study_table import PAIRED, Results, Run, spread
from recipes.metric import ACCURACY, PERPLEXITY, Metric
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
    """The rows and settings of one table.

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


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the tables; `--table` prints only."""
    run_on_replicas(argv, parse=_parse, runs=runs, render=render)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = study_parser("conef_study", __doc__, METHODS, seeds=5)
    add = parser.add_argument
    add("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
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


def runs(options: argparse.Namespace, num_replicas: int) -> Runs[RunConfig]:
    """Group by group, all rows of a seed before the next."""
    return {
        (f"{group}: {row}", seed): configuration(options, group, row, seed, num_replicas)
        for group in options.groups
        for seed in range(options.seeds)
        for row in GROUPS[group].rows
        if row in options.rows
    }


def configuration(
    options: argparse.Namespace, group: str, row: str, seed: int, replicas: int
) -> RunConfig:
    """The run of one row of a group and seed."""
    on_images = GROUPS[group].metric is ACCURACY
    config = ImageConfig if on_images else TextConfig
    said = given(options, config)
    if options.precision == "auto":
        del said["precision"]  # each group has its own
    if not on_images:
        said.pop("model", None)
    if group != "lstm":
        said.pop("hidden", None)
    chosen: dict[str, Any] = {**GROUPS[group].settings, **said}
    chosen["eval_every"] = chosen["epochs"]
    if on_images:
        chosen |= {"data": options.images, "schedule_epochs": chosen["epochs"]}
    else:
        chosen |= {"data": options.text, "tokenizer": "bpe"}
    chosen |= {"split": "1", "chunks": 1, "act": ("none",), "grad": ("none",)}
    return config(**chosen, replicas=replicas, dp_comp=METHODS[row], seed=seed)


def render(lines: Sequence[Line]) -> str:
    """The tables of all groups that have results, one for each learning rate where they vary."""
    tables = []
    for group in GROUPS:
        by_rate: dict[Any, list[Line]] = {}
        for line in lines:
            if line["row"].startswith(f"{group}: "):
                by_rate.setdefault(line.get("settings", {}).get("lr"), []).append(line)
        for rate in sorted(by_rate):
            title = f"{group}, lr {rate:g}" if len(by_rate) > 1 else group
            tables.append(_group_table(group, title, Results.of(by_rate[rate])))
    return "\n\n".join(tables)


def _group_table(group: str, title: str, results: Results) -> str:
    metric, rows, _ = GROUPS[group]
    names = {f"{group}: {row}": row for row in rows if f"{group}: {row}" in results.runs}
    whole = _memory(results.of_row(f"{group}: {EF}"))

    def cells(name: str, runs: Sequence[Run]) -> list[Any]:
        row, held, sent = names[name], _memory(runs), [run["replicas"] for run in runs]
        assert held is not None
        differences = [
            "" if row == other else results.paired(name, f"{group}: {other}", metric)
            for other in (EF, DENSE)
        ]
        return [
            spread([metric.scale * run[metric.name] for run in runs], between="+-"),
            *differences,
            1e3 * statistics.median(run["step_s"] for run in runs),
            held / 1e6,
            None if whole is None or row == DENSE else (whole - held) / 1e6,
            statistics.mean(run["replicas"]["wire_bytes"] / run["steps"] for run in runs) / 1e3,
            statistics.mean(one["dense_bytes"] / 2 / one["wire_bytes"] for one in sent),
            METHODS[row],
        ]

    headers = (
        *("row", "n", f"{metric.name} {metric.unit}".rstrip(), "less EF", "less dense"),
        *("ms a step", "error MB", "saved MB", "kB a step", "x below bf16", "method"),
    )
    notes = (
        f"{PAIRED} A step is without evaluations; memory and bytes are those of one replica, "
        "dense gradients fp32."
    )
    formats = ("", "d", "", "", "", ".1f", ".3f", ".3f", ".1f", ".1f")
    table = results.table(names, cells)
    text = tabulate(table, headers, floatfmt=formats, disable_numparse=[2, 3, 4])
    return f"{title}\n{text}\n{notes}"


def _memory(runs: Sequence[Run]) -> float | None:
    """Bytes that errors take on a replica; None where no run has ended."""
    return statistics.mean(run["memory_bytes"] for run in runs) if runs else None


if __name__ == "__main__":
    main()
