"""Sorting digits, an answer that is right or wrong: compression at the cuts seen by generation.

    python -m recipes.lab.sorting_study --seeds 3
    python -m recipes.lab.sorting_study --model SmolLM2-135M-Instruct.Q4_1.gguf --split 10,10,10 ...
    python -m recipes.lab.sorting_study --table

A perplexity is a mean over tokens, and hides what one wrong token does to all that follow. Here a
language model learns to continue ``3141592653=`` by ``1123345569``, and is judged by the share of
lines it has not seen that it generates without a mistake, greedily, with compression on and off.
By default the model is the tiny GPT-2, with random weights and one stage a block; a released one is
fine-tuned. `recipes.lab.study` runs it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from tabulate import tabulate

from mpcomp.links.auto import GENERAL
from recipes.config import seeded
from recipes.lab.account import REFERENCE, account_of
from recipes.lab.cut_grid import Row, chosen_options, grid_parser, run_grid, shared_settings
from recipes.lab.study import Line
from recipes.lab.study_runs import reached
from recipes.lab.study_table import Results, Run, spread
from recipes.lab.wikitext_study import identity, traffic_of
from recipes.metric import Metric
from recipes.ranks import Ranks
from recipes.text_config import TextConfig
from recipes.tokens import END_OF_TEXT, IGNORED, Blocks, tokenizer_of
from recipes.wikitext import TextData, TextTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXACT: Final = Metric(
    name="exact",
    unit="%",
    axis="lines sorted without a mistake [%]",
    scale=100.0,
    higher_is_better=True,
    logarithmic=False,
)

ROWS: Final[dict[str, Row]] = {
    REFERENCE: Row(REFERENCE, REFERENCE),
    "auto": Row(*GENERAL),
    "auto:scratch": Row("auto:scratch", "auto:scratch"),
    "auto:memory": Row("auto:memory", "auto:memory"),
    "fw4-bw8": Row("quant:4", "quant:8"),
    "fw4-bw8, scale a token": Row("quant:4:scale=token", "quant:8:scale=token"),
    "top 10 %": Row("topk:0.1", "topk:0.1"),
}
NUM_DIGITS: Final = 10  # of a line, each from 0 to 9
SEPARATOR: Final = "="


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing, then prints the table; `--table` prints only."""
    run_grid(
        argv,
        parse=parse_args,
        configuration=configuration,
        train=train,
        settings=settings,
        render=render,
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the study."""
    parser = grid_parser("sorting_study", __doc__, ROWS)
    parser.set_defaults(epochs=5, batch_size=64, chunks=1, lr=1e-3, workers=0)
    add = parser.add_argument
    add("--model", default="tiny", help="hub name, folder or GGUF file, to fine-tune (or tiny)")
    add("--split", default=TextConfig.split, help="paper, a number of stages, or block counts")
    add("--train-lines", type=int, default=4_096, help="(default %(default)s)")
    add("--eval-lines", type=int, default=512, help="(default %(default)s)")
    return parser.parse_args(argv)


def configuration(options: argparse.Namespace, row: str, seed: int) -> TextConfig:
    """The run of one row and seed."""
    chosen = chosen_options(options, TextConfig, ROWS[row], seed)
    return TextConfig.for_model(
        **{**chosen, "data": "sorting", "seq_len": 2 * NUM_DIGITS + 1, "tie": REFERENCE}
    )


def settings(config: TextConfig, options: argparse.Namespace) -> Line:
    """Settings that all runs of one file share."""
    shared = shared_settings(config, options)
    lines = {"train_lines": options.train_lines, "eval_lines": options.eval_lines}
    return {**shared, "model": identity(config), **lines}


def train(config: TextConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run; its line has the share of exact answers, on and off."""
    counts = settings["train_lines"], settings["eval_lines"]
    trainer = SortingTrainer(config, lines_to_sort(config, *counts), ranks)
    summary = trainer.fit(progress=False)
    return {
        **reached(summary),
        EXACT.on: summary.on,
        EXACT.off: summary.off,
        "losses": [epoch["loss"] for epoch in summary.history],
        "act": summary.act,
        "grad": summary.grad,
        **traffic_of(summary.history, 0, trainer.steps_per_epoch),
    }


class SortingTrainer(TextTrainer):
    """The trainer of a model that sorts, judged by what it generates."""

    metric = EXACT

    def judge(self) -> float:
        """The share of lines that are continued without a mistake."""
        right = 0
        for batch in self.eval_loader:
            lines = batch["input_ids"]
            prompts = lines[:, : NUM_DIGITS + 1].to(self.device)
            said = self.pipe.generate(prompts, max_new_tokens=NUM_DIGITS)
            # A row that ended early is padded, and one that all rows of a batch end is shorter.
            if said.shape == lines.shape:
                right += int((said.cpu() == lines).all(1).sum())
        return right / len(self.eval_loader.blocks)


def lines_to_sort(config: TextConfig, num_train: int, num_eval: int) -> TextData:
    """Lines ``3141592653=1123345569`` as blocks; those to train and to evaluate on share none.

    Raises:
        ValueError: the tokenizer takes several digits for one token.
    """
    found: dict[str, None] = {}  # in order, each once
    generator = seeded(0)  # all seeds sort the same lines
    while len(found) < num_train + num_eval:
        digits = torch.randint(10, (num_train + num_eval, NUM_DIGITS), generator=generator)
        for row in digits.tolist():
            line = "".join(map(str, row)) + SEPARATOR + "".join(map(str, sorted(row)))
            found.setdefault(line)
    lines = list(found)[: num_train + num_eval]
    tokenizer = _digits() if config.is_new else tokenizer_of(config.model, [], vocab_size=0)
    rows = tokenizer(lines, add_special_tokens=False)["input_ids"]
    if {len(row) for row in rows} != {config.seq_len}:
        raise ValueError(
            f"the tokenizer of {config.model} takes several digits for one token; pass a model "
            "whose tokenizer has a token for each digit"
        )
    tokens = torch.tensor(rows)
    labels = tokens.clone()
    labels[:, : NUM_DIGITS + 1] = IGNORED  # the question is no answer
    train, held_out = (
        Blocks(tokens[part], labels[part]) for part in (slice(num_train), slice(num_train, None))
    )
    return TextData(train, held_out, tokenizer, "sorting")


def _digits() -> PreTrainedTokenizerBase:
    """A tokenizer of digits, the separator and the end of a text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*map(str, range(10)), SEPARATOR, END_OF_TEXT]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )


def render(lines: Sequence[Line]) -> str:
    """The table: exact answers on and off, how many times less than bf16 was sent, the loss."""
    results = Results.of(lines, order=list(ROWS))

    def cells(row: str, found: Sequence[Run]) -> list[Any]:
        accounts = [account_of(run) for run in found]
        return [
            *(
                spread([100 * run[key] for run in found], between="+-")
                for key in (EXACT.on, EXACT.off)
            ),
            statistics.mean(account.below_bf16 or 0 for account in accounts),
            statistics.mean(account.cuts.below_bf16 or 0 for account in accounts),
            statistics.mean(run["loss"] for run in found),
            f"{found[0]['act']} / {found[0]['grad']}",
        ]

    headers = (
        *("row", "n", "exact on %", "exact off %", "x below bf16", "cuts alone", "loss"),
        "activations / gradients",
    )
    table = results.table({row: row for row in results.runs}, cells)
    formats = ("", "d", "", "", ".1f", ".1f", ".3f", "")
    text = tabulate(table, headers, floatfmt=formats, disable_numparse=[2, 3])
    return f"{text}\nMean +- standard deviation of n seeds."


if __name__ == "__main__":
    main()
