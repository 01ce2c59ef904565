"""Encoders are cut between their blocks, and what cannot be cut says why."""

import copy
import pickle

import pytest
import torch
import transformers
from encoders import TEXT, encoder, image_batch, text_batch
from lms import VOCABULARY, chained, evaluation, gpt2, without_labels
from methods import same_bits
from torch import nn

from stages import blocks, merge, split, ties
from stages.language_models import is_causal_lm, is_pretrained

LAYERS = [f"bert.encoder.layer.{i}" for i in range(4)]


def bert(head="SequenceClassification", **settings):
    return encoder("bert", head, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_give_the_models_bits(dtype):
    model = bert().to(dtype)
    keys = list(model.state_dict())
    batch = without_labels(text_batch("SequenceClassification", 3, segments=True))
    with evaluation(model):
        expected = model(**batch).logits
    for where in (1, 2, 4, [1, 2, 1], LAYERS[1:2]):
        stages = split(model, where)
        assert same_bits(chained(stages, batch), expected)
        assert sorted(key for stage in stages for key in stage.state_dict()) == sorted(keys)
        assert merge(stages) is model
    assert [block.name for block in blocks(model)] == LAYERS


def test_stages_copy_and_pickle():
    model = bert("MaskedLM")
    batch = without_labels(text_batch("MaskedLM", 3))
    stages = split(model, 3)
    expected = chained(stages, batch)
    assert same_bits(chained([copy.deepcopy(stage) for stage in stages], batch), expected)
    assert same_bits(chained(pickle.loads(pickle.dumps(stages)), batch), expected)


def test_the_head_of_a_masked_language_model_is_tied():
    model = bert("MaskedLM")
    embedding = "bert.embeddings.word_embeddings.weight"
    apart = split(model, 2)
    assert ties(apart) == [((0, embedding), (1, "cls.predictions.decoder.weight"))]
    together = split(model, 2, together=True)
    assert len(together) == 3 and together[0].together
    assert not any("layer" in name for name in together[-1].block_names)


def test_a_head_that_is_named_before_the_encoder():
    """Its class names the head first; what runs first is the embeddings."""
    model = encoder("xlm-roberta", "MaskedLM")
    first, last = split(model, 2)
    assert "roberta.embeddings" in first.block_names and "lm_head" in last.block_names
    owner = first.get_parameter("roberta.embeddings.word_embeddings.weight")
    assert merge([first, last]).get_input_embeddings().weight is owner


def test_what_later_stages_take_from_the_batch():
    batch = without_labels(text_batch("SequenceClassification", 2, segments=True))
    first, middle, last = split(bert(), 3)
    assert first.takes(batch) == {}
    assert set(middle.takes(batch)) == {"attention_mask"}
    assert set(last.takes(batch)) == {"attention_mask", "input_ids"}
    assert first.of_transformers and not first.is_causal_lm


def test_training_mode_follows_the_stage():
    model = bert(hidden_dropout_prob=0.5).eval()
    first, last = split(model, 2)
    batch = without_labels(text_batch("SequenceClassification", 2))
    x = first(**batch)
    assert same_bits(first(**batch), x)
    assert not torch.equal(first.train()(**batch), x)
    assert not torch.equal(last.train()(x), last(x))


def test_an_encoder_without_a_head():
    """Its output is that of its last block, for a head and loss of one's own."""
    model = transformers.AutoModel.from_config(bert().config).train()
    batch = without_labels(text_batch("SequenceClassification", 2))
    with evaluation(model):
        expected = model(**batch).last_hidden_state
    stages = split(model, 2)
    assert same_bits(chained(stages, batch), expected) and stages[0].own_loss is None


def test_a_weight_that_all_blocks_read():
    model = encoder("deberta-v2", "SequenceClassification")
    read = ["deberta.encoder.rel_embeddings.weight", "deberta.encoder.LayerNorm.weight"]
    tied = ties(split(model, 2))
    assert all(((0, name), (1, name)) in tied for name in read)
    with pytest.raises(ValueError, match=r"two stages can train one weight, 3 cannot; cut the .*"):
        split(model, 3)
    for module in (model.deberta.encoder.rel_embeddings, model.deberta.encoder.LayerNorm):
        module.requires_grad_(False)
    batch = without_labels(text_batch("SequenceClassification", 3))
    with evaluation(model):
        expected = model(**batch).logits
    stages = split(model, 3)
    assert ties(stages) == [] and same_bits(chained(stages, batch), expected)
    assert not any(p.requires_grad for p in model.deberta.encoder.rel_embeddings.parameters())


def test_swin_is_cut_for_images_of_one_size():
    model = encoder("swin", "ImageClassification")
    first, *_ = split(model, 3)
    first.check_batch({"pixel_values": image_batch(model, 2)["pixel_values"]})
    with pytest.raises(ValueError, match=r"are for images \[3, 16, 16\], as config.image_size"):
        first.check_batch(torch.zeros(2, 3, 32, 32))


def test_models_on_meta():
    """Their stages have the names of the plain model's; there is no number to compare."""
    for family, head in (("bert", "MaskedLM"), ("vit", "ImageClassification")):
        with torch.device("meta"):
            model = encoder(family, head)
        stages = split(model, 2)
        names = {name for stage in stages for name in stage.state_dict()}
        assert names == set(model.state_dict())


def test_models_of_transformers_are_told_apart():
    assert is_pretrained(gpt2()) and is_causal_lm(gpt2())
    assert is_pretrained(bert("MaskedLM")) and not is_causal_lm(bert("MaskedLM"))
    assert not is_pretrained(nn.Linear(1, 1))


# -- what cannot be cut, and what is no batch -----------------------------------------------------


@pytest.mark.parametrize(
    "family, head, settings, message",
    [
        ("albert", "MaskedLM", {}, "has the same weights in all its layers"),
        pytest.param(
            *("roformer", "MaskedLM", {}, "its stages do not give what it gives"),
            marks=pytest.mark.skipif(
                transformers.__version__ >= "5.24", reason="from 5.24 on it is cut as others are"
            ),
        ),
        ("t5", "TokenClassification", {"d_model": 32, "num_heads": 4}, "bias.weight' gives the bl"),
        ("xlnet", "TokenClassification", {"d_model": 32, "n_head": 4}, "has 'mask_emb' itself"),
        ("funnel", "TokenClassification", {}, "cannot find the blocks of FunnelForTokenCla"),
        ("bert", "PreTraining", {}, "and the last stage gives one tensor"),
        ("bert", "MultipleChoice", {}, "with 'input_ids', 'attention_mask' alone it does not run"),
        ("audio-spectrogram-transformer", "AudioClassification", {}, "it takes 'input_values'"),
        ("t5", "SequenceClassification", {"d_model": 32, "num_heads": 4}, "but no head that gives"),
        ("resnet", "ImageClassification", {"hidden_sizes": [8], "depths": [1]}, "cannot find the"),
    ],
)
def test_what_cannot_be_cut_says_why(family, head, settings, message):
    sizes = {**(TEXT["bert"] if not settings else {"vocab_size": VOCABULARY}), **settings}
    if family in ("t5", "xlnet"):
        sizes["num_layers" if family == "t5" else "n_layer"] = 2
    if family == "funnel":
        sizes = {"vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 40}
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    with pytest.raises(ValueError, match=message):
        split(model, 2)


def test_batches_that_the_model_cannot_take():
    stage = split(bert(), 2)[0]
    with pytest.raises(ValueError, match="input_ids is a NoneType; BertForSequenceClassification"):
        stage.check_batch({"attention_mask": torch.ones(2, 3)})
    with pytest.raises(ValueError, match="the batch has 'pixel_values'; .* takes 'input_ids', 'at"):
        stage.check_batch({"input_ids": torch.ones(2, 3).long(), "pixel_values": torch.ones(2)})
    for name in ("cache", "past_key_values"):  # the forward's name for it depends on the version
        with pytest.raises(ValueError, match=f"the batch has '{name}'"):
            stage.check_batch({"input_ids": torch.ones(2, 3).long(), name: None})


def test_weights_beside_the_blocks_belong_to_no_stage():
    for place, name in (("bert", r"bert \(BertModel\)"), ("", r"the model \(BertForSeq\w*\)")):
        model = bert()
        model.get_submodule(place).scale = nn.Parameter(torch.ones(()))
        with pytest.raises(ValueError, match=f"{name} has 'scale' itself"):
            split(model, 2)
