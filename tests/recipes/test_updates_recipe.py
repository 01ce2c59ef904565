"""Recipes with several steps in a call: the steps that they are, wherever they are made."""

import json

import pytest
import torch
from endings import check_error, check_success, end_of, history, stopped_in_step, weights
from safetensors.torch import load_file

import mpcomp
from recipes import cifar10, wikitext
from recipes.cifar10 import ImageTrainer
from recipes.image_config import ImageConfig
from recipes.text_config import TextConfig

IMAGES = [
    *("--data", "digits", "--width", "4", "--epochs", "2", "--batch-size", "8", "--chunks", "2"),
    *("--train-limit", "76", "--test-limit", "20", "--precision", "fp32", "--device", "cpu"),
]
TEXT = [
    *("--model", "tiny", "--vocab-size", "270", "--seq-len", "16", "--batch-size", "4"),
    *("--chunks", "2", "--epochs", "2", "--eval-limit", "5", "--precision", "fp32"),
    *("--device", "cpu", "--split", "2", "--untie", "--updates", "4"),
    *("--optimizer", "nadam", "--lr", "0.002"),
]


@pytest.fixture
def words(sentences):
    """A file of text for 30 batches."""
    return sentences(60)


def recipes_of(*commands):
    """In each process: runs the text recipe with each of the commands."""
    return [end_of(wikitext.main, command) for command in commands]


def assert_same_weights(one, other):
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_where_no_weights_are_old_they_are_the_usual_steps(tmp_path, capsys, monkeypatch):
    """On the last stage, where the others train nothing; bit for bit, gradients clipped."""
    make = cifar10._model

    def frozen_before_the_last_stage(config, num_classes):
        model = make(config, num_classes)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in ("layer4", "linear"))
        return model

    monkeypatch.setattr(cifar10, "_model", frozen_before_the_last_stage)
    command = [*IMAGES, "--train-limit", "64", "--split", "layer3", "--clip", "0.5"]
    command += ["--act", "quant:4", "--grad", "none", "--crop-padding", "0", "--no-flip"]
    apart, within = tmp_path / "apart", tmp_path / "within"
    cifar10.main([*command, "--out", str(apart)])
    cifar10.main([*command, "--updates", "4", "--out", str(within)])
    assert "4 steps in a call" in capsys.readouterr().out
    assert_same_weights(apart, within)
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (within, apart))
    assert ours["steps"] == theirs["steps"] == 16
    assert ours["accuracy_compressed"] == theirs["accuracy_compressed"]
    assert ours["loss"] == pytest.approx(theirs["loss"])


def test_a_rest_of_an_epoch_that_fills_no_call_is_left_out():
    config = ImageConfig.for_data("digits", batch_size=8, updates=4, train_limit=76, width=8)
    trainer = ImageTrainer(config, cifar10.load_data(config))
    assert (trainer.num_batches, trainer.steps_per_epoch) == (2, 8)
    assert trainer.pipe.chunks == 4 * config.chunks
    assert [len(y) for _, y, _ in trainer.batches(0)] == [32, 32]


def test_two_processes_train_the_run_of_one(ranks, tmp_path, words):
    """Also where it is resumed; a mistake is said by one of them, before there is a folder."""
    methods = ["--act", "quant:4", "--grad", "ef+topk:0.2"]
    tied = [one for one in TEXT if one != "--untie"]
    command = [*tied, "--data", words, *methods]
    parts, alone, none = tmp_path / "parts", tmp_path / "alone", tmp_path / "none"
    *ended, mistaken = zip(
        *ranks(
            recipes_of,
            2,
            [*command, "--out", str(parts), "--stop-after", "1"],
            ["--resume", str(parts)],
            [*command, "--tie", "none", "--out", str(none)],
        ),
        strict=True,
    )
    for ends in ended:
        check_success(ends)
    check_error(mistaken, "untie or freeze it")
    assert not none.exists()
    wikitext.main([*command, "--out", str(alone)])
    assert history(alone) == history(parts)
    assert_same_weights(alone, parts)


@pytest.mark.slow
def test_a_run_stopped_within_an_epoch_is_the_uninterrupted_run(tmp_path, words):
    command = [*TEXT, "--data", words, "--act", "quant:4", "--grad", "none"]
    wikitext.main([*command, "--out", str(tmp_path / "straight")])
    stopped = [*command, "--out", str(tmp_path / "stopped")]
    steps = json.loads((tmp_path / "straight" / "summary.json").read_text())["steps"]
    made = stopped_in_step(wikitext.main, stopped, wikitext.TextTrainer, lambda epoch: epoch + 2)
    assert made == steps // 2 + 4 and steps > 8  # of two epochs; the call was ended
    wikitext.main(["--resume", str(tmp_path / "stopped")])
    assert history(tmp_path / "stopped") == history(tmp_path / "straight")
    assert_same_weights(tmp_path / "stopped", tmp_path / "straight")


def test_the_rate_falls_with_each_step(tmp_path, words):
    """Not with each call."""
    rates = []
    end_step = wikitext.TextTrainer.end_step

    class Told(wikitext.TextTrainer):
        def end_step(self):
            rates.append(self.optimizer.param_groups[0]["lr"])
            end_step(self)

    options = {"vocab_size": 270, "seq_len": 16, "split": "2", "batch_size": 4, "epochs": 1}
    options |= {"updates": 4, "untie": True, "chunks": 2, "eval_limit": 5}
    config = TextConfig.for_model("tiny", data=words, **options, lr=1.0, optimizer="nadam")
    trainer = Told(config, wikitext.load_data(config))
    trainer.fit(progress=False)
    total = trainer.steps_per_epoch
    assert total % 4 == 0 and len(rates) == total
    assert rates == [pytest.approx((total - step) / total) for step in range(total)]


def test_checkpoints_are_as_many_steps_apart_as_asked_for(tmp_path, words, monkeypatch):
    """Of the optimizer, of which a call makes four; and one more at the end of the epoch."""
    saved = []
    save = mpcomp.Checkpoints.save
    monkeypatch.setattr(
        mpcomp.Checkpoints, "save", lambda self, extra: saved.append(1) or save(self, extra)
    )
    command = [*TEXT, "--data", words, "--epochs", "1", "--save-every-steps", "8"]
    wikitext.main([*command, "--out", str(tmp_path / "run")])
    steps = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]
    assert steps > 8 and len(saved) == steps // 8 + 1


def test_an_untied_model_begins_with_equal_weights_and_is_saved_with_both(tmp_path, words):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "run"
    wikitext.main([*TEXT, "--data", words, "--epochs", "1", "--out", str(out)])
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    saved = load_file(out / "model" / "model.safetensors")
    head, embedding = model.lm_head.weight, model.transformer.wte.weight
    assert not model.config.tie_word_embeddings and head is not embedding
    assert torch.equal(saved["lm_head.weight"], head)
    assert torch.equal(saved["transformer.wte.weight"], embedding)
    assert not torch.equal(head, embedding)  # each went its own way
    config = TextConfig.for_model(str(out / "model"), data=words, seq_len=16, untie=True)
    tied = TextConfig.for_model("tiny", data=words, vocab_size=270, seq_len=16)
    for one in (config, tied):
        loaded = wikitext.make_model(one, wikitext.load_data(one).tokenizer)
        assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == (one is tied)
    begun = wikitext.make_model(
        TextConfig.for_model("tiny", data=words, vocab_size=270, seq_len=16, untie=True),
        wikitext.load_data(tied).tokenizer,
    )
    assert torch.equal(begun.lm_head.weight, begun.transformer.wte.weight)
    assert torch.equal(begun.lm_head.weight, loaded.lm_head.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": 0}, "updates is 0; pass at least 1"),
        ({"updates": 4, "replicas": 2}, "updates is 4, replicas is 2"),
        ({"updates": 4, "schedule": "GPipe"}, "updates is 4, schedule is GPipe"),
        ({"updates": 4, "precision": "fp16"}, "pass --precision bf16 or fp32"),
        ({"updates": 4, "warmup_steps": 6}, "warmup_steps is 6, updates is 4"),
        ({"updates": 4, "save_every_steps": 6}, "pass a multiple of 4"),
        ({"updates": 4, "drop_last": False}, "drop --no-drop-last"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ImageConfig.for_data("digits", batch_size=16, **options)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--accumulate", "2"], "updates is 4, accumulate is 2"),
        (["--model", "lstm"], "is an LSTM, which keeps its weights in a list of its own"),
        (["--batch-size", "400"], "a call takes 1600 blocks, and there are"),
    ],
)
def test_mistakes_end_with_one_line_and_leave_nothing(tmp_path, words, more, message):
    out = tmp_path / "run"
    with pytest.raises(SystemExit, match=message):
        wikitext.main([*TEXT, "--data", words, *more, "--out", str(out)])
    assert not out.exists()
