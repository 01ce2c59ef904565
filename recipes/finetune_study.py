"""A released language model, fine-tuned: what each method at the cuts costs, and what it sends.

    python -m recipes.finetune_study --model SmolLM2-135M-Instruct.Q4_1.gguf --data FOLDER
    python -m recipes.finetune_study --table

All weights, in three stages, over epochs in which the same blocks of text come again in another
order: what methods with a memory are made for. Seeds vary the order. Published methods stand in
their own settings beside the project's own; the tied embedding goes in bf16, so that the rows
differ in nothing but the cuts. `recipes.study` runs it; `recipes.rate_quality` draws it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Final

from recipes.account import REFERENCE
from recipes.cut_grid import (
    Row,
    chosen_options,
    grid_parser,
    need_row,
    run_grid,
    shared_settings,
)
from recipes.ranks import Ranks
from recipes.rate_quality import BF16_BITS, table_of_epochs
from recipes.study import Line, data_of
from recipes.text_config import TextConfig
from recipes.wikitext import TextTrainer, load_data
from recipes.wikitext_study import identity, outcome_of

ROWS: Final[dict[str, Row]] = {
    REFERENCE: Row(REFERENCE, REFERENCE),
    "auto:memory": Row("auto:memory", "auto:memory"),
    "auto": Row("auto", "auto"),
    "fw4-bw8": Row("quant:4:scale=128", "quant:8:scale=128"),
    "fw4-bw8, AQ-SGD": Row("aqsgd+quant:4:scale=128", "quant:8:scale=128"),
    "fw2-bw8, AQ-SGD": Row("aqsgd+quant:2:scale=128", "quant:8:scale=128"),
    # Tiles of 64 elements with a scale each, as TAH-Quant has them.
    "tiles of 64, 4 bits": Row("quant:4:scale=64", "quant:4:scale=64:rounding=stochastic"),
    # A rotation and the Gaussian's centroids, as in TurboQuant.
    "rotation, 3 bits": Row("rotate+lloyd:3", "rotate+lloyd:3"),
    "top 10 %": Row("topk:0.1+fp16", "topk:0.1+fp16"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the table; `--table` prints only."""
    run_grid(
        argv,
        parse=parse_args,
        configuration=configuration,
        train=train,
        settings=settings,
        render=table_of_epochs,
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the study."""
    parser = grid_parser("finetune_study", __doc__, ROWS)
    parser.set_defaults(epochs=3, batch_size=4, chunks=1, lr=2e-5, workers=2)
    add = parser.add_argument
    add("--model", help="file or folder of a released model; needed to run")
    add("--data", help="hub name, folder, text files, or python-docs")
    add("--split", default="10,10,10", help="blocks of each stage (default %(default)s)")
    add("--seq-len", type=int, default=256, metavar="TOKENS", help="of a block")
    add("--train-limit", type=int, default=4, metavar="ARTICLES", help="(default %(default)s)")
    add("--eval-limit", type=int, default=16, metavar="BLOCKS", help="(default %(default)s)")
    options = parser.parse_args(argv)
    need_row(parser, options, REFERENCE)
    if options.model is None and not options.table:
        parser.error("--model is missing: pass the file or folder of a released model")
    if options.precision == "auto":
        options.precision = "bf16"
    return options


def configuration(options: argparse.Namespace, row: str, seed: int) -> TextConfig:
    """The run of one row and seed."""
    chosen = chosen_options(options, TextConfig, ROWS[row], seed)
    return TextConfig.for_model(**{**chosen, "optimizer": "adamw", "tie": REFERENCE})


def settings(config: TextConfig, options: argparse.Namespace) -> Line:
    """Settings that all runs of one file share; the model by its weights, wherever it lies."""
    return {**shared_settings(config, options), "model": identity(config)}


def train(config: TextConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run; its line has the bytes of each epoch."""
    trainer = TextTrainer(config, data_of(config, load_data, ranks))
    outcome = outcome_of(trainer)  # trains
    cuts = [epoch["account"]["cuts"] for epoch in trainer.history]
    sums = [0, *(each["wire_bytes"] for each in cuts)]
    elements = cuts[-1]["num_elements"]
    return {
        **outcome,
        "act": config.act[0],
        "grad": config.grad[0],
        "cut_bytes_by_epoch": [after - before for before, after in itertools.pairwise(sums)],
        "bf16_bytes_an_epoch": BF16_BITS / 8 * elements / config.epochs,
    }


if __name__ == "__main__":
    main()
