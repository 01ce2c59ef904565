"""Fine-tuning with compressed cuts, from one command that can be stopped and continued.

    python -m recipes.lab.wikitext_study --model FOLDER --data python-docs --seeds 3
    python -m recipes.lab.wikitext_study --table

The grids of Rudakov et al. (GPT-2, Top-K and quantization) and of Wang et al. (AQ-SGD) on a model
that `recipes.wikitext` has trained on other text, so that there is something to learn. A run visits
each of few training blocks several times, as AQ-SGD needs it. Seeds vary the order of the blocks,
which all rows of a seed share; the weights at the start are the same for all. `recipes.lab.study`
runs it.

On a CPU with Linux, the environment variable THP_MEM_ALLOC_ENABLE=1 makes a step of a small model
with a large vocabulary up to twice as fast: torch then asks for huge pages, for the logits.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from recipes.lab.account import REFERENCE
from recipes.lab.cut_grid import Row, chosen_options, grid_parser, run_grid, shared_settings
from recipes.lab.study import Line, data_of
from recipes.lab.study_table import Results, render
from recipes.lab.wikitext_claims import TABLE
from recipes.ranks import Ranks
from recipes.run_folder import RunFolder
from recipes.summary import History
from recipes.text_config import TextConfig
from recipes.text_model import make_model
from recipes.tokens import Blocks
from recipes.wikitext import TextData, TextTrainer, load_data

# Quantization fwA-bwB: A bits forward, B bits backward, one scale a tensor, or one a channel where
# it says so (as in the authors' code of AQ-SGD). Methods with memory start from an uncompressed
# warm-up, which fills AQ-SGD's memory; "after warm-up" is what they are to be compared with. The
# gradients of the tied embedding go in bf16 where no method is named for it; with LoRA, of rank 8,
# the embedding is not trained.
ROWS: Final[dict[str, Row]] = {
    REFERENCE: Row(REFERENCE, REFERENCE),
    "top 50 %": Row("topk:0.5", "topk:0.5"),
    "top 30 %": Row("topk:0.3", "topk:0.3"),
    "top 20 %": Row("topk:0.2", "topk:0.2"),
    "top 10 %": Row("topk:0.1", "topk:0.1"),
    "top 5 %": Row("topk:0.05", "topk:0.05"),
    "top 50 %, same indices": Row("topk:0.5", "same"),
    "top 30 %, same indices": Row("topk:0.3", "same"),
    "top 20 %, same indices": Row("topk:0.2", "same"),
    "top 10 %, same indices": Row("topk:0.1", "same"),
    "fw4-bw8": Row("quant:4", "quant:8"),
    "fw8-bw4": Row("quant:8", "quant:4"),
    "fw2-bw8": Row("quant:2", "quant:8"),
    "fw2-bw6": Row("quant:2", "quant:6"),
    "fw4-bw8, after warm-up": Row("quant:4", "quant:8", warmup=True),
    "fw4-bw8, AQ-SGD": Row("aqsgd+quant:4", "quant:8", warmup=True),
    "fw2-bw8, after warm-up": Row("quant:2", "quant:8", warmup=True),
    "fw2-bw8, AQ-SGD": Row("aqsgd+quant:2", "quant:8", warmup=True),
    "fw2 channels-bw8, after warm-up": Row("quant:2:scale=channel", "quant:8", warmup=True),
    "fw2 channels-bw8, AQ-SGD": Row("aqsgd+quant:2:scale=channel", "quant:8", warmup=True),
    "fw2 rotated-bw8, after warm-up": Row("rotate+lloyd:2", "quant:8", warmup=True),
    "fw2 rotated-bw8, AQ-SGD": Row("aqsgd+rotate+lloyd:2", "quant:8", warmup=True),
    "auto:memory": Row("auto:memory", "auto:memory"),
    "auto:scratch": Row("auto:scratch", "auto:scratch"),
    "top 10 %, after warm-up": Row("topk:0.1", "topk:0.1", warmup=True),
    "top 10 %, EF": Row("ef+topk:0.1", "ef+topk:0.1", warmup=True),
    "top 10 %, EF21": Row("ef21+topk:0.1", "ef21+topk:0.1", warmup=True),
    "top 10 %, AQ-SGD": Row("aqsgd+topk:0.1", "topk:0.1", warmup=True),
    "top 30 %, AQ-SGD": Row("aqsgd+topk:0.3", "topk:0.3", warmup=True),
    "fw4-bw8, tie 8 bits": Row("quant:4", "quant:8", also={"tie": "quant:8"}),
    "fw4-bw8, tie EF top 1 %": Row("quant:4", "quant:8", also={"tie": "ef+topk:0.01"}),
    f"LoRA, {REFERENCE}": Row(REFERENCE, REFERENCE, also={"lora": 8}),
    "LoRA, fw4-bw8": Row("quant:4", "quant:8", also={"lora": 8}),
    "LoRA, top 20 %": Row("topk:0.2", "topk:0.2", also={"lora": 8}),
}

# What the findings rest on, for all seeds before the other rows.
FIRST: Final = (
    *(REFERENCE, "top 20 %", "top 10 %", "top 10 %, same indices", "fw4-bw8"),
    *("fw2-bw8, after warm-up", "fw2-bw8, AQ-SGD"),
)

#: Counts of a part of the account, under the names that lines have.
COUNTS: Final = {"bytes": "wire_bytes", "dense_bytes": "dense_bytes", "elements": "num_elements"}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the tables; `--table` prints only."""
    run_grid(
        argv,
        parse=parse_args,
        configuration=configuration,
        first=FIRST,
        train=train,
        settings=settings,
        render=lambda lines: render(Results.of(lines, order=list(ROWS)), TABLE),
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the study."""
    parser = grid_parser("wikitext_study", __doc__, ROWS)
    parser.set_defaults(epochs=3, batch_size=8, chunks=4, lr=1e-3, workers=1)
    add = parser.add_argument
    add("--model", default=TextConfig.model, help="hub name or folder, to fine-tune")
    add("--tokenizer", help="hub name or folder (default: the model's own)")
    add("--data", default=TextConfig.data, help="hub name, folder, text file or python-docs")
    add("--part", metavar="K/N", help="of the training articles (default: all)")
    add("--seq-len", type=int, default=256, metavar="TOKENS", help="of a block")
    add("--train-blocks", type=int, default=192, help="spread over the text; each run sees all")
    add("--eval-blocks", type=int, default=96, help="the first of the validation text")
    add("--lr-warmup-steps", type=int, default=0, help="in which the learning rate rises")
    add("--split", default=TextConfig.split, help="paper, a number of stages, or block counts")
    return parser.parse_args(argv)


def configuration(options: argparse.Namespace, row: str, seed: int) -> TextConfig:
    """The run of one row and seed."""
    chosen = chosen_options(options, TextConfig, ROWS[row], seed)
    return TextConfig.for_model(**{"tie": REFERENCE, **chosen}, eval_limit=options.eval_blocks)


def settings(config: TextConfig, options: argparse.Namespace) -> Line:
    """Settings that all runs of one file share; the model by its weights, wherever it lies."""
    shared = shared_settings(config, options)
    for name in ("tokenizer", "tie", "lora", "momentum", "hidden"):
        del shared[name]
    return {**shared, "model": identity(config), "train_blocks": options.train_blocks}


def identity(config: TextConfig) -> str:
    """A model by its weights; a new one by its name."""
    if config.is_new:
        return config.model
    digest = hashlib.sha256()
    weights = make_model(dataclasses.replace(config, lora=None), None).state_dict()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return f"weights {digest.hexdigest()[:16]}"


def train(config: TextConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run on some of the blocks."""
    text = some_blocks(data_of(config, load_data, ranks), settings["train_blocks"])
    return outcome_of(TextTrainer(config, text))


def some_blocks(text: TextData, limit: int) -> TextData:
    """The text with so many of its training blocks, spread evenly over it.

    Raises:
        ValueError: there are fewer.
    """
    if not 1 <= limit <= len(text.train):
        raise ValueError(
            f"train_blocks is {limit}, but {text.name} has {len(text.train)} training blocks; pass "
            f"--train-blocks from 1 to {len(text.train)}, or more text"
        )
    assert text.train.attention_mask is None  # blocks to train on are full
    chosen = torch.arange(limit) * len(text.train) // limit
    train = Blocks(text.train.input_ids[chosen], text.train.labels[chosen])
    return dataclasses.replace(text, train=train)


def outcome_of(trainer: TextTrainer, folder: RunFolder | None = None) -> Line:
    """Trains, and says what came out.

    The run that others are held to also says what the perplexity was before, the same for all rows.

    Args:
        trainer: of the run.
        folder: keeps its checkpoints, from the last of which it goes on; None keeps nothing.

    Raises:
        FloatingPointError: the training diverged, or its perplexity is not finite.
    """
    config, before = trainer.config, {}
    if config.act == config.grad == (REFERENCE,) and config.lora is None:
        before["perplexity_before"] = trainer.evaluate()[0]
    summary = trainer.fit(folder, resume=folder is not None, progress=False)
    for name, value in (("on", summary.on), ("off", summary.off)):
        if not math.isfinite(value):
            raise FloatingPointError(f"the perplexity, {name}, is {value}")
    return {
        **summary.to_json(),
        "tie": config.tie or "none",
        "lora": config.lora,
        **before,
        "loss_compressed": math.log(summary.on),
        "loss_uncompressed": math.log(summary.off),
        "losses": [epoch["loss"] for epoch in summary.history],  # of training
        **traffic_of(summary.history, config.warmup_epochs, trainer.steps_per_epoch),
    }


def traffic_of(history: History, warmup_epochs: int, steps_per_epoch: int) -> dict[str, float]:
    """Bytes of a step of the optimizer, after the warm-up and (`overall`) with it.

    Those of the cuts, and those of the tied embedding, each as sent and as plain tensors
    (`dense`). A run that is all warm-up counts as a whole.

    Args:
        history: of a trainer.
        warmup_epochs: the first epochs, which were uncompressed.
        steps_per_epoch: of the optimizer.
    """
    counts = [_counts(epoch) for epoch in history]
    last = counts[-1]
    begin = counts[warmup_epochs - 1] if 0 < warmup_epochs < len(history) else None
    num_epochs = len(history) - (0 if begin is None else warmup_epochs)
    sums = {name: last[name] - (0 if begin is None else begin[name]) for name in last}
    return {
        **{f"{name}_per_step": sums[name] / (num_epochs * steps_per_epoch) for name in sums},
        "cut_bytes_per_step_overall": last["cut_bytes"] / (len(history) * steps_per_epoch),
        "cut_ratio": sums["cut_bytes"] / sums["cut_dense_bytes"],
        "cut_ratio_overall": last["cut_bytes"] / last["cut_dense_bytes"],
    }


def _counts(epoch: Mapping[str, Any]) -> dict[str, float]:
    """Counts of cuts and ties since the first epoch."""
    return {
        f"{part}_{name}": epoch["account"][f"{part}s"][count]
        for part in ("cut", "tie")
        for name, count in COUNTS.items()
    }


if __name__ == "__main__":
    main()
