"""Tiny encoders of transformers with each of their heads, and batches for these."""

import copy
from typing import Any

import torch
import transformers
from lms import VOCABULARY, config_of
from torch import Tensor
from torch.testing import assert_close

import mpcomp

transformers.logging.set_verbosity_error()

CLASSES = 3
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    **_NO_DROPOUT,
}
_TEXT = {**_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}
_IMAGE = {**_SIZES, "image_size": 8, "patch_size": 2}
_RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "max_relative_positions": 8,
}
_DISTIL = {
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "hidden_dim": 40,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "qa_dropout": 0.0,
}
_SWIN = {
    **_NO_DROPOUT,
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2, 1],
    "num_heads": [1, 2, 2],
    "window_size": 2,
    "drop_path_rate": 0.0,
}
#: Of every family: its configuration.
TEXT: dict[str, dict[str, Any]] = {
    "bert": _TEXT,
    "roberta": _TEXT,
    "modernbert": {**_TEXT, "global_attn_every_n_layers": 2, "local_attention": 4},
    "electra": {**_TEXT, "embedding_size": 16},
    "deberta-v2": {**_TEXT, **_RELATIVE, "norm_rel_ebd": "layer_norm", "position_buckets": 4},
    "distilbert": _DISTIL,
    # the rest of the families, once more in the whole suite
    "deberta": {**_TEXT, **_RELATIVE},
    "xlm-roberta": _TEXT,
    "camembert": _TEXT,
    "mpnet": _TEXT,
    "rembert": {
        **_TEXT,
        "input_embedding_size": 16,
        "output_embedding_size": 16,
        "classifier_dropout_prob": 0.0,
    },
    "ernie": _TEXT,
    "esm": {**_TEXT, "mask_token_id": 3, "position_embedding_type": "rotary"},
    "megatron-bert": _TEXT,
    "nomic_bert": _TEXT,
    "eurobert": _TEXT,
    "convbert": _TEXT,
    "big_bird": {**_TEXT, "attention_type": "original_full"},
    "nystromformer": _TEXT,
    "layoutlm": _TEXT,
    "data2vec-text": _TEXT,
    "roberta-prelayernorm": _TEXT,
}
IMAGES: dict[str, dict[str, Any]] = {
    "vit": _IMAGE,
    "deit": {**_IMAGE, "architectures": ["DeiTForImageClassification"]},
    "swin": _SWIN,
    # the rest
    "dinov2": {**_IMAGE, "mlp_ratio": 2},
    "dinov2_with_registers": {**_IMAGE, "mlp_ratio": 2},
    "beit": {**_IMAGE, "drop_path_rate": 0.0},
    "data2vec-vision": {**_IMAGE, "drop_path_rate": 0.0},
    "vit_msn": _IMAGE,
    "ijepa": _IMAGE,
    "convnext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32},
}
#: Decoders, of which these heads are read at the last token that is no padding.
DECODERS = ("gpt2", "llama", "qwen2", "mistral")
HEADS = (
    "MaskedLM",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
)


def encoder(family: str, head: str, **settings: Any) -> Any:
    """A model of 4 blocks in training mode, as drawn from the test's seed.

    Raises:
        ValueError: The family has no such head.
    """
    if head != "MaskedLM":
        settings = {"num_labels": 2 if head == "QuestionAnswering" else CLASSES, **settings}
    if family in DECODERS:
        config = config_of(family, classifier_dropout=0.0, **settings)
    else:
        sizes = {**(TEXT | IMAGES)[family], **settings}
        config = transformers.AutoConfig.for_model(family, **sizes)
    return getattr(transformers, f"AutoModelFor{head}").from_config(config).train()


def image_batch(model: Any, rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Images and their classes."""
    drawn = torch.Generator().manual_seed(seed)
    size = model.config.image_size
    return {
        "pixel_values": torch.randn(rows, 3, size, size, generator=drawn),
        "labels": torch.randint(CLASSES, (rows,), generator=drawn),
    }


def text_batch(head: str, rows: int, seed: int = 0, *, segments: bool = False) -> dict[str, Tensor]:
    """Sequences that are padded to unequal lengths, and what a head learns from.

    Labels of tokens are -100 at padding and at every third token besides.
    """
    drawn = torch.Generator().manual_seed(seed)
    positions = 9
    ids = torch.randint(4, VOCABULARY, (rows, positions), generator=drawn)
    lengths = torch.tensor([2 + (5 * i + seed) % (positions - 1) for i in range(rows)])
    mask = (torch.arange(positions) < lengths[:, None]).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    if segments:
        batch["token_type_ids"] = (torch.arange(positions) >= lengths[:, None] // 2).long() * mask
    if head == "QuestionAnswering":
        batch["start_positions"] = lengths // 2
        batch["end_positions"] = lengths - 1
    elif head == "SequenceClassification":
        batch["labels"] = torch.randint(CLASSES, (rows,), generator=drawn)
    else:
        classes = CLASSES if head == "TokenClassification" else VOCABULARY
        labels = torch.randint(classes, (rows, positions), generator=drawn)
        counted = (mask == 1) & (torch.arange(positions) % 3 != 2)
        batch["labels"] = labels.masked_fill(~counted, -100)
    return batch


def check_equal(model, batch, chunks, **options):
    """Loss and every gradient are the plain model's over the whole batch, in any pipeline."""
    plain = copy.deepcopy(model)
    loss = plain(**batch).loss
    loss.backward()
    check_step(mpcomp.pipeline(model, chunks, **options), batch, plain, loss)


def check_step(pipe, batch, plain, loss, *, atol=1e-5):
    """A step has the loss and every gradient of a plain model whose backward is done."""
    assert_close(pipe.forward_backward(batch), loss.detach())
    trained = dict(pipe.merge().named_parameters())
    for name, parameter in plain.named_parameters():
        found = trained[name].grad
        assert (found is None) == (parameter.grad is None), name
        if found is not None:
            assert_close(found, parameter.grad, rtol=1e-4, atol=atol, msg=name)
