"""Models of transformers that are no causal language models are refused, with what is accepted."""

import pytest
import transformers
from lms import gpt2
from torch import nn

from stages import split
from stages.language_models import is_causal_lm, is_pretrained

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def bert(head):
    return head(transformers.BertConfig(vocab_size=37, **SIZES))


MODELS = {
    "BERT, classes": lambda: bert(transformers.BertForSequenceClassification),
    "BERT, masked": lambda: bert(transformers.BertForMaskedLM),
    "ViT": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, **SIZES)
    ),
    "Llama, classes": lambda: transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(vocab_size=37, pad_token_id=0, **SIZES)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_sentence_names_what_can_be_cut(name):
    model = MODELS[name]()
    assert is_pretrained(model) and not is_causal_lm(model)
    with pytest.raises(ValueError, match=rf"{type(model).__name__} cannot be cut.*CausalLM"):
        split(model, 2)


def test_language_models_and_plain_modules_are_told_apart():
    assert is_pretrained(gpt2()) and is_causal_lm(gpt2())
    assert not is_pretrained(nn.Linear(1, 1))
