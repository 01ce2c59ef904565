"""Encoders are cut as decoders are, and train as the plain model does."""

import copy

import pytest
import torch
import transformers
from encoder_decoders import encoder_decoder, sounds
from encoders import (
    CLASSES,
    DECODERS,
    HEADS,
    IMAGES,
    TEXT,
    check_equal,
    encoder,
    image_batch,
    text_batch,
)
from everyday import slow_but
from methods import same_bits
from torch.testing import assert_close

import mpcomp

EVERYDAY = ("bert", "modernbert", "deberta-v2")


#: Their blocks all read one weight, which two stages can train.
READ_BY_ALL = ("deberta", "deberta-v2", "mpnet")


TIED = [("bert", "MaskedLM")]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", slow_but(EVERYDAY, [*TEXT]))
def test_encoders_of_texts(family, head):
    try:
        model = encoder(family, head)
    except ValueError as error:
        assert "Unrecognized configuration class" in str(error)
        pytest.skip(f"{family} has no such head")
    segments = family in ("bert", "electra")
    num_stages = 2 if family in READ_BY_ALL else 3
    for chunks in (1, 2):
        batch = text_batch(head, 5, chunks, segments=segments)
        check_equal(copy.deepcopy(model), batch, chunks, split=num_stages)


@pytest.mark.parametrize("head", HEADS[1:])
@pytest.mark.parametrize("family", slow_but(("llama",), DECODERS))
def test_heads_of_decoders(family, head):
    """A class is read at the last token that is no padding, which a later stage must find."""
    model = encoder(family, head)
    for chunks in (1, 2):
        check_equal(copy.deepcopy(model), text_batch(head, 5, chunks), chunks, split=3)


@pytest.mark.parametrize("family", slow_but(("vit", "deit", "swin"), [*IMAGES]))
def test_encoders_of_images(family):
    model = encoder(family, "ImageClassification")
    for chunks in (1, 2):
        check_equal(copy.deepcopy(model), image_batch(model, 5, chunks), chunks, split=3)


def test_a_classifier_of_sounds():
    """On Whisper's encoder: its configuration is an encoder-decoder's, and it has no decoder."""
    config = encoder_decoder("whisper", num_labels=CLASSES, classifier_proj_size=8).config
    model = transformers.WhisperForAudioClassification(config).train()
    for chunks in (1, 2):
        batch = {**sounds(5, chunks, masks=False), "labels": torch.arange(5) % CLASSES}
        check_equal(copy.deepcopy(model), batch, chunks, split=3)


@pytest.mark.parametrize("problem", ["regression", "numbers", "multi_label_classification"])
def test_other_labels_of_rows(problem):
    """A number a row, several, or any of the classes."""
    count = 1 if problem == "regression" else CLASSES
    named = None if count == 1 else "regression" if problem == "numbers" else problem
    model = encoder("bert", "SequenceClassification", num_labels=count, problem_type=named)
    batch = text_batch("SequenceClassification", 5)
    batch["labels"] = torch.rand(5) if count == 1 else torch.rand(5, CLASSES).round()
    for chunks in (1, 2):
        check_equal(copy.deepcopy(model), batch, chunks, split=3)
    assert model.config.problem_type == named


def test_both_ends_of_a_tied_head_are_together():
    """As with language models; apart, the copies are given the sum of both gradients."""
    model = encoder("bert", "MaskedLM")
    batch = text_batch("MaskedLM", 5)
    losses = {
        ties: mpcomp.pipeline(
            copy.deepcopy(model), 2, split=2, ties=ties, act_comp="quant:8", grad_comp="quant:8"
        )
        for ties in ("together", "apart")
    }
    assert [len(pipe.cut_stages) for pipe in losses.values()] == [3, 2]
    for pipe in losses.values():
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        found = []
        for _ in range(6):
            found.append(float(pipe.forward_backward(batch)))
            optimizer.step()
            optimizer.zero_grad()
        assert found[-1] < found[0] - 0.1
        merged = pipe.merge()
        decoder = merged.get_output_embeddings().weight
        assert decoder is merged.get_input_embeddings().weight


def test_a_model_without_a_head_takes_a_loss_of_ones_own():
    config = encoder("bert", "SequenceClassification").config
    model = transformers.AutoModel.from_config(config, add_pooling_layer=False).train()
    plain = copy.deepcopy(model)
    batch = text_batch("SequenceClassification", 4)
    labels = batch.pop("labels").float()

    def loss_fn(states, labels):
        return (states[:, 0].mean(1) - labels).square().mean()

    loss = loss_fn(plain(**batch).last_hidden_state, labels)
    loss.backward()
    pipe = mpcomp.pipeline(model, 2, split=3, loss_fn=loss_fn)
    assert_close(pipe.forward_backward(batch, labels), loss.detach())
    for (_, ours), theirs in zip(pipe.merge().named_parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_padding_costs_nothing_at_a_cut():
    """The mask has transformers' meaning: what is padded is no part of a quantizer's range."""
    model = encoder("bert", "SequenceClassification")
    batch = text_batch("SequenceClassification", 4)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[0] *= 1e4  # the padding's
    plain = float(copy.deepcopy(model)(**batch).loss)
    pipe = mpcomp.pipeline(model, 2, split=2, act_comp="quant:8", grad_comp="quant:8")
    assert abs(float(pipe.forward_backward(batch)) - plain) < 0.01


def test_evaluation_and_output():
    model = encoder("bert", "QuestionAnswering")
    batch = text_batch("QuestionAnswering", 4)
    plain = copy.deepcopy(model).eval()(**batch)
    pipe = mpcomp.pipeline(model, 2, split=2)
    assert abs(pipe.evaluate([batch]) - float(plain.loss)) < 1e-5
    pipe.eval()
    with torch.no_grad():
        begin, end = pipe(batch).unbind(-1)
    assert_close((begin, end), (plain.start_logits.detach(), plain.end_logits.detach()))


def test_a_loss_of_its_own_is_not_taken_for_another():
    model = encoder("bert", "SequenceClassification")
    own = type(model).forward

    class Doubled(type(model)):
        def forward(self, input_ids=None, labels=None, **rest):
            result = own(self, input_ids=input_ids, labels=labels, **rest)
            if labels is not None:
                result.loss = 2 * result.loss
            return result

    model.__class__ = Doubled
    with pytest.raises(ValueError, match=r"the loss of Doubled is .* pass loss_fn=f"):
        mpcomp.pipeline(model, 2, split=2)
    mpcomp.pipeline(model, 2, split=2, loss_fn=torch.nn.functional.cross_entropy)


def test_an_answer_outside_its_text():
    batch = text_batch("QuestionAnswering", 4)
    batch["end_positions"][1] = 9
    pipe = mpcomp.pipeline(encoder("bert", "QuestionAnswering"), 2, split=2)
    with pytest.raises(ValueError, match="an answer lies outside its text of 9 tokens"):
        pipe.forward_backward(batch)


def test_adapters():
    """A model that peft has adapted is cut as the model itself."""
    peft = pytest.importorskip("peft")
    adapted = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = peft.get_peft_model(encoder("bert", "SequenceClassification"), adapted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    check_equal(model, text_batch("SequenceClassification", 5), 2, split=3)


@pytest.mark.parametrize("family, head", [("deberta-v2", "SequenceClassification"), *TIED])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(family, head, tmp_path):
    """Also of a weight that stages have under one name."""
    given = {"split": 2, "act_comp": "ef21+quant:8", "grad_comp": "ef21+quant:8", "ties": "apart"}
    model = encoder(family, head)
    batch = text_batch(head, 5)

    def run(folder, steps, model):
        pipe = mpcomp.pipeline(copy.deepcopy(model), 2, **given)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        if folder is not None and folder.exists():
            pipe.load(folder, optimizer=optimizer)
        losses = []
        for _ in range(steps):
            losses.append(pipe.forward_backward(batch))
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None:
            pipe.save(folder, optimizer=optimizer)
        return losses, pipe.merge().state_dict()

    losses, expected = run(None, 4, model)
    first, _ = run(tmp_path / "saved", 2, model)
    rest, found = run(tmp_path / "saved", 2, encoder(family, head))
    assert all(map(same_bits, [*first, *rest], losses))
    assert all(same_bits(found[key], value) for key, value in expected.items())
