"""Small encoders, and encoder-decoders, for `runs`, for tests of several processes."""

from typing import Any

import encoder_decoders
import encoders
import lm_runs
import runs
from ranks import preload
from runs import Kind, Outcome, Run
from torch import Tensor, nn

preload(
    "transformers.models.bart.modeling_bart",
    "transformers.models.bert.modeling_bert",
    "transformers.models.deberta_v2.modeling_deberta_v2",
    "transformers.models.vit.modeling_vit",
    "encoder_runs",
)


def masked() -> nn.Module:
    """BERT with dropout, whose embedding is its head."""
    return encoders.encoder("bert", "MaskedLM", hidden_dropout_prob=0.1)


def classes() -> nn.Module:
    """DeBERTa, of which all blocks read the same weights."""
    return encoders.encoder("deberta-v2", "SequenceClassification")


def pictures() -> nn.Module:
    """A vision transformer."""
    return encoders.encoder("vit", "ImageClassification")


def summaries() -> nn.Module:
    """BART with dropout, whose embeddings and head are one weight."""
    return encoder_decoders.encoder_decoder("bart", dropout=0.1)


def pairs(count: int, seed: int) -> tuple[Any, Tensor]:
    batch = encoder_decoders.pairs(count, seed)
    return batch, batch.pop("labels")


def tokens(count: int, seed: int) -> tuple[Any, Tensor]:
    batch = encoders.text_batch("MaskedLM", count, seed, segments=True)
    return batch, batch.pop("labels")


def rows(count: int, seed: int) -> tuple[Any, Tensor]:
    batch = encoders.text_batch("SequenceClassification", count, seed)
    return batch, batch.pop("labels")


def images(count: int, seed: int) -> tuple[Any, Tensor]:
    batch = encoders.image_batch(pictures(), count, seed)
    return batch, batch.pop("labels")


runs.KINDS.update(
    {
        "bert": Kind(masked, tokens, 4),
        "deberta": Kind(classes, rows, 4),
        "vit": Kind(pictures, images, 4),
        "bart": Kind(summaries, pairs, 6),
    }
)


def train_encoders(all_runs: list[Run]) -> list[Outcome]:
    """`runs.train_all`, by a name with which ranks find this module."""
    return lm_runs.train_lms(all_runs)
