"""Local SGD against an exchange in every step: a language model at equal tokens, and its bytes.

    torchrun --nproc-per-node 4 -m recipes.lab.local_study --data python-docs --epochs 6 --seeds 3
    torchrun --nproc-per-node 2 -m recipes.lab.local_study --data FOLDER --out runs/two.jsonl
    torchrun --nproc-per-node 4 -m recipes.lab.local_study --optimizer muon --out runs/muon.jsonl
    torchrun --nproc-per-node 4 -m recipes.lab.local_study --stages 2 --out runs/both_axes.jsonl
    torchrun --nproc-per-node 4 -m recipes.lab.local_study --per-machine 2 --out runs/machines.jsonl
    python -m recipes.lab.local_study --table

Every process is a replica, or a stage of one; `recipes.lab.study` runs it. Rows differ in what they
send between replicas, and in when; of each seed all have the same text, order and first weights,
and the same optimizer inside. The learning rate falls to 0, so that replicas hardly differ where a
run ends within a period.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tabulate import tabulate

from recipes.config import OPTIMIZERS
from recipes.lab.study import Line, Runs, by_seed, given, study_parser
from recipes.lab.study_runs import run_on_replicas
from recipes.lab.study_table import PAIRED, PERCENT, Results, Run, half_interval, spread
from recipes.metric import PERPLEXITY
from recipes.text_config import SIZES, TextConfig

DDP: Final = "DDP"
#: What the cuts of all other rows send, where replicas have stages: the default of a model that
#: begins with random weights. Cuts of DDP send everything, as its replicas do.
AT_CUTS: Final[Mapping[str, Any]] = {
    "act": ("auto:scratch",),
    "grad": ("auto:scratch",),
    "tie": "quant:8",
}

#: Row -> what compresses between replicas.
METHODS: Final[Mapping[str, str]] = {
    DDP: "none",
    "DDP, EF Top-10 %": "ef+topk:0.1+quant:4",
    "DDP, EF Top-1 %": "ef+topk:0.01+quant:4",  # DGC's rule with the optimizer's own momentum
    "DDP, GraVAC": "gravac:cf=20-1000:eps=0.1:window=20:smoothing=0.2+topk:0.1+quant:4",
    "DDP, PowerSGD": "powersgd:4",
    "DiLoCo": "diloco:30",
    "DiLoCo, 4 bits": "diloco:30+ef+quant:4",
    "DiLoCo, 2 bits": "diloco:30+ef+quant:2",
    "DiLoCo, 4 bits, 3 parts": "diloco:30:parts=3+ef+quant:4",
    "DiLoCo, Top-2 %": "diloco:30+ef+topk:0.02+quant:2",
    # In a run of few periods the momentum of the paper has no time to settle.
    "DiLoCo, momentum 0.5, 4 bits": "diloco:30:lr=1:momentum=0.5+ef+quant:4",
    # The same bytes, by half of the bits twice as often.
    "DiLoCo of 15 steps, momentum 0.5, 2 bits": "diloco:15:lr=1:momentum=0.5+ef+lloyd:2",
    # At the rate that is DDP's best replicas are driven apart, which outer momentum makes worse.
    "DiLoCo of 7 steps, no momentum, 1 bit": "diloco:7:lr=1:momentum=0+ef+lloyd:1",
    # With a rate of its own inside, and a long warm-up.
    "DiLoCo of 4 steps, no momentum, 1 bit": "diloco:4:lr=1:momentum=0+ef+lloyd:1",
    "DiLoCo of 8 steps, no momentum, 1 bit": "diloco:8:lr=1:momentum=0+ef+lloyd:1",
    "DiLoCo of 2 steps, Top-8 % of signs": "diloco:2:lr=1:momentum=0+ef+topk:0.08+sign",
    # Adam's first moments inside learn of the others by what is exchanged anyway.
    "DiLoCo of 2 steps, Top-8 % of signs, corrected": (
        "diloco:2:lr=1:momentum=0:correction=0.5+ef+topk:0.08+sign"
    ),
    "DiLoCo of 3 steps, Top-11 % of signs, corrected": (
        "diloco:3:lr=1:momentum=0:correction=0.5+ef+topk:0.11+sign"
    ),
    "DiLoCo of 4 steps, 1 bit, corrected": "diloco:4:lr=1:momentum=0:correction=0.5+ef+lloyd:1",
    "DiLoCo of 6 steps, Top-11 % of signs, corrected": (
        "diloco:6:lr=1:momentum=0:correction=0.5+ef+topk:0.11+sign"
    ),
    # The outer step of SparseLoCo: no momentum, and a residual that fades.
    "SparseLoCo": "diloco:30:lr=1:momentum=0+ef:decay=0.95+topk:0.02+quant:2",
}
#: Row -> dtype of parameters too small to compress, where they would be a third of the bytes.
SMALL_IN: Final[Mapping[str, str]] = {
    "DiLoCo of 2 steps, Top-8 % of signs": "bf16",
    "DiLoCo of 2 steps, Top-8 % of signs, corrected": "bf16",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the table; `--table` prints only."""
    run_on_replicas(argv, parse=_parse, runs=runs, render=render)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = study_parser("local_study", __doc__, METHODS, seeds=3)
    add = parser.add_argument
    add("--data", default=TextConfig.data, help="hub name, folder, text files, or python-docs")
    add("--model", choices=SIZES, default="tiny")
    add("--epochs", type=int)
    add("--batch-size", type=int, default=16, help="blocks, of all replicas together")
    add("--stages", type=int, default=1, help="of every replica, each in a process of its own")
    add("--per-machine", type=int, metavar="N", help="replicas that average all their gradients")
    add("--optimizer", choices=OPTIMIZERS, help="inside each replica (default: adamw)")
    add("--lr", type=float)
    add("--lr-warmup-steps", type=int, default=30)
    add("--seq-len", type=int, metavar="TOKENS", help="of a block")
    add("--vocab-size", type=int, metavar="TOKENS")
    add("--train-limit", type=int, metavar="ARTICLES")
    add("--eval-limit", type=int, metavar="BLOCKS")
    return parser.parse_args(argv)


def runs(options: argparse.Namespace, num_processes: int) -> Runs[TextConfig]:
    """All rows of a seed before the next.

    Raises:
        ValueError: these processes make no pipelines of so many stages.
    """
    replicas, rest = divmod(num_processes, options.stages)
    if rest or replicas < 2:
        raise ValueError(
            f"{num_processes} processes, --stages {options.stages}: expected two replicas or more, "
            "each of so many processes"
        )
    return by_seed(
        options.rows, options.seeds, lambda row, seed: configuration(options, row, seed, replicas)
    )


def configuration(options: argparse.Namespace, row: str, seed: int, replicas: int) -> TextConfig:
    """The run of one row and seed."""
    chosen = given(options, TextConfig)
    if options.precision == "auto":
        del chosen["precision"]  # each model has its own
    chosen |= {"split": str(options.stages), "chunks": options.stages}
    chosen |= {"act": ("none",), "grad": ("none",)}
    if options.stages > 1:
        chosen |= {"tie": "none"} if row == DDP else AT_CUTS
    chosen |= {"replicas": replicas, "dp_comp": METHODS[row], "seed": seed}
    chosen["dp_small"] = SMALL_IN.get(row, "none")
    config = TextConfig.for_model(**chosen)
    return TextConfig.for_model(**{**chosen, "eval_every": config.epochs})


def render(lines: Sequence[Line]) -> str:
    """The table: quality, what goes between replicas, and what one keeps for that."""
    results = Results.of(lines, order=list(METHODS))
    rows = {row: row for row in results.runs if row in METHODS}

    def cells(row: str, of_row: Sequence[Run]) -> list[Any]:
        sent = [run["replicas"] for run in of_row]
        fewer = statistics.mean(_times(one["dense_bytes"], one["wire_bytes"]) for one in sent)
        return [
            spread([run[PERPLEXITY.name] for run in of_row], between="+-"),
            "" if row == DDP else results.paired(row, DDP, PERPLEXITY),
            "" if row == DDP else _more_loss(results, row),
            statistics.mean(map(_bytes_a_token, of_row)),
            fewer,
            fewer / 2,
            statistics.mean(
                _times(one["dense_traffic_bytes"], one["traffic_bytes"]) for one in sent
            ),
            statistics.mean(run["memory_bytes"] / 1e6 for run in of_row),
            f"{METHODS[row]}, small ones in {SMALL_IN[row]}" if row in SMALL_IN else METHODS[row],
        ]

    headers = (
        *("row", "n", PERPLEXITY.name, "less DDP", "loss, % above DDP", "bytes a token"),
        *("bytes x", "x below bf16", "on the link x", "kept MB", "method"),
    )
    formats = ("", "d", "", "", "", ".1f", ".1f", ".1f", ".1f", ".1f")
    table = results.table(rows, cells)
    notes = (
        f"{PAIRED} Loss: of the evaluation, the logarithm of the perplexity. Bytes a token: of all "
        "processes,\nat cuts too; x: times fewer than fp32 between replicas; memory is one "
        "replica's."
    )
    return f"{tabulate(table, headers, floatfmt=formats, disable_numparse=[2, 3, 4])}\n{notes}"


def _more_loss(results: Results, row: str) -> str:
    """The loss less that of DDP, in percent of it, paired by seed."""
    own, dense = (
        results.values(name, lambda run: math.log(run[PERPLEXITY.name])) for name in (row, DDP)
    )
    shared = sorted(own.keys() & dense.keys())
    if not shared:
        return "-"
    differences = [100 * (own[seed] / dense[seed] - 1) for seed in shared]
    mean = f"{statistics.mean(differences):+.2f}"
    if len(differences) == 1:
        return mean
    return f"{mean} +- {half_interval(differences, PERCENT):.2f}"


def _bytes_a_token(run: Run) -> float:
    settings = run["settings"]
    tokens: int = run["steps"] * settings["batch_size"] * settings["seq_len"]
    return float(run["wire_bytes"]) / tokens


def _times(dense: float, sent: float) -> float:
    """Factor by which less was sent; a run that is shorter than a period sends nothing."""
    return dense / sent if sent else math.inf


if __name__ == "__main__":
    main()
