"""Compression between replicas on CIFAR-10: quality, bytes and floats, as paired differences.

    torchrun --nproc-per-node 4 -m recipes.replica_study --data FOLDER --seeds 5
    python -m recipes.replica_study --table

Every process is a replica. Each finished (row, seed) is one line of the results file; those are
skipped when the command is given again. A row differs from the row it is compared with in what
its name says, and in nothing else; of each seed both have the same data, order and first weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from tabulate import tabulate

from recipes.image_config import MODELS, ImageConfig
from recipes.image_training import ImageTrainer, load_data
from recipes.ranks import Ranks, joined
from recipes.run_folder import append_json_line, read_json_lines

Line = dict[str, Any]


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

#: Quantiles of Student's t for two-sided intervals of 95 %, by degrees of freedom.
_T_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the tables; `--table` prints only."""
    with joined() as ranks:
        options = _parse(argv)
        if not options.table:
            _run_missing(options, ranks)
        if not ranks.speaks:
            return
        lines = read_json_lines(options.out)
        if not lines:
            raise ValueError(f"{options.out} has no results yet; run without --table first")
        print(render(lines))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.replica_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/replica_study.jsonl"), help="results file")
    add("--data", default=ImageConfig.data, help="hub name, folder of parquet files, or digits")
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help="; ".join(ROWS).replace("%", "%%"))
    add("--groups", nargs="+", choices=sorted({row.group for row in ROWS.values()}))
    add("--seeds", type=int, default=5, help="seeds 0 to n-1 of every row")
    add("--model", choices=MODELS, default="resnet18")
    add("--width", type=int, default=16)
    add("--epochs", type=int, help="(default %(default)s)", default=5)
    add("--train-limit", type=int, default=8_192, help="images")
    add("--test-limit", type=int, default=4_000, help="images")
    add("--batch-size", type=int, default=128, help="of all replicas together")
    add("--lr", type=float, default=0.05)
    add("--precision", default="auto")
    add("--device", default="auto")
    add("--threads", type=int, default=1, help="of each process, on the CPU")
    add("--table", action="store_true", help="print the tables of the results, run nothing")
    options = parser.parse_args(argv)
    chosen = options.rows or list(ROWS)
    options.rows = [r for r in chosen if not options.groups or ROWS[r].group in options.groups]
    return options


def configuration(options: argparse.Namespace, row: str, seed: int, replicas: int) -> ImageConfig:
    """The run of one row and seed."""
    names = {field.name for field in dataclasses.fields(ImageConfig)} & set(vars(options))
    chosen = {
        **{name: getattr(options, name) for name in names},
        **{"split": "1", "chunks": 1, "act": ("none",), "grad": ("none",)},
        **{"replicas": replicas, "dp_comp": ROWS[row].dp_comp, "seed": seed},
        **{"eval_every": options.epochs, "schedule_epochs": options.epochs},
        **ROWS[row].also,
    }
    return ImageConfig(**chosen)


def _run_missing(options: argparse.Namespace, ranks: Ranks) -> None:
    if ranks.size < 2:
        raise ValueError(
            "every process is a replica; start this with torchrun --nproc-per-node 4, or pass "
            "--table"
        )
    configs = {
        (row, seed): configuration(options, row, seed, ranks.size)
        for seed in range(options.seeds)
        for row in options.rows
    }
    done = ranks.gather([[x["row"], x["seed"]] for x in read_json_lines(options.out)])[0]
    missing = {key: c for key, c in configs.items() if list(key) not in done}
    print(f"{len(configs) - len(missing)} of {len(configs)} runs are finished in {options.out}")
    dataset = None
    for (row, seed), config in missing.items():
        dataset = dataset or ranks.together(lambda config=config: load_data(config))  # type: ignore[misc]
        line = _train(row, config, dataset, ranks)
        if ranks.speaks:
            append_json_line(options.out, line)
            print(f"{row}, seed {seed}: {_shown(line)}", flush=True)


def _train(row: str, config: ImageConfig, dataset: Any, ranks: Ranks) -> Line:
    """Trains one run on all ranks; a divergence is a result too."""
    start: Line = {"row": row, "seed": config.seed, "settings": config.to_json()}
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    start |= {"device": machine, "torch": torch.__version__}
    start["settings"]["data"] = Path(config.data).name
    trainer = ImageTrainer(config, dataset, ranks)
    try:
        summary = trainer.fit(progress=False)
    except FloatingPointError as error:  # on all ranks
        return {**start, "diverged": str(error)}
    steps = trainer.replica_log.new_steps()
    every = max(1, len(steps) // 50)
    return {
        **start,
        "accuracy": summary.on,
        "loss": summary.loss,
        "seconds": summary.seconds,
        "wire_bytes": summary.wire_bytes,
        "dense_bytes": summary.dense_bytes,
        "replicas": summary.history[-1]["replicas"],
        "cfs": [step["cf"] for step in steps[::every]] if "cf" in steps[-1] else None,
    }


def _shown(line: Line) -> str:
    if "diverged" in line:
        return "diverged"
    saved = line["dense_bytes"] / line["wire_bytes"]
    return f"{100 * line['accuracy']:.2f} %, {saved:.1f} x fewer bytes, {line['seconds']:.0f} s"


def render(lines: Sequence[Line]) -> str:
    """The tables of all groups that have results."""
    groups = dict.fromkeys(row.group for row in ROWS.values())
    return "\n\n".join(text for group in groups if (text := _group_table(group, lines)))


def _group_table(group: str, lines: Sequence[Line]) -> str:
    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        found.setdefault(line["row"], {})[line["seed"]] = line
    rows = [name for name in found if name in ROWS and ROWS[name].group == group]
    if not rows:
        return ""
    references = dict.fromkeys(ROWS[name].against for name in rows)
    shown = [*(name for name in references if name not in rows), *rows]
    table = []
    for name in shown:
        runs = [x for x in found.get(name, {}).values() if "diverged" not in x]
        diverged = len(found.get(name, {})) - len(runs)
        if not runs:
            table.append([name, len(found.get(name, {})), "diverged" if diverged else "-"])
            continue
        table.append(
            [
                name,
                len(runs),
                _spread([100 * x["accuracy"] for x in runs]),
                _difference(found, name),
                *(statistics.mean(_saved(x, k) for x in runs) for k in ("bytes", "floats", "link")),
                ROWS[name].dp_comp,
            ]
        )
    headers = (
        *("row", "n", "accuracy %", "less reference, points"),
        *("bytes x", "floats x", "on the link x", "method"),
    )
    return f"{group}\n" + tabulate(table, headers, floatfmt=".1f")


def _saved(line: Line, kind: str) -> float:
    """How many times less than dense was sent."""
    sent = line["replicas"]
    if kind == "bytes":
        return float(line["dense_bytes"] / line["wire_bytes"])
    if kind == "floats":
        return float(sent["dense_bytes"] / 4 / sent["floats"])
    return float(sent["dense_traffic_bytes"] / sent["traffic_bytes"])


def _difference(found: Mapping[str, Mapping[int, Line]], name: str) -> str:
    """The mean of paired differences in points, with its interval of 95 %."""
    against = found.get(ROWS[name].against, {})
    if name == ROWS[name].against:
        return ""
    pairs = [
        100 * (line["accuracy"] - against[seed]["accuracy"])
        for seed, line in found[name].items()
        if "accuracy" in line and "accuracy" in against.get(seed, {})
    ]
    if not pairs:
        return "-"
    mean = statistics.mean(pairs)
    if len(pairs) == 1:
        return f"{mean:+.2f}"
    error = _T_95[min(len(pairs) - 2, len(_T_95) - 1)] * statistics.stdev(pairs)
    return f"{mean:+.2f} +- {error / len(pairs) ** 0.5:.2f}"


def _spread(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.2f} +- {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"


if __name__ == "__main__":
    main()
