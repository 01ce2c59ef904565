"""Entries of a configuration: each is read by the type of its field, or refused by name."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from mpcomp.command.model_config import model_of

SMALL = {"num_hidden_layers": 2, "vocab_size": 64}
SIZES = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64},
    "llama": {**SMALL, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
    "gemma2": {**SMALL, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
}


def read(architecture, entry):
    key, _, text = entry.partition("=")
    return getattr(model_of(architecture, SIZES[architecture], {key: text}).config, key)


@pytest.mark.parametrize(
    ("architecture", "entry", "value"),
    [
        *(
            ("gpt2", f"tie_word_embeddings={text}", text.lower() in ("true", "yes"))
            for text in ("true", "True", "TRUE", "yes", "false", "False", "FALSE", "no", "No")
        ),
        ("gpt2", "use_cache=no", False),
        ("gpt2", "n_layer=3", 3),
        ("gpt2", "num_hidden_layers=3", 3),  # another name of a field
        ("gpt2", "n_inner=none", None),
        ("gpt2", "n_inner=None", None),
        ("gpt2", "n_inner=48", 48),
        ("gpt2", "attn_pdrop=0.25", 0.25),
        ("gpt2", "attn_pdrop=0", 0),
        ("gpt2", "layer_norm_epsilon=1e-6", 1e-6),
        ("gpt2", "layer_norm_epsilon=1", 1.0),  # a whole number for a float
        ("gpt2", "activation_function=relu", "relu"),
        ("gpt2", "activation_function='relu'", "relu"),
        ("gpt2", "eos_token_id=7", 7),
        ("gpt2", "eos_token_id=[7,8]", [7, 8]),
        ("gpt2", "output_hidden_states=false", False),
        ("llama", "rope_parameters={'rope_theta':100.0,'rope_type':'default'}", None),
        ("gemma2", "layer_types=[full_attention,sliding_attention]", None),
    ],
)
def test_a_value_has_its_fields_type(architecture, entry, value):
    found = read(architecture, entry)
    if entry.startswith("rope"):
        value = {"rope_theta": 100.0, "rope_type": "default"}
    elif entry.startswith("layer_types"):
        value = ["full_attention", "sliding_attention"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("architecture", "entry", "words"),
    [
        (
            "gpt2",
            "tie_word_embeddings=maybe",
            ["true, false, yes or no", "tie_word_embeddings=true"],
        ),
        ("gpt2", "tie_word_embeddings=0", ["takes bool", "tie_word_embeddings=true"]),
        ("gpt2", "tie_word_embeddings=none", ["takes bool"]),
        ("gpt2", "vocab_size=many", ["takes int", "vocab_size=50257"]),
        ("gpt2", "vocab_size=2.5", ["takes int"]),
        ("gpt2", "vocab_size=true", ["takes int"]),
        ("gpt2", "vocab_size=[1,2]", ["takes int"]),
        ("gpt2", "num_hidden_layers=two", ["takes int", "num_hidden_layers=12"]),
        ("gpt2", "layer_norm_epsilon=small", ["takes float", "layer_norm_epsilon=1e-05"]),
        ("gpt2", "layer_norm_epsilon=yes", ["takes float"]),
        ("gpt2", "attn_pdrop=none", ["takes float | int"]),
        ("gpt2", "n_inner=", ["takes int | None", "n_inner=none"]),
        ("gpt2", "eos_token_id=[a,b]", ["takes int | list[int] | None"]),
        ("gpt2", "num_hidden_layer=2", ["no such entry", "did you mean 'num_hidden_layers'"]),
        ("gpt2", "to_dict=2", ["no such entry"]),
        ("gpt2", "activation_function=foo", ["makes no gpt2 of it", "KeyError"]),
        ("gpt2", "n_embd=33", ["divisible"]),
        ("llama", "hidden_size=33", ["multiple"]),
        ("llama", "rope_parameters=large", ["takes", "dict"]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(architecture, entry, words):
    with pytest.raises(ValueError) as error:
        read(architecture, entry)
    message = str(error.value)
    assert message.startswith(f"--config {entry}: ") and "\n" not in message
    assert [word for word in words if word not in message] == []


def test_what_follows_from_an_entry_follows():
    """A default that is computed from others is computed from those that were given."""
    assert len(AutoConfig.for_model("gemma2").layer_types) == 26
    assert (
        len(model_of("gemma2", SIZES["gemma2"], {"num_hidden_layers": "4"}).config.layer_types) == 4
    )
