"""A released encoder, fine-tuned to tell which article a paragraph is from, with compressed cuts.

    python -m recipes.lab.topics_study --model FOLDER --data FOLDER --seeds 3
    python -m recipes.lab.topics_study --table --out docs/results/topics_study.jsonl

A classifier of transformers (`--model`, as MiniLM or BERT) learns paragraphs of the longest
articles of WikiText-2 (`--data`), and is judged by others of the same articles. All its weights are
trained, in two stages. All runs begin with the same weights; seeds vary the order and the dropout.
`recipes.lab.study` runs it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from recipes.config import seeded
from recipes.lab.account import REFERENCE, account_of, reference_note
from recipes.lab.cut_grid import (
    Row,
    chosen_options,
    grid_parser,
    need_row,
    run_grid,
    shared_settings,
)
from recipes.lab.study import Line, data_of
from recipes.lab.study_runs import reached
from recipes.lab.study_table import PAIRED, Results, Run, interval, spread
from recipes.metric import ACCURACY
from recipes.optimizers import make_optimizer
from recipes.pretrained import source_of
from recipes.ranks import Ranks
from recipes.text import load_text
from recipes.text_config import TextConfig
from recipes.training import Trainer

ROWS: Final[dict[str, Row]] = {
    REFERENCE: Row(REFERENCE, REFERENCE),
    "auto": Row("auto", "auto"),
    "auto:memory": Row("auto:memory", "auto:memory"),
    "fw4-bw8": Row("quant:4", "quant:8"),
}
FEWEST_WORDS: Final = 40  # of a paragraph
#: Keys of the loss on unseen paragraphs, in nats.
LOSS_ON, LOSS_OFF = "unseen_compressed", "unseen_uncompressed"

Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class TopicsConfig(TextConfig):
    """One run: its model, and how many paragraphs of how many articles."""

    sample: ClassVar[str] = "paragraph"
    data_options: ClassVar[tuple[str, ...]] = (
        *("data", "model", "seq_len", "topics", "paragraphs", "held_out"),
    )
    at_least_1: ClassVar[tuple[str, ...]] = (
        *(*TextConfig.at_least_1, "topics", "paragraphs", "held_out"),
    )

    split: str = "3,3"
    chunks: int = 2
    seq_len: int = 64  # tokens, after which a paragraph is cut off
    topics: int = 24  # articles, the classes
    paragraphs: int = 24  # of each, to train on
    held_out: int = 8  # of each, to be judged by
    epochs: int = 1
    batch_size: int = 4
    lr: float = 1e-4
    precision: str = "fp32"


@dataclass(frozen=True)
class Ground:
    """Beginning of all runs: the classifier, and the paragraphs as rows of tokens."""

    model: nn.Module
    train: dict[str, Tensor]
    unseen: dict[str, Tensor]


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
    parser = grid_parser("topics_study", __doc__, ROWS)
    own = ("epochs", "eval_every", "batch_size", "chunks", "lr", "precision")
    chosen = {name: _default(name) for name in own}
    parser.set_defaults(rows=[REFERENCE, "auto"], workers=0, **chosen)
    add = parser.add_argument
    add("--model", default="", help="hub name or folder of an encoder; needed to run")
    add("--data", default=TextConfig.data, help="hub name, folder or text files")
    add("--split", default=_default("split"), help="blocks of each stage (default %(default)s)")
    for name, unit in (
        ("seq_len", "TOKENS"),
        ("topics", "ARTICLES"),
        ("paragraphs", "NUMBER"),
        ("held_out", "NUMBER"),
    ):
        option = f"--{name.replace('_', '-')}"
        add(option, type=int, default=_default(name), metavar=unit, help="(default %(default)s)")
    options = parser.parse_args(argv)
    need_row(parser, options, REFERENCE)
    if not options.model and not options.table:
        parser.error("--model is missing: pass the hub name or folder of an encoder")
    return options


def _default(name: str) -> Any:
    return getattr(TopicsConfig, name)


def configuration(options: argparse.Namespace, row: str, seed: int) -> TopicsConfig:
    """The run of one row and seed."""
    return TopicsConfig(**chosen_options(options, TopicsConfig, ROWS[row], seed))


def settings(config: TopicsConfig, options: argparse.Namespace) -> Line:
    """Settings that all runs of one file share; the model by its folder's name."""
    return {**shared_settings(config, options), "model": config.model.rpartition("/")[2]}


def train(config: TopicsConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run; its line has the accuracy and the loss on unseen paragraphs."""
    trainer = TopicsTrainer(config, data_of(config, load, ranks), ranks)
    summary = trainer.fit(progress=False)
    return {
        **reached(summary),
        ACCURACY.on: summary.on,
        ACCURACY.off: summary.off,
        LOSS_ON: trainer.unseen[-2],
        LOSS_OFF: trainer.unseen[-1],
        "losses": [epoch["loss"] for epoch in trainer.history],
        "methods": [str(link.method) for link in trainer.pipe.links],
    }


class TopicsTrainer(Trainer[TopicsConfig]):
    """The trainer of the classifier.

    Attributes:
        unseen: losses on unseen paragraphs, of each evaluation with compression on and off.
    """

    metric = ACCURACY
    samples = "paragraphs"

    def __init__(self, config: TopicsConfig, ground: Ground, ranks: Ranks | None = None) -> None:
        super().__init__(config, ranks)
        self.ground, self.unseen = ground, list[float]()
        num_batches = len(ground.train["labels"]) // config.batch_size
        self.cut(copy.deepcopy(ground.model), num_batches)
        self.optimizer = make_optimizer(config, self.pipe)
        steps = config.epochs * num_batches
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: max(0.0, 1 - step / steps)
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        """(paragraphs with their labels, ids)."""
        rows, size = self.ground.train, self.config.batch_size
        order = torch.randperm(len(rows["labels"]), generator=seeded(self.config.seed, epoch))
        for ids in torch.split(order, size)[: self.num_batches]:
            yield {name: each[ids] for name, each in rows.items()}, ids

    def forward_backward(self, batch: Batch) -> Tensor:
        """The mean cross-entropy."""
        paragraphs, ids = batch
        return self.pipe.forward_backward(paragraphs, sample_ids=ids)

    def num_samples(self, batch: Batch) -> int:
        """Paragraphs."""
        return len(batch[1])

    def end_step(self) -> None:
        """The schedule goes by steps."""
        self.scheduler.step()

    def judge(self) -> float:
        """The share of unseen paragraphs whose article is told."""

        def both(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
            right = (logits.argmax(1) == labels).float().mean()
            return {"right": right, "loss": F.cross_entropy(logits, labels)}

        found = self.pipe.evaluate([self.ground.unseen], both)
        self.unseen.append(found["loss"])
        return float(found["right"])


def load(config: TopicsConfig) -> Ground:
    """Reads the model, and the paragraphs of the articles that have most of them.

    Raises:
        ValueError: there is no such text or model, or too few long articles.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source, how = source_of(config.model, "pass --model the folder of an encoder", weights=True)
    tokenizer = AutoTokenizer.from_pretrained(source)
    each = config.paragraphs + config.held_out
    articles = [paragraphs_of(article) for article in load_text(config.data).train]
    articles = sorted((own for own in articles if len(own) >= each), key=len, reverse=True)
    if len(articles) < config.topics:
        raise ValueError(
            f"{config.data} has {len(articles)} articles of {each} paragraphs or more, "
            f"{config.topics} are needed; pass more text, or a smaller --topics, --paragraphs or "
            "--held-out"
        )
    chosen = []
    for own in articles[: config.topics]:
        order = torch.randperm(len(own), generator=seeded(0))[:each].tolist()
        chosen.append([own[i].replace("<unk>", tokenizer.unk_token) for i in order])

    def rows(part: slice) -> dict[str, Tensor]:
        own = [own[part] for own in chosen]
        texts = [text for paragraphs in own for text in paragraphs]
        tokens = tokenizer(
            texts,
            max_length=config.seq_len,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        labels = torch.arange(config.topics).repeat_interleave(len(own[0]))
        names = ("input_ids", "attention_mask")
        return {**{name: tokens[name] for name in names}, "labels": labels}

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # of the head, which no file has
        model = AutoModelForSequenceClassification.from_pretrained(
            source, **how, num_labels=config.topics
        )
    model.train()
    train, unseen = (rows(slice(*at)) for at in ((config.paragraphs,), (config.paragraphs, None)))
    return Ground(model, train, unseen)


def paragraphs_of(article: str) -> list[str]:
    """Lines of an article that are long enough to tell it by; no headings."""
    return [line.strip() for line in article.splitlines() if len(line.split()) >= FEWEST_WORDS]


def render(lines: Sequence[Line]) -> str:
    """The table: accuracy and what it costs, on and off, and how many times less is sent."""
    results = Results.of(lines, order=list(ROWS))
    if not results.of_row(REFERENCE):
        raise ValueError(f"there is no row {REFERENCE}, which is what the others are held to")

    def cells(row: str, runs: Sequence[Run]) -> list[str]:
        accounts = [account_of(run) for run in runs]
        mb = sum(a.whole.wire_bytes for a in accounts) / sum(run["steps"] for run in runs) / 1e6
        below = [account.below_bf16 or 0.0 for account in accounts]
        costs = [
            interval(results.differences(row, REFERENCE, itemgetter(key)), digits=3)
            for key in (LOSS_ON, LOSS_OFF)
        ]
        return [
            *(
                spread([ACCURACY.scale * run[key] for run in runs])
                for key in (ACCURACY.on, ACCURACY.off)
            ),
            *(("", "") if row == REFERENCE else costs),
            f"{mb:.3f}",
            f"{sum(below) / len(below):.1f}",
        ]

    headers = ("row", "n", "accuracy on %", "off %", "loss on", "loss off", "MB a step", "less")
    table = results.table({row: row for row in results.runs}, cells)
    shown = tabulate(table, headers, tablefmt="pipe", disable_numparse=True)
    plain = results.of_row(REFERENCE)
    loss = sum(run[LOSS_OFF] for run in plain) / len(plain)
    return (
        f"{shown}\n\nThe loss of {REFERENCE} on unseen paragraphs is {loss:.3f} nats; others are "
        f"nats more. Bytes are of whole steps. {PAIRED} {reference_note(REFERENCE)}"
    )


if __name__ == "__main__":
    main()
