"""A small GPT-2 from random weights: what each method at the cuts costs, and what it sends.

    python -m recipes.lab.gpt2_study --seeds 3 --workers 2
    python -m recipes.lab.gpt2_study --table

The tiny GPT-2 of `recipes.wikitext`, one stage a block, on Python's documentation. Seeds vary the
weights and the order of the blocks. Both uses of the tied embedding are on the first rank, so a
step sends what its cuts send, and there is one cut more than without a tie. Published methods stand
in their own settings and, as near as they come, at the bytes of the project's own.
`recipes.lab.study` runs it; `recipes.lab.rate_quality` draws it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Final

from recipes.lab.account import REFERENCE, reference_among, reference_note
from recipes.lab.cut_grid import Row, chosen_options, grid_parser, need_row, run_grid
from recipes.lab.rate_quality import points_of, table
from recipes.lab.study import Line, data_of
from recipes.lab.wikitext_study import outcome_of
from recipes.metric import PERPLEXITY
from recipes.ranks import Ranks
from recipes.text_config import TextConfig
from recipes.wikitext import TextTrainer, load_data

ROWS: Final[dict[str, Row]] = {
    REFERENCE: Row(REFERENCE, REFERENCE),
    "fw4-bw8": Row("quant:4", "quant:8"),
    "fw4-bw8, AQ-SGD": Row("aqsgd+quant:4", "quant:8", warmup=True),
    # Tiles of 64 elements with a scale each, as TAH-Quant has them.
    "tiles of 64, 3 bits": Row("quant:3:scale=64", "quant:3:scale=64:rounding=stochastic"),
    # A rotation and the Gaussian's centroids, as in TurboQuant.
    "rotation, 3 bits": Row("rotate+lloyd:3", "rotate+lloyd:3"),
    "top 10 %": Row("topk:0.1+fp16", "topk:0.1+fp16"),
    "step 0.3 / 0.5": Row("step:0.3:centre=true:spikes=16", "step:0.5"),
    "klt, step 0.2 / 0.7, dithered": Row(
        "klt+step:0.2:centre=true", "klt+step:0.7:rounding=dither"
    ),
    "klt, step 0.1 / 0.7, dithered": Row(
        "klt+step:0.1:centre=true", "klt+step:0.7:rounding=dither"
    ),
    "klt, step 0.3 / 0.5": Row("klt+step:0.3:centre=true", "klt+step:0.5"),
    "klt, step 0.2 / 0.5": Row("klt+step:0.2:centre=true", "klt+step:0.5"),
    "klt, step 0.1 / 0.5": Row("klt+step:0.1:centre=true", "klt+step:0.5"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the table; `--table` prints only."""
    run_grid(argv, parse=parse_args, configuration=configuration, train=train, render=render)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the study."""
    parser = grid_parser("gpt2_study", __doc__, ROWS)
    parser.set_defaults(epochs=3, batch_size=8, chunks=4, lr=1e-3, workers=2)
    parser.add_argument("--data", default="python-docs", help="folder, text file or python-docs")
    options = parser.parse_args(argv)
    need_row(parser, options, REFERENCE)
    return options


def configuration(options: argparse.Namespace, row: str, seed: int) -> TextConfig:
    """The run of one row and seed."""
    chosen = chosen_options(options, TextConfig, ROWS[row], seed)
    return TextConfig.for_model(**{**chosen, "model": "tiny"})


def train(config: TextConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run."""
    return outcome_of(TextTrainer(config, data_of(config, load_data, ranks)))


def render(lines: Sequence[Line]) -> str:
    """The perplexity of the reference, and what each method costs and sends (of all epochs)."""
    reference = reference_among({line["row"] for line in lines})
    plain = [line[PERPLEXITY.on] for line in lines if line["row"] == reference]
    metric, points = points_of(lines)
    spread = f"{statistics.mean(plain):.1f}, {min(plain):.1f} to {max(plain):.1f}"
    return (
        f"{table(points, metric)}\n\nperplexity of `{reference}`: {spread} (n = {len(plain)}). "
        f"{reference_note(reference)}"
    )


if __name__ == "__main__":
    main()
