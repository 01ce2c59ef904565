"""Text as tokens: a tokenizer, blocks of equal length, and batches of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

import mpcomp
from recipes.config import seeded
from recipes.hub import cache_only_if_unreachable, first_line
from recipes.pretrained import source_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BPE: Final = "bpe"
END_OF_TEXT: Final = "<|endoftext|>"
SMALLEST_BPE: Final = 257  # every byte, and the end of a text
IGNORED: Final = -100  # the label that transformers' losses leave out
_BATCH: Final = 256  # articles tokenized at once


def tokenizer_of(
    name: str | None, texts: Sequence[str], *, vocab_size: int
) -> PreTrainedTokenizerBase:
    """A tokenizer by hub name, folder or GGUF file; for None or `bpe`, one trained on the texts.

    A trained one is a byte-level BPE: it gives every text back as it was, is the same in every
    run, and goes into the model's folder with `save_pretrained`.

    Args:
        vocab_size: of the trained one, which has fewer entries where the texts hold fewer pairs.

    Raises:
        ValueError: there is no such tokenizer, it has no vocabulary or no end-of-text token, or
            vocab_size is below 257.
    """
    if name is None or name == BPE:
        return _train_bpe(texts, vocab_size)
    from transformers import AutoTokenizer

    fix = (
        f"pass --tokenizer {BPE}, which trains one on the text and needs no download, or "
        "--tokenizer a folder that save_pretrained has written"
    )
    source, options = source_of(name, fix)
    try:
        with cache_only_if_unreachable(source, "model"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # tokenizers raises Exception itself for a file it cannot read
        raise ValueError(
            f"cannot load the tokenizer {name} ({first_line(error)}); {fix}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # A folder with a model's configuration alone gives this, without a word.
        raise ValueError(f"the tokenizer {name} knows no words, its vocabulary is missing; {fix}")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {name} has no end-of-text token (eos_token) to put between articles; "
            f"{fix}"
        )
    return tokenizer


def _train_bpe(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_BPE:
        raise ValueError(
            f"vocab_size is {vocab_size}; a byte-level BPE has an entry for every byte and one for "
            f"the end of a text, so pass at least {SMALLEST_BPE}"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Check that a model with `vocab_size` embeddings knows every token.

    Raises:
        ValueError: the tokenizer has more.
    """
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model embeddings for {vocab_size}; "
            "pass the model's own --tokenizer, or a model with at least as many"
        )


def num_predicted(labels: Tensor) -> int:
    """Tokens of [n, s] labels that a loss counts: a block's first has nothing before it."""
    return int((labels[:, 1:] != IGNORED).sum())


@dataclass(frozen=True)
class Blocks:
    """Token blocks of one length, all tensors [n, s] int64.

    `labels` are the tokens themselves (the model shifts them), -100 where there is no text.
    `attention_mask` is 0 there and 1 elsewhere; None where text is everywhere.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_predicted(self) -> int:
        """Tokens that a loss counts."""
        return num_predicted(self.labels)

    def to(self, device: torch.device) -> Blocks:
        """The same blocks on another device."""
        mask = self.attention_mask
        return Blocks(
            self.input_ids.to(device),
            self.labels.to(device),
            None if mask is None else mask.to(device),
        )

    def take(self, ids: Tensor) -> dict[str, Tensor]:
        """The blocks with these numbers [b], as arguments of a language model."""
        ids = ids.to(self.input_ids.device)
        batch = {"input_ids": self.input_ids[ids], "labels": self.labels[ids]}
        if self.attention_mask is not None:
            batch["attention_mask"] = self.attention_mask[ids]
        return batch


def blocks_of(
    articles: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    *,
    keep_tail: bool,
    limit: int | None = None,
) -> Blocks:
    """The articles as one row of tokens, an end-of-text token between two, cut into blocks.

    Args:
        keep_tail: pad what is left after the last full block, so that a perplexity covers all of
            the text; else drop it. A single token is dropped: nothing would be predicted.
        limit: keeps the first blocks, and tokenizes only what they need.

    Raises:
        ValueError: seq_len or limit is too small, or there is less text than one block (with
            keep_tail, than two tokens).
    """
    if seq_len < 2:
        raise ValueError(f"seq_len is {seq_len}; pass at least 2: a token is predicted from others")
    if limit is not None and limit < 1:
        raise ValueError(f"the limit is {limit} blocks; pass at least 1")
    tokens = _tokens(articles, tokenizer, None if limit is None else limit * seq_len)
    num_full, num_left = divmod(len(tokens), seq_len)
    if len(tokens) < 2:
        raise ValueError(
            f"the text has {len(tokens)} tokens, and none can be predicted from another; pass more "
            "text"
        )
    if not keep_tail and not num_full:
        raise ValueError(
            f"the text has {len(tokens)} tokens, fewer than one block of {seq_len}; pass a smaller "
            "--seq-len or more text"
        )
    if not keep_tail or num_left < 2:
        whole = tokens[: num_full * seq_len].view(num_full, seq_len)
        return Blocks(whole, whole)
    num_pads = seq_len - num_left
    blocks = torch.cat([tokens, tokens.new_full((num_pads,), _pad_id(tokenizer))])
    labels = torch.cat([tokens, tokens.new_full((num_pads,), IGNORED)])
    mask = torch.ones_like(labels)
    mask[len(tokens) :] = 0
    shape = (num_full + 1, seq_len)
    return Blocks(blocks.view(shape), labels.view(shape), mask.view(shape))


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> Any:
    pad = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None else pad


def _tokens(
    articles: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> Tensor:
    """The first `limit` tokens, [n] int64; all for None."""
    parts: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    count = 0
    for begin in range(0, len(articles), _BATCH):
        rows = tokenizer(
            list(articles[begin : begin + _BATCH]),
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,  # an article may be longer than the model's positions, a block not
        )["input_ids"]
        joined = chain.from_iterable((tokenizer.eos_token_id, *row) for row in rows)
        part = np.fromiter(joined, dtype=np.int64)[0 if begin else 1 :]  # none before the first
        parts.append(part)
        count += len(part)
        if limit is not None and count >= limit:
            break
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    return torch.from_numpy(tokens[:limit])


@dataclass(frozen=True, kw_only=True)
class TokenLoader:
    """Batches of blocks, shuffled from a seed, as mappings of arguments of a language model.

    `epoch(e)` shuffles for training and yields (batch, ids, next_ids): `ids` [b] are the numbers
    of the blocks, for AQ-SGD's buffers, and `next_ids` those of the batch after, to fetch them
    early (None for the last one). Iterating yields the batches in order, every block once.

    Of several replicas each gets its part of every batch; in training a block stays on one.

    Raises:
        ValueError: no batch can be filled, or one cannot be shared among the replicas.
    """

    blocks: Blocks
    batch_size: int  # of all replicas together
    replica: int = 0
    num_replicas: int = 1
    seed: int = 0
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.num_replicas:
            raise ValueError(
                f"batch_size is {self.batch_size}, replicas is {self.num_replicas}; each replica "
                f"gets an equal part of a batch, so pass a multiple of {self.num_replicas}"
            )

    def __len__(self) -> int:
        """The number of batches in an epoch of training."""
        whole, rest = divmod(len(self.blocks) // self.num_replicas, self._share)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def _share(self) -> int:
        return self.batch_size // self.num_replicas

    def of(self, pipe: mpcomp.Pipeline) -> TokenLoader:
        """The same batches, as the replica of this process gets them."""
        return dataclasses.replace(self, replica=pipe.replica, num_replicas=pipe.num_replicas)

    def epoch(self, epoch: int) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor | None]]:
        """The batches of one epoch (counted from 0).

        Raises:
            ValueError: there are fewer blocks than one batch takes.
        """
        if not len(self):
            raise ValueError(
                f"batch_size is {self.batch_size}, but there are {len(self.blocks)} blocks of "
                "training text; pass a smaller --batch-size or --seq-len, or more text"
            )
        place = self.replica, self.num_replicas
        own = torch.tensor(
            list(mpcomp.ReplicaSampler(self.blocks, place, shuffle=False, seed=self.seed))
        )
        order = own[torch.randperm(len(own), generator=seeded(self.seed, epoch))]
        batches = torch.split(order, self._share)[: len(self)]
        for ids, next_ids in zip(batches, [*batches[1:], None], strict=True):
            yield self.blocks.take(ids), ids, next_ids

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if 0 < (rest := len(self.blocks) % self.batch_size) < self.num_replicas:
            raise ValueError(
                f"the last batch of {len(self.blocks)} blocks has {rest}, fewer than replicas "
                f"({self.num_replicas}); pass another --batch-size"
            )
        for batch in torch.split(torch.arange(len(self.blocks)), self.batch_size):
            yield self.blocks.take(batch.tensor_split(self.num_replicas)[self.replica])
