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

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import mpcomp
from recipes.command import CUTS, DATA, MODEL, OPTIMIZER, TRAINING, Parser, Recipe, run_recipe
from recipes.metric import PERPLEXITY
from recipes.optimizers import make_optimizer, milestone_rate, warm_up
from recipes.ranks import Ranks
from recipes.run_folder import RunFolder
from recipes.summary import Summary
from recipes.text import load_text
from recipes.text_config import EVAL_SPLITS, SIZES, TextConfig
from recipes.text_model import make_model, model_config, split_of
from recipes.tokens import Blocks, TokenLoader, blocks_of, check_vocabulary, tokenizer_of
from recipes.training import Trainer


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
    add = parser.group(MODEL)
    add(
        "--model",
        help=f"hub name (default {TextConfig.model}) or folder, to fine-tune; or "
        f"{', '.join(SIZES)}, with random weights",
    )
    add("--hidden", type=int, metavar="UNITS", help="of a layer of an lstm (default 1500)")
    add("--untie", action="store_true", help="give the output layer weights of its own")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank only (needs peft)")
    add = parser.group(DATA)
    add(
        "--data",
        help=f"hub name (default {TextConfig.data}), folder, text file or glob, or python-docs",
    )
    add("--part", metavar="K/N", help="the k-th of n parts of the training articles")
    add("--tokenizer", help="hub name or folder (default: the model's own), or bpe: a new one")
    add("--vocab-size", type=int, metavar="TOKENS", help="of a new tokenizer (default 4096)")
    add("--seq-len", type=int, metavar="TOKENS", help="of a block")
    add("--eval-split", choices=EVAL_SPLITS)
    add("--train-limit", type=int, metavar="ARTICLES")
    add("--eval-limit", type=int, metavar="BLOCKS")
    parser.group(CUTS)(
        "--tie",
        metavar="SPEC",
        help="parts a tied embedding, and compresses what its copies exchange",
    )
    parser.group(TRAINING)(
        "--accumulate", type=int, metavar="BATCHES", help="of one step of the optimizer"
    )
    parser.group(OPTIMIZER)("--lr-warmup-steps", type=int, help="in which the learning rate rises")
    parser.add_common()
    return parser


def _configure(chosen: Mapping[str, Any]) -> TextConfig:
    return TextConfig.for_model(**{"model": TextConfig.model, **chosen})


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Batch = tuple[dict[str, Tensor], Tensor, Tensor | None]


@dataclass(frozen=True)
class TextData:
    """Blocks of tokens to train on and to evaluate on, and what made them."""

    train: Blocks
    held_out: Blocks
    tokenizer: PreTrainedTokenizerBase
    name: str

    def describe(self) -> str:
        """Sizes in words."""
        seq_len = self.train.input_ids.shape[1]
        return (
            f"{self.name}: {len(self.train)} blocks of {seq_len} tokens to train on, "
            f"{self.held_out.num_predicted} tokens to predict in evaluation"
        )


def run(config: TextConfig, *, text: TextData | None = None, progress: bool = True) -> Summary:
    """One training run that leaves no files; `TextTrainer` is for runs with a folder.

    Args:
        text: the tokens, where they are loaded already.

    Raises:
        ValueError: an option does not fit the text, the model or the machine.
    """
    return TextTrainer(config, text or load_data(config)).fit(progress=progress)


def load_data(config: TextConfig) -> TextData:
    """The text that a configuration names, as tokens of its model.

    Raises:
        ValueError: there is no such text, tokenizer or model, or they do not fit.
    """
    from transformers.utils import logging

    # Those of weights read and written; training has its own.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    chosen = model_config(config)  # first, as it is soon known
    text = load_text(config.data, part=config.part_of, train_limit=config.train_limit)
    name = config.tokenizer or config.model
    tokenizer = tokenizer_of(name, text.train, vocab_size=config.vocab_size)
    if not config.is_new:
        check_vocabulary(tokenizer, chosen.vocab_size)
    held_out = blocks_of(
        getattr(text, config.eval_split),
        tokenizer,
        config.seq_len,
        keep_tail=True,
        limit=config.eval_limit,
    )
    if not getattr(chosen, "takes_mask", True):
        held_out = dataclasses.replace(held_out, attention_mask=None)
    return TextData(
        train=blocks_of(text.train, tokenizer, config.seq_len, keep_tail=False),
        held_out=held_out,
        tokenizer=tokenizer,
        name=text.name,
    )


class TextTrainer(Trainer[TextConfig]):
    """The trainer of a language model."""

    metric = PERPLEXITY
    samples = "tokens"

    def __init__(self, config: TextConfig, text: TextData, ranks: Ranks | None = None) -> None:
        super().__init__(config, ranks)
        self.tokenizer = text.tokenizer
        self.accumulate = config.accumulate
        config.check_fills_call(len(text.train))
        loader = TokenLoader(
            blocks=text.train,
            batch_size=config.call_batch,
            num_replicas=config.replicas,
            seed=config.seed,
        )
        self.first_batch, *_ = next(loader.epoch(0))  # refuses here what cannot fill a batch
        model = self.ranks.together(lambda: make_model(config, text.tokenizer))
        shape: Any = model.config
        self.size = _size_of(model)
        self.config = dataclasses.replace(config, split=split_of(config, shape))
        self.cut(model, len(loader), tie_comp=config.tie, loss_fn=mpcomp.CausalLMLoss())
        self.train_loader = loader.of(self.pipe)
        held_out = dataclasses.replace(loader, blocks=text.held_out)
        next(iter(held_out))  # refuses here what replicas cannot share
        self.eval_loader = held_out.of(self.pipe)
        self.optimizer = make_optimizer(config, self.pipe, outputs=shape.vocab_size)
        self.pipe.follow(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """(mapping, ids, ids of the next)."""
        return self.train_loader.epoch(epoch)

    def forward_backward(self, batch: Batch) -> Tensor:
        """The mean loss over the predicted tokens."""
        arguments, ids, next_ids = batch
        self.pipe.prefetch(next_ids)  # to be read while this batch is computed
        return self.pipe.forward_backward(
            arguments, sample_ids=ids, update=self.update, updates=self.config.updates
        )

    def num_samples(self, batch: Batch) -> int:
        """Tokens."""
        return batch[0]["input_ids"].numel()

    def end_step(self) -> None:
        """The schedule goes by steps of the optimizer; one that was skipped counts."""
        self.scheduler.step()

    def judge(self) -> float:
        """The perplexity of the evaluation text."""
        loss = self.pipe.evaluate(self.eval_loader)
        return float(torch.tensor(loss, dtype=torch.float64).exp())  # math.exp would overflow

    def notes(self) -> list[str]:
        """The model, and the memory that AQ-SGD will need."""
        origin = "with random weights" if self.config.is_new else "as loaded"
        notes = [f"{self.config.model} {origin}: {self.size}", *super().notes()]
        methods = [link.method for link in self.pipe.links]
        if not any(one.by_sample for one in methods):
            return notes
        share = self.config.call_batch // self.config.replicas
        batch = {k: rows[:share] for k, rows in self.first_batch.items() if k != "labels"}
        num_samples = len(self.train_loader.blocks) // self.config.replicas
        with self._autocast():
            needed = self.pipe.state_bytes(batch, num_samples=num_samples)
        each = self.pipe.collect(needed["total"])
        places = self.pipe.collect(sorted({str(one["location"]) for one in needed["per_link"]}))
        where = " and ".join(sorted({place for one in places for place in one}))
        processes = f", at most {max(each) / 1e6:.1f} MB a process" if len(each) > 1 else ""
        return [*notes, f"AQ-SGD will keep up to {sum(each) / 1e6:.1f} MB ({where}){processes}"]

    def finish(self, folder: RunFolder) -> None:
        """The model as it writes itself, with its tokenizer."""
        self.pipe.save_pretrained(folder.model)
        if self.ranks.speaks:  # which has the model
            self.tokenizer.save_pretrained(folder.model)

    def _rate(self, step: int) -> float:
        """The learning rate of a step (from 0), as a part of the highest."""
        config, total = self.config, self.config.epochs * self.steps_per_epoch
        warmup = config.lr_warmup_steps or config.lr_warmup_epochs * self.steps_per_epoch
        if step < warmup:
            return warm_up(config, step, warmup)
        if config.lr_milestones:
            return milestone_rate(config, step // self.steps_per_epoch)
        return max(0.0, (total - step) / max(1, total - warmup))


def _size_of(model: nn.Module) -> str:
    """The number of parameters, in words."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")


if __name__ == "__main__":
    main()
