"""Terms of a loss beside the cross-entropy: the plain model's number, or an error with the cure."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from lms import gpt2, language_model, plain_step, text, without_labels
from ranks import preload
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import mpcomp
from stages import split
from stages.language_models import is_causal_lm

preload("lms")

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 53,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Families that balance their experts, and the name of the term's coefficient.
EXPERTS = {
    "ernie4_5_moe": "router_aux_loss_coef",
    "flex_olmo": "router_aux_loss_coef",
    "gpt_oss": "router_aux_loss_coef",
    "granitemoe": "router_aux_loss_coef",
    "granitemoeshared": "router_aux_loss_coef",
    "jetmoe": "aux_loss_coef",
    "laguna": "router_aux_loss_coef",
    "mellum": "router_aux_loss_coef",
    "minimax": "router_aux_loss_coef",
    "minimax_m2": "router_aux_loss_coef",
    "mixtral": "router_aux_loss_coef",
    "olmoe": "router_aux_loss_coef",
    "phimoe": "router_aux_loss_coef",
    "qwen2_moe": "router_aux_loss_coef",
    "qwen3_moe": "router_aux_loss_coef",
}
#: Families that have the setting, and add nothing by it.
NO_TERM = ["afmoe", "cohere2_moe", "doge", "glm4_moe", "mimo_v2_flash", "solar_open"]
#: Decoders of encoder-decoders: their labels are the tokens at their own places.
NOT_SHIFTED = ["bigbird_pegasus", "blenderbot", "marian", "pegasus"]


def tiny(family, **settings):
    """A model of two blocks, in training mode."""
    config = AutoConfig.for_model(family)
    sizes = {name: value for name, value in SIZES.items() if hasattr(config, name)}
    config = AutoConfig.for_model(family, **sizes)
    for name, value in settings.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def balanced(family, coefficient=0.5):
    return tiny(family, output_router_logits=True, **{EXPERTS[family]: coefficient})


def own_loss(model, batch):
    with torch.no_grad():
        return model(**batch, use_cache=False).loss


def assert_plain(model, chunks=2, **options):
    """The loss of a step is that of the plain model over the batch."""
    batch = text(4)
    expected = own_loss(model, batch)
    pipe = mpcomp.pipeline(model, chunks, split=2, **options)
    torch.testing.assert_close(pipe.forward_backward(batch), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", EXPERTS)
def test_a_term_of_all_layers_is_refused_with_both_numbers_and_the_cure(family):
    model = balanced(family)
    ids = torch.arange(1, 11).reshape(2, 5)
    labels = ids.clone()
    labels[0, :2] = -100
    with_term = own_loss(model.eval(), {"input_ids": ids, "labels": labels})
    model.config.output_router_logits = False
    without = own_loss(model, {"input_ids": ids, "labels": labels})
    model.train().config.output_router_logits = True
    assert with_term > without + 0.1
    numbers = rf"{re.escape(f'{with_term:.6g}')} .*{re.escape(f'{without:.6g}')}"
    name = type(model).__name__
    with pytest.raises(ValueError, match=rf"{name} is {numbers}.*output_router_logits = False"):
        mpcomp.pipeline(model, 1, split=2)
    assert model.training
    model.config.output_router_logits = False
    assert_plain(model)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "jetmoe", "granitemoe"])
def test_a_loss_that_is_named_is_what_is_trained_by(family):
    """The cross-entropy alone, although the configuration asks for more."""
    model = balanced(family)
    batch = text(4)
    logits = model(**without_labels(batch), use_cache=False).logits
    expected = mpcomp.CausalLMLoss()(logits, batch["labels"]).detach()
    pipe = mpcomp.pipeline(model, 2, split=2, loss_fn=mpcomp.CausalLMLoss())
    torch.testing.assert_close(pipe.forward_backward(batch), expected, rtol=1e-5, atol=0)
    assert model.config.output_router_logits


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_a_stage_without_experts(family):
    """It has no router whose logits it could give."""
    config = tiny(family).config
    config.mlp_only_layers, config.output_router_logits = [1], True
    model = AutoModelForCausalLM.from_config(config).train()
    with pytest.raises(ValueError, match="output_router_logits = False"):
        mpcomp.pipeline(model, 1, split=2)
    pipe = mpcomp.pipeline(model, 1, split=2, loss_fn=mpcomp.CausalLMLoss())
    model.config.output_router_logits = False
    batch = text(2)
    expected = own_loss(model, batch)
    torch.testing.assert_close(pipe.forward_backward(batch), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "jetmoe"])
def test_a_coefficient_of_zero_adds_nothing(family):
    assert_plain(balanced(family, 0.0))


@pytest.mark.parametrize("family", NO_TERM)
def test_a_setting_that_adds_nothing_is_taken(family):
    assert_plain(tiny(family, output_router_logits=True))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "phimoe", "gpt_oss"])
def test_a_model_on_meta_is_refused_by_its_configuration(family):
    with torch.device("meta"):
        model = balanced(family)
    with pytest.raises(ValueError, match="has a term beside .*output_router_logits = False"):
        mpcomp.pipeline(model, 1, split=2)


@pytest.mark.parametrize("family", NOT_SHIFTED)
def test_labels_that_are_not_shifted_are_refused_with_both_numbers(family):
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "vocab_size": 53}
    sizes |= {"decoder_ffn_dim": 40, "encoder_layers": 2, "pad_token_id": 0, "eos_token_id": 2}
    config = AutoConfig.for_model(family, max_position_embeddings=16, dropout=0.0, **sizes)
    config.is_decoder = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    assert is_causal_lm(model)
    with pytest.raises(ValueError, match=r"is \S+ for a few tokens, .* loss_fn=f"):
        mpcomp.pipeline(model, 1, split=2)

    def unshifted(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    assert_plain(model, loss_fn=unshifted)


@pytest.mark.parametrize("make", [gpt2, lambda: language_model("gemma")], ids=["gpt2", "gemma"])
def test_a_loss_function_that_was_replaced_is_refused(make):
    """Also of a family that is known."""
    model = make()
    model.loss_function = lambda logits, labels, **others: 2 * mpcomp.CausalLMLoss()(logits, labels)
    with pytest.raises(ValueError, match="pass loss_fn=f"):
        mpcomp.pipeline(model, 1, split=2)


def test_an_input_that_asks_for_the_term_is_refused():
    model = tiny("mixtral")
    pipe = mpcomp.pipeline(model, 1, split=2)
    with pytest.raises(ValueError, match="the batch has 'output_router_logits'"):
        pipe.forward_backward({**text(2), "output_router_logits": True})


def rwkv(rescale_every):
    """Eight blocks, of which an evaluation halves the weights of some."""
    names = ("hidden_size", "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    sizes = {name: SIZES[name] for name in names}
    config = AutoConfig.for_model("rwkv", num_hidden_layers=8, rescale_every=rescale_every, **sizes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def test_a_recurrent_model():
    """RWKV: refused where its forward changes weights; else the plain model, which does so too."""
    model = rwkv(3)
    before = copy.deepcopy(model.state_dict())
    plain = copy.deepcopy(model)
    with pytest.raises(ValueError, match="RwkvForCausalLM with config.rescale_every = 3 changes"):
        mpcomp.pipeline(model, 1, split=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.config.rescale_every = 0
    pipe = mpcomp.pipeline(model, 2, split=3)
    batch = text(4)
    loss = pipe.forward_backward(batch)
    torch.testing.assert_close(loss, plain_step(plain, batch, [2, 2]), rtol=1e-6, atol=0)
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-6)
    expected = own_loss(plain.eval(), batch)
    assert pipe.evaluate([batch]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("family", ["rwkv", "mamba", "falcon_mamba", "mamba2", "nemotron_h"])
def test_a_state_that_is_no_keys_and_values_is_refused(family):
    own = {"rwkv": {"rescale_every": 0}, "mamba2": {"num_heads": 8, "head_dim": 8}}
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "pad_token_id", "eos_token_id")
    sizes = {name: SIZES[name] for name in names}
    if family == "nemotron_h":
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
    config = AutoConfig.for_model(family, **sizes, **own.get(family, {}))
    model = AutoModelForCausalLM.from_config(config)
    pipe = mpcomp.pipeline(model, 1, split=2)
    with pytest.raises(ValueError, match=rf"generate: {type(model).__name__} is recurrent .*merge"):
        pipe.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2)


def bare(family, norm):
    """A model whose last norm has no weights."""
    model = language_model(family)
    holder, _, name = NORMS[family].rpartition(".")
    setattr(model.get_submodule(holder), name, norm(32, elementwise_affine=False))
    return model


NORMS = {
    "gpt2": "transformer.ln_f",
    "gpt_neox": "gpt_neox.final_layer_norm",
    "llama": "model.norm",
    "phi": "model.final_layernorm",
    "stablelm": "model.norm",
}


@pytest.mark.parametrize("family", ["olmo", *NORMS])
def test_a_last_norm_without_weights(family):
    """It is the last stage's, as one with weights is."""
    norm = nn.LayerNorm if family in ("gpt2", "gpt_neox", "phi") else nn.RMSNorm
    model = language_model("olmo") if family == "olmo" else bare(family, norm)
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 2, split=3)
    batch = text(4, side="right")
    loss = pipe.forward_backward(batch)
    torch.testing.assert_close(loss, plain_step(plain, batch, [2, 2]), rtol=1e-6, atol=0)
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        if name in theirs and "embed" not in name and "wte" not in name:
            torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-6)
    assert pipe.evaluate([batch]) == pytest.approx(float(own_loss(plain.eval(), batch)), rel=1e-5)


@pytest.mark.parametrize("family", ["phi", "gpt2", "gpt_neo"])
def test_dropout_of_the_embeddings_is_the_first_stages(family):
    """Also where the model names it after its blocks, as Phi does."""
    names = ("embd_pdrop", "embed_dropout")
    config = language_model(family).config
    setting = next(name for name in names if hasattr(config, name))
    first, last = split(language_model(family, **{setting: 0.5}), 2)
    ids = text(2)["input_ids"]
    assert not torch.equal(first.train()(ids), first(ids))
    x = first.eval()(ids).detach()
    assert torch.equal(last.train()(x), last.eval()(x))


class WithTerm(torch.autograd.Function):
    """As the guide has it (docs/guide/your_own_model.md)."""

    @staticmethod
    def forward(ctx, x, term):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype, device=gradient.device)


class Penalized(nn.Module):
    """A layer that wants its output small, beside what the loss wants."""

    def __init__(self, chunks):
        super().__init__()
        self.layer, self.chunks = nn.Linear(4, 4), chunks

    def forward(self, x):
        x = self.layer(x).tanh()
        self.term = 0.3 * x.square().mean()
        return WithTerm.apply(x, self.term / self.chunks) if self.chunks else x


def penalized(chunks):
    torch.manual_seed(0)
    blocks = [Penalized(chunks) for _ in range(3)]
    return nn.Sequential(nn.Linear(3, 4), *blocks, nn.Linear(4, 5))


def gradients_of_terms(chunks):
    """Of the pipeline, and of the plain model with all terms in its loss."""
    x, y = torch.randn(8, 3), torch.randint(5, (8,))
    pipe = mpcomp.pipeline(penalized(chunks), chunks, split=2, loss_fn=F.cross_entropy)
    plain = penalized(0)
    loss = F.cross_entropy(plain(x), y)
    (loss + sum(block.term for block in plain[1:4])).backward()
    pipe.forward_backward(x, y)
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return [(parameter.grad, theirs[name]) for name, parameter in pipe.named_parameters()]


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_terms_inside_blocks_are_trained_as_the_guide_says(chunks):
    for found, expected in gradients_of_terms(chunks):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def on_ranks():
    """The refusal, and numbers without the term and of a recurrent model."""
    with pytest.raises(Exception, match="output_router_logits = False") as caught:
        mpcomp.pipeline(balanced("mixtral"), 1)
    batch, losses = text(4), []
    for model in (tiny("mixtral"), rwkv(0), language_model("olmo")):
        torch.manual_seed(1)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        expected = own_loss(model, batch)
        pipe = mpcomp.pipeline(model, 2)
        losses += [(float(pipe.forward_backward(batch)), float(expected))]
        losses += [(pipe.evaluate([batch]), float(expected))]
    torch.manual_seed(0)  # as the other rank
    for found, expected in gradients_of_terms(2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    return str(caught.value), losses


@pytest.mark.timeout(120)
def test_ranks_refuse_and_train_alike(ranks):
    first, second = ranks(on_ranks, 2)
    assert first == second
    for found, expected in first[1]:
        assert found == pytest.approx(expected, rel=1e-5)
