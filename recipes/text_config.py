"""The options of a training run on text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import mpcomp
from recipes.config import RunConfig, check_choice, check_rate_chosen
from recipes.text import WIKITEXT
from recipes.tokens import BPE

EVAL_SPLITS: Final = ("validation", "test")
AUTO_SPLIT: Final = "auto"
LSTM: Final = "lstm"

# What is made anew, with random weights, and what suits it; other models are loaded.
SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {
        "tokenizer": BPE,
        "vocab_size": 1024,
        "seq_len": 128,
        "epochs": 3,
        "lr": 1e-3,
        "precision": "fp32",  # so small that bf16 is no faster
        "act": ("quant:4",),  # what begins with random weights learns little through Top-10 %
        "grad": ("quant:8",),
    },
    "small": {"tokenizer": BPE, "seq_len": 256, "lr": 1e-3},
    "gpt2": {"tokenizer": BPE, "lr": 6e-4},
    # Blocks and batches are those of GraVAC, the rest is for AdamW and random weights.
    LSTM: {
        "tokenizer": BPE,
        "seq_len": 35,
        "batch_size": 20,
        "lr": 2e-3,
        "act": ("quant:4",),
        "grad": ("quant:8",),
    },
}


@dataclass(frozen=True, kw_only=True)
class TextConfig(RunConfig):
    """One training run of a causal language model.

    The defaults are those of Rudakov et al. for fine-tuning GPT-2 on WikiText-2.

    Raises:
        ValueError: an option is out of range; the message names it, what is accepted, and the fix.
    """

    sample: ClassVar[str] = "block"
    data_options: ClassVar[tuple[str, ...]] = (
        *("data", "part", "train_limit", "model", "tokenizer", "vocab_size", "seq_len"),
        *("eval_split", "eval_limit"),
    )
    at_least_0: ClassVar[tuple[str, ...]] = (*RunConfig.at_least_0, "lr_warmup_steps")
    at_least_1: ClassVar[tuple[str, ...]] = (
        *(*RunConfig.at_least_1, "seq_len", "vocab_size", "accumulate", "eval_limit", "lora"),
        "hidden",
    )

    data: str = WIKITEXT  # hub name, folder, text files, or python-docs
    part: str | None = None  # "1/2": the first half of the training articles
    model: str = "openai-community/gpt2"  # hub name, folder, or one of SIZES
    tokenizer: str | None = None  # hub name, folder, or "bpe"; None is the model's own
    vocab_size: int = 4096  # of a bpe, which is trained on the training articles
    hidden: int | None = None  # units of a layer of an LSTM, the one model of any width
    seq_len: int = 1024  # tokens of a block
    # The paper's for GPT-2 of 4, 8, 12, ... blocks, an LSTM's layers and head, else 4 stages.
    split: str = AUTO_SPLIT
    tie: str | None = None  # spec for what copies of a tied embedding exchange; None has none
    untie: bool = False  # the output layer gets weights of its own, equal ones where it had others'
    lora: int | None = None  # rank of the adapters that alone are trained; None trains all weights
    epochs: int = 4
    batch_size: int = 8
    accumulate: int = 1  # batches of one step of the optimizer
    optimizer: str = "adamw"
    lr: float = 5e-5
    # Of the optimizer; then the rate falls linearly, to 0 at the end, or by the milestones.
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0  # of matrices
    clip: float | None = 1.0
    precision: str = "auto"
    eval_split: str = "validation"
    eval_limit: int | None = None  # blocks; train_limit counts articles
    seed: int = 555

    def __post_init__(self) -> None:
        check_choice("eval_split", self.eval_split, EVAL_SPLITS)
        if self.seq_len == 1:
            raise ValueError("seq_len is 1; pass at least 2: a token is predicted from others")
        if self.model != LSTM and self.hidden is not None:
            raise ValueError(
                f"hidden is {self.hidden}, but the model {self.model} has its own width; drop "
                f"--hidden, or pass --model {LSTM}"
            )
        if self.model == LSTM and self.lora is not None:
            raise ValueError(
                f"lora is {self.lora}, but adapters are for models of transformers, which an "
                f"{LSTM} is not; drop --lora"
            )
        if self.part is not None and not re.fullmatch(r"\d+/\d+", self.part):
            raise ValueError(
                f"part is {self.part!r}; pass K/N, as in 1/2 for the first of two parts of the "
                "training articles"
            )
        if self.tie is not None:
            mpcomp.parse(self.tie)
        super().__post_init__()
        if self.updates > 1 and self.accumulate > 1:
            raise ValueError(
                f"updates is {self.updates}, accumulate is {self.accumulate}; a call has several "
                "steps with the one, a step several calls with the other, so drop one of the two"
            )
        if self.lr_warmup_steps and self.lr_warmup_epochs:
            raise ValueError(
                f"lr_warmup_steps is {self.lr_warmup_steps} and lr_warmup_epochs is "
                f"{self.lr_warmup_epochs}; pass one of the two"
            )

    @property
    def step_batch(self) -> int:
        """Number of blocks that a step of the optimizer sees."""
        return self.batch_size * self.accumulate

    @property
    def is_new(self) -> bool:
        """Whether the model begins with random weights."""
        return self.model in SIZES

    @property
    def part_of(self) -> tuple[int, int] | None:
        """`part` as numbers."""
        if self.part is None:
            return None
        k, n = self.part.split("/")
        return int(k), int(n)

    @property
    def label(self) -> str:
        """As of other runs, and what happens to the tied embedding where that is compressed."""
        own = super().label
        return own if self.tie in (None, "none") else f"{own}, tie {self.tie}"

    def uncompressed(self) -> TextConfig:
        """The same training without compression, to compare with."""
        return dataclasses.replace(super().uncompressed(), tie=None)

    @classmethod
    def for_model(cls, model: str, **chosen: Any) -> TextConfig:
        """The defaults that suit the model, with `chosen` on top."""
        check_rate_chosen(cls.optimizer, chosen)
        return cls(model=model, **{**SIZES.get(model, {}), **chosen})
