"""Compression between replicas on CIFAR-10: quality, bytes and floats, as paired differences.

    torchrun --nproc-per-node 4 -m recipes.lab.replica_study --data FOLDER --seeds 5
    python -m recipes.lab.replica_study --table

Every process is a replica; `recipes.lab.study` runs it. A row differs from the row it is compared
with in what its name says, and in nothing else; of each seed both have the same data, order and
first weights.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tabulate import tabulate

from recipes.image_config import MODELS, ImageConfig
from recipes.lab.study import Line, Runs, by_seed, given, study_parser
from recipes.lab.study_runs import run_on_replicas
from recipes.lab.study_table import PAIRED, Results, Run, spread
from recipes.metric import ACCURACY


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        group: the table it belongs to.
        dp_comp: what compresses gradients between replicas.
        also: other options of the configuration.
        against: the row it is compared with.
    """

    group: str
    dp_comp: str
    also: Mapping[str, Any] = MappingProxyType({})
    against: str = "dense"


#: DGC and RedSync have the momentum themselves.
_OWN_MOMENTUM: Final = {"momentum": 0.0}
_SMALL: Final = {"batch_size": 32, "lr": 0.0125}
_LARGE: Final = {"batch_size": 512, "lr_warmup_epochs": 1}
_SCALED: Final = {"base_batch": 32}

ROWS: Final[dict[str, Row]] = {
    # Quality at a given compression.
    "dense": Row("quality", "none"),
    # Values in 4 bits: then even the smallest factor, 8, is 28 times fewer bytes.
    "GraVAC": Row("quality", "gravac:cf=8-1000:eps=0.3:window=20:smoothing=0.2+topk:0.1+quant:4"),
    "GraVAC, stronger": Row(
        "quality", "gravac:cf=20-1000:eps=0.1:window=20:smoothing=0.2+topk:0.1+quant:4"
    ),
    "GraVAC, momentum on replicas": Row(
        "quality",
        "gravac:cf=20-1000:eps=0.05:window=20:smoothing=0.2:momentum=0.9+topk:0.1+fp16",
        _OWN_MOMENTUM,
    ),
    "GraVAC from 100, momentum on replicas": Row(
        "quality",
        "gravac:cf=100-1000:eps=0.02:window=10:smoothing=0.3:momentum=0.9+topk:0.1+fp16",
        _OWN_MOMENTUM,
    ),
    # Without masking, which at factors so small takes most of the momentum away.
    "GraVAC from 12, momentum kept": Row(
        "quality",
        "gravac:cf=12-1000:eps=0.15:window=20:smoothing=0.2:momentum=0.9:masking=false"
        "+topk:0.1+quant:4",
        _OWN_MOMENTUM,
    ),
    # Three fifths of those bytes are of small gradients; in bf16 they leave room for less factor.
    "GraVAC from 8, momentum kept": Row(
        "quality",
        "gravac:cf=8-1000:eps=0.3:window=20:smoothing=0.2:momentum=0.9:masking=false"
        "+topk:0.1+quant:4",
        {**_OWN_MOMENTUM, "dp_small": "bf16"},
    ),
    "DGC 0.1 %": Row("quality", "dgc:0.001:warmup_steps=100+fp16", _OWN_MOMENTUM),
    "EF Top-1 %": Row("quality", "ef+topk:0.01+fp16"),
    "Top-1 %, no EF": Row("quality", "topk:0.01+fp16"),
    "PowerSGD rank 2": Row("quality", "powersgd:2"),
    "1-bit SGD": Row("quality", "onebitsgd"),
    # Who adapts, over what. Random-k keeps 1 / cf of the energy, so eps is below that of Top-k.
    "GraVAC over Random-k": Row(
        "adaptive", "gravac:cf=1.5-1000:eps=0.02:window=40:policy=geometric:smoothing=0.2+randomk:1"
    ),
    "Accordion over Random-k": Row(
        "adaptive", "accordion:low=randomk/0.6667:high=randomk/0.001:interval=64"
    ),
    "GraVAC over Top-k": Row(
        "adaptive", "gravac:cf=10-1000:eps=0.1:window=20:smoothing=0.2+topk:1"
    ),
    "Accordion over Top-k": Row("adaptive", "accordion:low=topk/0.1:high=topk/0.001:interval=64"),
    # A batch 16 times as large: the rate as it is, scaled, and with rates for each layer.
    "batch 32": Row("large batch", "none", _SMALL, against="batch 32"),
    "batch 512": Row("large batch", "none", {**_SMALL, **_LARGE}, against="batch 32"),
    "batch 512, linear scaling": Row(
        "large batch", "none", {**_SMALL, **_LARGE, **_SCALED}, against="batch 32"
    ),
    "batch 512, LARS": Row(
        "large batch", "none", {**_LARGE, "optimizer": "lars", "lr": 6.0}, against="batch 32"
    ),
    "batch 512, LAMB": Row(
        "large batch", "none", {**_LARGE, "optimizer": "lamb", "lr": 0.02}, against="batch 32"
    ),
}

#: Of rows in the results that are no longer of the study: against dense, too.
_OTHERS: Final = "other rows of these results"

#: Row whose factor moves -> a row of about as many bytes and floats whose share is fixed.
FIXED: Final[Mapping[str, str]] = {"GraVAC, momentum on replicas": "DGC 0.1 %"}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the tables; `--table` prints only."""
    run_on_replicas(argv, parse=_parse, runs=runs, render=render)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = study_parser("replica_study", __doc__, ROWS, seeds=5)
    add = parser.add_argument
    add("--data", default=ImageConfig.data, help="hub name, folder of parquet files, or digits")
    add("--groups", nargs="+", choices=sorted({row.group for row in ROWS.values()}))
    add("--model", choices=MODELS, default="resnet18")
    add("--width", type=int, default=16)
    add("--depth", type=int, help="of a wide_resnet")
    add("--widen", type=int, help="of a wide_resnet, times its width")
    add("--epochs", type=int, help="(default %(default)s)", default=5)
    add("--train-limit", type=int, default=8_192, help="images")
    add("--test-limit", type=int, default=4_000, help="images")
    add("--batch-size", type=int, default=128, help="of all replicas together")
    add("--lr", type=float, default=0.05)
    add("--lr-milestones", type=int, nargs="+", metavar="EPOCH", help="instead of a cosine")
    add("--lr-factor", type=float, help="by which the rate falls there")
    options = parser.parse_args(argv)
    options.rows = [
        r for r in options.rows if not options.groups or ROWS[r].group in options.groups
    ]
    return options


def runs(options: argparse.Namespace, num_replicas: int) -> Runs[ImageConfig]:
    """All rows of a seed before the next."""
    return by_seed(
        options.rows,
        options.seeds,
        lambda row, seed: configuration(options, row, seed, num_replicas),
    )


def configuration(options: argparse.Namespace, row: str, seed: int, replicas: int) -> ImageConfig:
    """The run of one row and seed."""
    chosen = {
        **given(options, ImageConfig),
        **{"split": "1", "chunks": 1, "act": ("none",), "grad": ("none",)},
        **{"replicas": replicas, "dp_comp": ROWS[row].dp_comp, "seed": seed},
        **{"eval_every": options.epochs, "schedule_epochs": options.epochs},
        **ROWS[row].also,
    }
    return ImageConfig(**chosen)


def render(lines: Sequence[Line]) -> str:
    """The tables of all groups that have results."""
    results = Results.of(lines)
    groups = dict.fromkeys((*(row.group for row in ROWS.values()), _OTHERS))
    tables = [text for group in groups if (text := _group_table(group, results))]
    return "\n\n".join([*tables, _notes(results)])


def _row_of(name: str, results: Results) -> Row:
    if name in ROWS:
        return ROWS[name]
    return Row(_OTHERS, next((run["settings"]["dp_comp"] for run in results.of_row(name)), "-"))


def _group_table(group: str, results: Results) -> str:
    of = {name: row for name in results.runs if (row := _row_of(name, results)).group == group}
    if not of:
        return ""
    of = {row.against: _row_of(row.against, results) for row in of.values()} | of

    def cells(row: str, runs: Sequence[Run]) -> list[Any]:
        against = of[row].against
        in_bytes, in_floats, on_links = (
            statistics.mean(_saved(run, kind) for run in runs)
            for kind in ("bytes", "floats", "link")
        )
        return [
            spread([100 * run["accuracy"] for run in runs], between="+-"),
            "" if row == against else results.paired(row, against, ACCURACY),
            *(in_bytes, in_bytes / 2, in_floats, on_links),
            _factors(runs),
            of[row].dp_comp,
        ]

    headers = (
        *("row", "n", "accuracy %", "less reference, points"),
        *("bytes x", "x below bf16", "floats x", "on the link x", "factor", "method"),
    )
    table = results.table({name: name for name in of}, cells)
    formats = ("", "d", "", "", ".1f", ".1f", ".1f", ".1f", "", "")
    text = tabulate(table, headers, floatfmt=formats, disable_numparse=[2, 3, 8])
    return f"{group}\n{text}"


def _factors(runs: Sequence[Run]) -> str:
    """The lowest and the highest that an adaptive method sent by, where any is noted."""
    noted = {cf for run in runs for cf in run.get("cfs") or () if cf > 1}
    return " to ".join(f"{cf:g}" for cf in sorted({min(noted), max(noted)})) if noted else ""


def _notes(results: Results) -> str:
    said = [
        f"{PAIRED} x: times fewer than fp32.",
        "Factor: the lowest and the highest of about 50 steps of each run, dense ones left out.",
    ]
    for moves, fixed in FIXED.items():
        if results.runs.get(moves) and results.runs.get(fixed):
            points = results.paired(moves, fixed, ACCURACY)
            said.append(f"A factor that moves, {moves}, less a fixed share, {fixed}: {points}.")
    return "\n".join(said)


def _saved(line: Run, kind: str) -> float:
    """Factor by which less than dense was sent."""
    sent = line["replicas"]
    if kind == "bytes":
        return float(line["dense_bytes"] / line["wire_bytes"])
    if kind == "floats":
        return float(sent["dense_bytes"] / 4 / sent["floats"])
    return float(sent["dense_traffic_bytes"] / sent["traffic_bytes"])


if __name__ == "__main__":
    main()
