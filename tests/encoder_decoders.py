"""Tiny encoder-decoders of transformers, and batches for them."""

from typing import Any

import torch
import transformers
from lms import VOCABULARY
from torch import Tensor

transformers.logging.set_verbosity_error()

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_NO_DROPOUT = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "encoder_layerdrop",
    "decoder_layerdrop",
)
#: Of every family: what its configuration needs beside `_SIZES`.
FAMILIES: dict[str, dict[str, Any]] = {
    "bart": {},
    "mbart": {},
    "marian": {"decoder_start_token_id": 0},
    "pegasus": {"decoder_start_token_id": 0},
    "blenderbot-small": {},
    "blenderbot": {},
    "m2m_100": {},
    "plbart": {},
    "mvp": {},
    "whisper": {"num_mel_bins": 5, "max_source_positions": 6, "max_target_positions": 16},
}


def encoder_decoder(family: str, **settings: Any) -> Any:
    """A model of 3 and 3 blocks in training mode, as drawn from the test's seed."""
    sizes = {**_SIZES, **dict.fromkeys(_NO_DROPOUT, 0.0), **FAMILIES.get(family, {}), **settings}
    config = transformers.AutoConfig.for_model(family, **sizes)
    head = "SpeechSeq2Seq" if family == "whisper" else "Seq2SeqLM"
    kind: Any = getattr(transformers, f"AutoModelFor{head}")
    return kind.from_config(config).train()


def sounds(rows: int, seed: int = 0, *, masks: bool = True) -> dict[str, Tensor]:
    """Features that the tiny Whisper hears, and what is to be written."""
    batch = pairs(rows, seed, masks=masks)
    del batch["input_ids"]
    batch.pop("attention_mask", None)
    drawn = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(rows, 5, 12, generator=drawn), **batch}


def pairs(rows: int, seed: int = 0, *, masks: bool = True) -> dict[str, Tensor]:
    """Texts and what is to be written, both padded to unequal lengths; labels are -100 there."""
    drawn = torch.Generator().manual_seed(seed)
    batch: dict[str, Tensor] = {}
    for name, mask_name, length in (
        ("input_ids", "attention_mask", 9),
        ("labels", "decoder_attention_mask", 7),
    ):
        ids = torch.randint(4, VOCABULARY, (rows, length), generator=drawn)
        lengths = torch.tensor([2 + (5 * i + seed) % (length - 1) for i in range(rows)])
        mask = (torch.arange(length) < lengths[:, None]).long()
        batch[name] = ids.masked_fill(mask == 0, 0 if name == "input_ids" else -100)
        if masks:
            batch[mask_name] = mask
    return batch
