"""Encoder-decoders are cut between their blocks, and train as the plain model does."""

import copy

import pytest
import torch
from encoder_decoders import FAMILIES, encoder_decoder, pairs, sounds
from encoders import check_equal
from everyday import slow_but
from methods import same_bits
from torch.testing import assert_close

import mpcomp

#: Numbers of blocks of stages, of 3 and 3: a cut within the encoder, behind it, within the decoder.
CUTS = ([2, 4], [3, 3], [4, 2], [1, 2, 2, 1])


@pytest.mark.parametrize("family", slow_but(("bart", "mbart", "whisper"), [*FAMILIES]))
def test_the_plain_models_loss_and_gradients(family):
    model = encoder_decoder(family)
    draw = sounds if family == "whisper" else pairs
    for i, split in enumerate(CUTS):
        check_equal(copy.deepcopy(model), draw(5, i, masks=i < 2), 1 + i % 2, split=split)


def test_weights_that_are_not_shared():
    """Then no weight is at both ends, and the head is a part of the last stage."""
    model = encoder_decoder("bart", tie_word_embeddings=False)
    pipe = mpcomp.pipeline(copy.deepcopy(model), 2, split=[2, 2, 2])
    assert len(pipe.cut_stages) == 3 and not pipe.ties
    check_equal(model, pairs(5), 2, split=[2, 2, 2])


def test_a_shared_weight_is_at_both_ends():
    """Both embeddings and the head are one weight: no cut has a copy of it, or two stages have."""
    model = encoder_decoder("bart")
    together = mpcomp.pipeline(copy.deepcopy(model), 2, split=3)
    assert len(together.cut_stages) == 4 and not together.ties
    apart = mpcomp.pipeline(copy.deepcopy(model), 2, split=3, ties="apart")
    assert [tie.stages for tie in apart.ties] == [(0, 2)]
    check_equal(model, pairs(5), 2, split=3, ties="apart")


def test_one_module_for_all_embeddings():
    """As `resize_token_embeddings` leaves them."""
    model = encoder_decoder("bart")
    model.resize_token_embeddings(60)
    assert model.model.encoder.embed_tokens is model.model.shared
    for ties in ("together", "apart"):
        check_equal(copy.deepcopy(model), pairs(5), 2, split=3, ties=ties)


def test_what_the_decoder_reads_is_made_of_labels():
    """In a batch, beside it, or made by whoever collated it: all the same."""
    model = encoder_decoder("mbart")
    batch = pairs(4)
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    rest = {name: value for name, value in batch.items() if name != "labels"}
    losses = [
        mpcomp.pipeline(copy.deepcopy(model), 2, split=2).forward_backward(*given)
        for given in (
            (batch,),
            (rest, batch["labels"]),
            ({**batch, "decoder_input_ids": shifted},),
        )
    ]
    assert same_bits(losses[0], losses[1]) and same_bits(losses[0], losses[2])


def test_evaluation_and_output():
    model = encoder_decoder("marian")
    batch = pairs(4)
    plain = copy.deepcopy(model).eval()(**batch)
    pipe = mpcomp.pipeline(model, 2, split=[1, 3, 2])
    assert abs(pipe.evaluate([batch]) - float(plain.loss)) < 1e-5
    pipe.eval()
    rest = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        assert_close(pipe(batch), plain.logits.detach())
        assert_close(pipe(rest, batch["labels"])[0], plain.logits.detach())


def test_padding_costs_nothing_at_a_cut():
    """Of both sequences, and before the head: what is padded is no part of a quantizer's range."""
    model = encoder_decoder("pegasus")  # whose blocks add to the embeddings
    huge = 5  # a token at padded positions alone, which the head never gives
    with torch.no_grad():
        model.get_input_embeddings().weight[huge] *= 1e4
        model.final_logits_bias[0, huge] = -1e9
    batch = pairs(4)
    for name in ("input_ids", "labels"):
        batch[name][batch[name] == huge] = huge + 1
    read = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    batch["input_ids"][batch["attention_mask"] == 0] = huge
    batch["decoder_input_ids"] = read.masked_fill(batch["decoder_attention_mask"] == 0, huge)
    plain = float(copy.deepcopy(model)(**batch).loss)
    for split in CUTS:
        pipe = mpcomp.pipeline(
            copy.deepcopy(model), 2, split=split, act_comp="quant:8", grad_comp="quant:8"
        )
        assert abs(float(pipe.forward_backward(batch)) - plain) < 0.02


@pytest.mark.parametrize("ties", ["together", "apart"])
def test_a_compressed_cut_learns(ties):
    pipe = mpcomp.pipeline(
        encoder_decoder("bart"), 2, split=3, ties=ties, act_comp="quant:8", grad_comp="quant:8"
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    found = []
    for _ in range(6):
        found.append(float(pipe.forward_backward(pairs(5))))
        optimizer.step()
        optimizer.zero_grad()
    assert found[-1] < found[0] - 0.1


def test_adapters():
    """A model that peft has adapted is cut as the model itself."""
    peft = pytest.importorskip("peft")
    adapted = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_2_SEQ_LM")
    model = peft.get_peft_model(encoder_decoder("bart"), adapted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    check_equal(model, pairs(5), 2, split=[2, 2, 2])


def test_the_whole_model_writes():
    pipe = mpcomp.pipeline(encoder_decoder("bart"), 2, split=2)
    pipe.eval()
    batch = pairs(2)
    with pytest.raises(ValueError, match=r"no causal language model; pipe.merge\(\).generate"):
        pipe.generate(batch["input_ids"], max_new_tokens=3)
    assert pipe.merge().generate(batch["input_ids"], max_new_tokens=3).shape[0] == 2


def test_a_batch_without_labels():
    batch = pairs(4)
    del batch["labels"]
    pipe = mpcomp.pipeline(encoder_decoder("bart"), 2, split=2)
    pipe.eval()
    with pytest.raises(ValueError, match=r"neither labels \[b, t\] nor decoder_input_ids"):
        pipe(batch)
