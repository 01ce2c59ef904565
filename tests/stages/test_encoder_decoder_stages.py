"""Encoder-decoders are cut between their blocks, and what cannot be cut says why."""

import copy
import pickle

import pytest
import torch
import transformers
from encoder_decoders import encoder_decoder, pairs
from lms import VOCABULARY, chained, evaluation, without_labels
from methods import same_bits
from torch import nn

from stages import blocks, merge, split, ties
from stages.language_models import is_encoder_decoder

LAYERS = [f"model.{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(3)]


def completed(model, batch):
    return without_labels(split(model, 1)[0].completed(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_give_the_models_bits(dtype):
    model = encoder_decoder("mbart").to(dtype)
    keys = list(model.state_dict())
    batch = completed(model, pairs(3))
    with evaluation(model):
        expected = model(**batch).logits
    for where in (1, 2, 6, [1, 4, 1], LAYERS[2:3], LAYERS[4:5]):
        stages = split(model, where)
        assert same_bits(chained(stages, batch), expected)
        assert {key for stage in stages for key in stage.state_dict()} == set(keys)
        assert merge(stages) is model
    assert [block.name for block in blocks(model)] == LAYERS


def test_both_parts_cross_a_cut():
    """The encoder's positions and then the decoder's; before the head these alone."""
    model = encoder_decoder("bart")
    batch = completed(model, pairs(3))
    shapes = []
    for where in (LAYERS[:1], LAYERS[2:3], LAYERS[4:5]):
        first, *_ = split(model, where)
        shapes.append(tuple(first(**batch).shape))
    assert shapes == [(3, 9 + 7, 32)] * 3
    stages = split(model, 2, together=True)
    x = stages[0](**batch)
    assert tuple(stages[1](x, **stages[1].takes(batch)).shape) == (3, 7, 32)
    assert [set(stage.takes(batch)) for stage in stages] == [
        set(),
        {"attention_mask", "decoder_attention_mask"},
        set(),
    ]
    assert stages[0].positions(batch).shape == (3, 9 + 7)


def test_stages_copy_and_pickle():
    model = encoder_decoder("bart")
    batch = completed(model, pairs(3))
    stages = split(model, 3)
    expected = chained(stages, batch)
    assert same_bits(chained([copy.deepcopy(stage) for stage in stages], batch), expected)
    assert same_bits(chained(pickle.loads(pickle.dumps(stages)), batch), expected)


def test_embeddings_are_in_the_first_stage():
    model = encoder_decoder("mbart")
    first, second, last = split(model, [2, 2, 2])
    named = {"model.encoder.embed_tokens", "model.decoder.embed_tokens", "model.shared"}
    assert named <= set(first.block_names)
    assert "model.encoder.layer_norm" in second.block_names  # with the first block that reads it
    assert {"lm_head", "model.decoder.layer_norm"} <= set(last.block_names)
    assert "final_logits_bias" in last.state_dict()
    assert [[i for i, _ in tie] for tie in ties([first, second, last])] == [[0, 2]]


def test_a_vocabulary_for_each_part():
    model = encoder_decoder(
        "marian", share_encoder_decoder_embeddings=False, decoder_vocab_size=VOCABULARY
    )
    batch = completed(model, pairs(3))
    with evaluation(model):
        expected = model(**batch).logits
    assert same_bits(chained(split(model, 3), batch), expected)


def test_models_on_meta():
    with torch.device("meta"):
        model = encoder_decoder("bart")
    names = {name for stage in split(model, 3) for name in stage.state_dict()}
    assert names == set(model.state_dict())


def test_the_class_says_whether_there_is_a_decoder():
    assert is_encoder_decoder(encoder_decoder("bart"))
    assert not is_encoder_decoder(nn.Linear(1, 1))


# -- what cannot be cut, and what is no batch -----------------------------------------------------


def test_blocks_that_are_left_out_at_random():
    model = encoder_decoder("bart", decoder_layerdrop=0.1)
    with pytest.raises(ValueError, match=r"BartDecoder leaves out blocks at random \(layerdrop = "):
        split(model, 2)
    model.get_decoder().layerdrop = 0
    assert len(split(model, 2)) == 2


def test_t5_hands_a_bias_on():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4
    )
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(ValueError, match=r"relative_attention_bias.weight' makes what other"):
        split(model, 2)


def test_other_heads():
    config = encoder_decoder("bart").config
    for kind in (transformers.BartModel, transformers.BartForSequenceClassification):
        with pytest.raises(ValueError, match=f"{kind.__name__} has an encoder and a decoder, but"):
            split(kind(config), 2)


def test_batches_that_the_model_cannot_take():
    model = encoder_decoder("bart")
    stage = split(model, 2)[0]
    batch = completed(model, pairs(3))
    with pytest.raises(ValueError, match="input_ids is a NoneType; BartForConditionalGeneration"):
        stage.check_batch({"attention_mask": torch.ones(2, 3)})
    with pytest.raises(ValueError, match="the batch has 'pixel_values'; .* takes 'input_ids', 'at"):
        stage.check_batch({**batch, "pixel_values": torch.ones(2)})
    with pytest.raises(ValueError, match=r"attention_mask is \[3, 1, 9, 9\]; .* one number for ea"):
        stage.check_batch({**batch, "attention_mask": torch.ones(3, 1, 9, 9)})


def test_a_batch_that_is_not_completed():
    batch = without_labels(pairs(3, masks=False))
    first, last = split(encoder_decoder("bart"), 2)
    x = first(**batch, decoder_input_ids=batch["input_ids"])
    with pytest.raises(
        ValueError, match=r"stage 1 .* needs attention_mask \[b, s\], to know which"
    ):
        last(x, **last.takes(batch))
