"""Decoders of transformers, by family: loss and gradients are the plain model's, or a reason."""

import copy

import pytest
import torch
from encoders import check_step
from everyday import slow_but
from lms import language_model, text
from ranks import preload

import mpcomp

preload("lms")

DENSE = [
    *("arcee", "bitnet", "bloom", "cohere", "cohere2", "cwm", "diffllama", "ernie4_5"),
    *("exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neo"),
    *("gpt_neox", "gpt_neox_japanese", "granite", "helium", "hunyuan_v1_dense"),
    *("hyperclovax", "internlm3", "llama", "minicpm3", "ministral3", "mistral", "mpt", "nemotron"),
    *("olmo", "olmo2", "olmo3", "openai-gpt", "persimmon", "phi", "phi3", "qwen2", "qwen3"),
    *("seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "youtu"),
    *("codegen", "biogpt", "gpt_bigcode"),
]
#: Of experts, without the term that balances them (test_terms_of_the_loss.py).
EXPERTS = [
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "doge", "ernie4_5_moe", "exaone_moe"),
    *("flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoeshared"),
    *("hunyuan_v1_moe", "jetmoe", "laguna", "llama4_text", "mimo_v2_flash"),
    *("minimax", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open"),
]
#: Without attention, or with little.
RECURRENT = [
    *("falcon_mamba", "jamba", "lfm2", "mamba", "mamba2", "olmo_hybrid"),
    *("qwen3_next", "rwkv", "xlstm"),
]
#: They do more between embeddings and blocks than add positions, or name what runs last first.
REFUSED = ["modernbert-decoder", "nanochat", "opt", "recurrent_gemma", "xglm", "ctrl"]
EVERYDAY = ["olmo", "olmoe", "qwen2_moe", "deepseek_v3", "mamba", "rwkv"]


@pytest.mark.parametrize("family", slow_but(EVERYDAY, [*DENSE, *EXPERTS, *RECURRENT]))
def test_every_family_trains_as_the_plain_model(family):
    """In three stages, with one microbatch and with two, of which rows are padded."""
    model = language_model(family)
    batch = text(4, side="right")
    plain = copy.deepcopy(model)
    loss = plain(**batch, use_cache=False).loss
    loss.backward()
    for chunks in (1, 2):
        pipe = mpcomp.pipeline(copy.deepcopy(model), chunks, split=3)
        check_step(pipe, batch, plain, loss, atol=1e-6)
    assert any(p.grad is not None and torch.any(p.grad != 0) for p in plain.parameters())


@pytest.mark.parametrize("family", slow_but(REFUSED[:2], REFUSED))
def test_what_stages_would_compute_otherwise_is_refused(family):
    with pytest.raises(
        ValueError, match="cannot be cut like this: .* replicas with mpcomp.compress"
    ):
        mpcomp.pipeline(language_model(family), 1, split=3)
