"""What a training run on text is told."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import mpcomp
from recipes.config import RunConfig, check_choice
from recipes.text import WIKITEXT
from recipes.tokens import BPE

EVAL_SPLITS: Final = ("validation", "test")
AUTO_SPLIT: Final = "auto"

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
        "tie": "quant:8",
    },
    "small": {"tokenizer": BPE, "seq_len": 256, "lr": 1e-3},
    "gpt2": {"tokenizer": BPE, "lr": 6e-4},
}


@dataclass(frozen=True, kw_only=True)
class TextConfig(RunConfig):
    """One training run of a causal language model.

    The defaults are those of Rudakov et al. for fine-tuning GPT-2 on WikiText-2.

    Raises:
        ValueError: an option is out of range; the message names it, what is accepted, and the fix.
    """

    sample: ClassVar[str] = "block"
    at_least_0: ClassVar[tuple[str, ...]] = (*RunConfig.at_least_0, "lr_warmup_steps")
    at_least_1: ClassVar[tuple[str, ...]] = (
        *(*RunConfig.at_least_1, "seq_len", "vocab_size", "accumulate", "eval_limit", "lora"),
    )

    data: str = WIKITEXT  # hub name, folder, text files, or python-docs
    part: str | None = None  # "1/2": the first half of the training articles
    model: str = "openai-community/gpt2"  # hub name, folder, or one of SIZES
    tokenizer: str | None = None  # hub name, folder, or "bpe"; None is the model's own
    vocab_size: int = 4096  # of a bpe, which is trained on the training articles
    seq_len: int = 1024  # tokens of a block
    split: str = AUTO_SPLIT  # the paper's for GPT-2 of 4, 8, 12, ... blocks, else 4 stages
    tie: str | None = None  # spec for the message between copies of a tied embedding
    lora: int | None = None  # rank of the adapters that alone are trained; None trains all weights
    epochs: int = 4
    batch_size: int = 8
    accumulate: int = 1  # batches of one step of the optimizer
    lr: float = 5e-5
    lr_warmup_steps: int = 0  # of the optimizer; then the rate falls linearly, to 0 at the end
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
        if self.part is not None and not re.fullmatch(r"\d+/\d+", self.part):
            raise ValueError(
                f"part is {self.part!r}; pass K/N, as in 1/2 for the first of two parts of the "
                "training articles"
            )
        if self.tie is not None:
            mpcomp.parse(self.tie)
        super().__post_init__()

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
        """The defaults that suit the model, with `chosen` on top.

        The method for a tied embedding is a default only where those for cuts are: with act and
        grad none nothing is compressed.
        """
        defaults = dict(SIZES.get(model, {}))
        if "act" in chosen or "grad" in chosen:
            defaults.pop("tie", None)
        return cls(model=model, **{**defaults, **chosen})
