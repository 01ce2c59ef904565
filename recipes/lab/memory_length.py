"""The cost of a memory of samples over more steps, by its parts: a small model of characters.

    python -m recipes.lab.memory_length --data FOLDER --seeds 3
    python -m recipes.lab.memory_length --table --out docs/results/memory_length.jsonl

A decoder of four blocks learns the characters of WikiText-2 (`--data`), then, in three stages with
real links, those of Python's documentation: a few blocks of text that come again in each epoch.
The rows are parts of `auto:memory` from `recipes.lab.finetune_study`, and they are held to the run
that sends tensors as they are. A training loss below that run's, and a higher one on unseen text,
say that samples are learned and not their language.

The model is trained anew at each start, in a minute or two on a core, from seed 0: all runs begin
with the same weights. Seeds vary the order of the samples. The documentation is that of the Python
that runs, whose version is among the settings; runs of two versions do not share a file.
`recipes.lab.study` runs it.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from tabulate import tabulate
from torch import Tensor, nn

from mpcomp.core.traffic import LAGS
from recipes.config import seeded
from recipes.decoder import decoder, token_loss
from recipes.lab import finetune_study
from recipes.lab.account import FORMER
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
from recipes.lab.study_table import PAIRED, Results, Run, interval
from recipes.metric import Metric
from recipes.optimizers import make_optimizer
from recipes.ranks import Ranks
from recipes.text import PYTHON_DOCS, load_text
from recipes.text_config import TextConfig
from recipes.training import Trainer

ROWS: Final[dict[str, Row]] = {
    FORMER: Row(FORMER, FORMER),
    **{
        name: finetune_study.ROWS[name]
        for name in (
            *("dead zones", "dead zone of gradients", "dead zone of activations", "no dither"),
            *("auto:memory", "memory of activations"),
        )
    },
}
UNSEEN: Final = Metric(
    name="unseen",
    unit="nats",
    axis="loss on unseen text [nats]",
    scale=1.0,
    higher_is_better=False,
    logarithmic=False,
)
NUM_CHARACTERS: Final = 160  # that have a token, the most common ones; the others share one
NUM_BLOCKS, WIDTH, NUM_HEADS = 4, 96, 4  # of the decoder
# Of what the model learns first:
FIRST_BATCH, FIRST_LR, FIRST_WARMUP = 12, 3e-3, 30

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class LengthConfig(TextConfig):
    """One run: its first text, and the second, on which the model is tuned."""

    data_options: ClassVar[tuple[str, ...]] = (
        *("data", "tuned_on", "first_steps", "seq_len", "tuned_blocks", "eval_limit"),
    )
    at_least_1: ClassVar[tuple[str, ...]] = (
        *(*TextConfig.at_least_1, "first_steps", "tuned_blocks"),
    )

    model: str = "decoder"
    split: str = "2,1,3"
    chunks: int = 1
    seq_len: int = 96  # characters of a block
    first_steps: int = 400  # on `data`
    tuned_on: str = PYTHON_DOCS  # in the forms of `data`
    tuned_blocks: int = 240  # that an epoch has
    eval_limit: int | None = 200  # blocks of unseen text
    epochs: int = 3
    batch_size: int = 4
    lr: float = 5e-4
    precision: str = "fp32"


@dataclass(frozen=True)
class Ground:
    """Beginning of all runs: a trained model, and blocks to tune it on and to judge it by.

    Blocks are [n, seq_len + 1] int64.
    """

    model: nn.Module
    train: Tensor
    unseen: Tensor


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
    parser = grid_parser("memory_length", __doc__, ROWS)
    own = ("epochs", "eval_every", "batch_size", "chunks", "lr", "precision")
    parser.set_defaults(
        out="runs/memory_length.jsonl", workers=0, **{name: _default(name) for name in own}
    )
    add = parser.add_argument
    add("--data", default=TextConfig.data, help="first text: hub name, folder or text files")
    add("--tuned-on", default=PYTHON_DOCS, help="second text, likewise (default %(default)s)")
    for name, unit in (
        ("seq_len", "CHARACTERS"),
        ("first_steps", "STEPS"),
        ("tuned_blocks", "BLOCKS"),
        ("eval_limit", "BLOCKS"),
    ):
        option = f"--{name.replace('_', '-')}"
        add(option, type=int, default=_default(name), metavar=unit, help="(default %(default)s)")
    options = parser.parse_args(argv)
    need_row(parser, options, FORMER)
    return options


def _default(name: str) -> Any:
    return getattr(LengthConfig, name)


def configuration(options: argparse.Namespace, row: str, seed: int) -> LengthConfig:
    """The run of one row and seed."""
    return LengthConfig(**chosen_options(options, LengthConfig, ROWS[row], seed))


def settings(config: LengthConfig, options: argparse.Namespace) -> Line:
    """Settings that all runs of one file share; Python's version, as its documentation's."""
    return {**shared_settings(config, options), "python": platform.python_version()}


def train(config: LengthConfig, settings: Line, ranks: Ranks) -> Line:
    """Trains one run; its line has the losses and the bits of each epoch."""
    trainer = LengthTrainer(config, data_of(config, load, ranks), ranks)
    summary = trainer.fit(progress=False)
    of_epochs = {
        f"{key}_by_epoch": [epoch[key] for epoch in trainer.history]
        for key in (UNSEEN.on, UNSEEN.off, *_BITS)
    }
    return {
        **reached(summary),
        "act": config.act[0],
        "grad": config.grad[0],
        "losses": [epoch["loss"] for epoch in trainer.history],
        **of_epochs,
        "memories": {
            link.name: {name: getattr(link.meter.train, name) for name in LAGS}
            for link in trainer.pipe.links
            if link.meter.train.lag is not None
        },
    }


class LengthTrainer(Trainer[LengthConfig]):
    """The trainer of the decoder, which counts the bits of both directions by epoch."""

    metric = UNSEEN
    samples = "characters"

    def __init__(self, config: LengthConfig, ground: Ground, ranks: Ranks | None = None) -> None:
        super().__init__(config, ranks)
        self.ground = ground
        num_batches = len(ground.train) // config.batch_size
        self.cut(copy.deepcopy(ground.model), num_batches, loss_fn=token_loss)
        self.optimizer = make_optimizer(config, self.pipe)
        steps = config.epochs * num_batches
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: max(0.0, 1 - step / steps)
        )
        self._sent = dict.fromkeys(_BITS.values(), (0.0, 0.0))

    def batches(self, epoch: int) -> Iterator[Batch]:
        """(characters, those that follow, ids)."""
        train, size = self.ground.train, self.config.batch_size
        order = torch.randperm(len(train), generator=seeded(self.config.seed, epoch))
        for ids in torch.split(order, size)[: self.num_batches]:
            yield *_pair(train[ids]), ids

    def forward_backward(self, batch: Batch) -> Tensor:
        """The mean loss over the characters."""
        x, y, ids = batch
        return self.pipe.forward_backward(x, y, sample_ids=ids)

    def num_samples(self, batch: Batch) -> int:
        """Characters."""
        return batch[0].numel()

    def end_step(self) -> None:
        """The schedule goes by steps."""
        self.scheduler.step()

    def end_epoch(self) -> dict[str, Any]:
        """Bits an element that were sent in this epoch, in either direction."""
        found = {}
        for key, direction in _BITS.items():
            meters = [link.meter.train for link in self.pipe.links if link.direction == direction]
            now = (
                sum(meter.wire_bytes for meter in meters),
                sum(meter.num_elements for meter in meters),
            )
            sent, elements = (a - b for a, b in zip(now, self._sent[direction], strict=True))
            found[key], self._sent[direction] = 8 * sent / elements, now
        return found

    def judge(self) -> float:
        """The loss on unseen text."""
        return float(self.pipe.evaluate([_pair(self.ground.unseen)]))


#: Key of an epoch's bits -> direction of the links.
_BITS: Final = {"act_bits": "act", "grad_bits": "grad"}


def load(config: LengthConfig) -> Ground:
    """Trains the model on the first text, and cuts the second into blocks.

    Raises:
        ValueError: there is no such text, or it has too few blocks.
    """
    first = "".join(load_text(config.data).train)
    common = [character for character, _ in Counter(first).most_common(NUM_CHARACTERS)]
    number = {character: i for i, character in enumerate(common, start=1)}

    def encode(text: str) -> Tensor:
        return torch.tensor([number.get(character, 0) for character in text])

    def blocks(articles: Sequence[str], count: int) -> Tensor:
        """So many blocks, from all over the text."""
        tokens = encode("".join(articles))
        length = config.seq_len + 1
        found = len(tokens) // length
        if found < count:
            raise ValueError(
                f"{config.tuned_on} has {found} blocks of {length} characters, {count} are needed; "
                "pass more text, or smaller --tuned-blocks, --eval-limit or --seq-len"
            )
        chosen = torch.linspace(0, found - 1, count).long()
        return tokens[: found * length].view(found, length)[chosen]

    second = load_text(config.tuned_on)
    model = decoder(
        num_blocks=NUM_BLOCKS,
        width=WIDTH,
        num_heads=NUM_HEADS,
        vocab=len(common) + 1,
        context=config.seq_len,
    )
    _learn(model, encode(first), config)
    assert config.eval_limit is not None
    return Ground(
        model,
        train=blocks(second.train, config.tuned_blocks),
        unseen=blocks(second.validation, config.eval_limit),
    )


def _learn(model: nn.Module, tokens: Tensor, config: LengthConfig) -> None:
    """Trains the model on pieces of a text, with a rate that rises, then falls to a tenth."""
    steps, generator = config.first_steps, seeded(0)
    optimizer = torch.optim.AdamW(model.parameters(), FIRST_LR)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / FIRST_WARMUP) * max(0.1, 1 - step / steps)
    )
    within = torch.arange(config.seq_len + 1)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - config.seq_len, (FIRST_BATCH, 1), generator=generator)
        x, y = _pair(tokens[starts + within])
        optimizer.zero_grad()
        token_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rate.step()


def _pair(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Characters, and those that follow."""
    return blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()


def render(lines: Sequence[Line]) -> str:
    """The table: bits by epoch, and nats more than uncompressed in training and on unseen text."""
    results = Results.of(lines, order=list(ROWS))
    plain = results.of_row(FORMER)
    if not plain:
        raise ValueError(f"there is no row {FORMER}, which is what the others are held to")
    epochs = range(len(plain[0]["losses"]))

    def cells(row: str, runs: Sequence[Run]) -> list[str]:
        bits = [[statistics.mean(run[f"{key}_by_epoch"][at] for run in runs) for key in _BITS]
                for at in epochs]  # fmt: skip
        more = [results.differences(row, FORMER, of) for of in _FIGURES.values()]
        return [
            *(", ".join(f"{each:.2f}" for each in both) for both in bits),
            *(interval(each, digits=4) if each else "-" for each in more),
        ]

    table = results.table({row: row for row in results.runs if row != FORMER}, cells)
    headers = ("row", "n", *(f"bits of both, epoch {at + 1}" for at in epochs), *_FIGURES)
    ends = ", ".join(
        f"{statistics.mean(map(_FIGURES[name], plain)):.3f} {where}"
        for name, where in (("training", "in training"), ("unseen, off", "on unseen text"))
    )
    shown = tabulate(table, headers, tablefmt="pipe", disable_numparse=True)
    return f"{shown}\n\nUncompressed, runs end with {ends}; figures are nats more. {PAIRED}"


_FIGURES: Final[dict[str, Callable[[Run], float]]] = {
    "training": lambda run: run["losses"][-1],
    "unseen, on": lambda run: run[f"{UNSEEN.on}_by_epoch"][-1],
    "unseen, off": lambda run: run[f"{UNSEEN.off}_by_epoch"][-1],
    "gap": lambda run: run[f"{UNSEEN.off}_by_epoch"][-1] - run["losses"][-1],
}


if __name__ == "__main__":
    main()
