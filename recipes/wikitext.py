"""Trains or fine-tunes a causal language model cut into compressed stages; perplexity on and off.

    python -m recipes.wikitext --model tiny --data python-docs --compare    # no download
    python -m recipes.wikitext --act aqsgd+quant:4 --grad quant:8 --device cuda
    python -m recipes.wikitext --model lstm --data python-docs --hidden 256 --compare
    python -m recipes.wikitext --resume runs/<folder>
    torchrun --nproc-per-node 4 -m recipes.wikitext --model tiny --data python-docs

The LSTM of ConEF's authors, 16 replicas with 2 rows of text each:

    torchrun --nproc-per-node 16 -m recipes.wikitext --model lstm --hidden 672 --split 1 \\
        --replicas 16 --batch-size 32 --chunks 1 --seq-len 35 --epochs 60 --clip 0.25 \\
        --optimizer sgd --lr 2 --lr-milestones 15 30 45 --lr-factor 0.25 \\
        --dp-comp conef:0.4:beta=0.9+randomblock:0.1

Defaults are those of Rudakov et al. for GPT-2 on WikiText-2 (`TextConfig`), with others for models
that begin with random weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.command import Parser, Recipe, run_recipe
from recipes.text_config import EVAL_SPLITS, SIZES, TextConfig
from recipes.text_training import TextData, TextTrainer, load_data


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the recipe; a mistake in the input ends it with one line."""
    recipe = Recipe(
        parser=_parser(),
        config=TextConfig,
        configure=_configure,
        load=load_data,
        trainer=TextTrainer,
        describe=TextData.describe,
        per_step=True,
    )
    run_recipe(recipe, argv)


def _parser() -> Parser:
    parser = Parser(
        "wikitext",
        "Train a causal language model cut into compressed stages; evaluate with and without them.",
    )
    add = parser.add_argument
    add(
        "--model",
        help=f"hub name (default {TextConfig.model}) or folder, to fine-tune; or "
        f"{', '.join(SIZES)}, with random weights",
    )
    add(
        "--data",
        help=f"hub name (default {TextConfig.data}), folder, text file or glob, or python-docs",
    )
    add("--part", metavar="K/N", help="the k-th of n parts of the training articles")
    add("--tokenizer", help="hub name or folder (default: the model's own), or bpe: a new one")
    add("--vocab-size", type=int, metavar="TOKENS", help="of a new tokenizer (default 4096)")
    add("--hidden", type=int, metavar="UNITS", help="of a layer of an lstm (default 1500)")
    add("--seq-len", type=int, metavar="TOKENS", help="of a block")
    add("--accumulate", type=int, metavar="BATCHES", help="of one step of the optimizer")
    add("--lr-warmup-steps", type=int, help="in which the learning rate rises")
    add("--tie", metavar="SPEC", help="gradients of a tied embedding, if the cut parts its copies")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank only (needs peft)")
    add("--eval-split", choices=EVAL_SPLITS)
    add("--train-limit", type=int, metavar="ARTICLES")
    add("--eval-limit", type=int, metavar="BLOCKS")
    parser.add_common()
    return parser


def _configure(chosen: Mapping[str, Any]) -> TextConfig:
    return TextConfig.for_model(**{"model": TextConfig.model, **chosen})


if __name__ == "__main__":
    main()
