"""The text recipe on a few sentences: what it leaves, and that a resumed run is the same run."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from endings import stopped_in_step
from safetensors.torch import load_file

import mpcomp
import stages
from recipes import wikitext
from recipes.text_config import TextConfig
from recipes.tokens import tokenizer_of
from recipes.wikitext import TextTrainer, load_data

WORDS = ["the", "a", "cut", "stage", "link", "model", "sends", "learns", "large", "small", "slow"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file with enough words for 16 batches."""
    draw = random.Random(0)
    file = tmp_path / "words.txt"
    lines = (" ".join(draw.choices(WORDS, k=12)) + ".\n" for _ in range(30))
    file.write_text("".join(lines))
    return file


@pytest.fixture
def command(text: Path):
    """The options of a run of seconds, with more of them."""

    def options(*more: object) -> list[str]:
        few = {
            **{"--model": "tiny", "--data": text, "--vocab-size": 270, "--seq-len": 16},
            **{"--batch-size": 4, "--chunks": 2, "--epochs": 2, "--eval-limit": 5},
            **{"--precision": "fp32", "--device": "cpu", "--split": 2},
        }
        return [str(one) for pair in few.items() for one in pair] + [str(one) for one in more]

    return options


def error_of(options: list[str]) -> str:
    """The one line that the recipe ends with."""
    with pytest.raises(SystemExit) as caught:
        wikitext.main(options)
    assert isinstance(caught.value.code, str)
    assert caught.value.code.startswith("error: ") and "\n" not in caught.value.code
    return caught.value.code


def rows_without_time(folder: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"]
    return rows


def logits_of(folder: Path) -> torch.Tensor:
    """What transformers alone makes of a saved model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)("the slow link", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.slow
def test_compare_leaves_the_run_folder(tmp_path, command, capsys):
    out = tmp_path / "run"
    methods = ["--act", "topk:0.2", "--grad", "quant:8", "--tie", "ef+topk:0.1"]
    wikitext.main(command("--compare", *methods, "--out", out))
    summary = json.loads((out / "summary.json").read_text())
    assert 1 < summary["perplexity_compressed"] < 270  # better than a guess
    assert summary["perplexity_compressed"] != summary["perplexity_uncompressed"]
    assert summary["best_perplexity_compressed"] <= summary["perplexity_compressed"]
    assert 0.05 < summary["wire_ratio"] < 0.5  # compressed indeed
    assert summary["uncompressed_run"]["wire_ratio"] == pytest.approx(1.0, abs=0.02)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = rows_without_time(out)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {"perplexity_compressed", "perplexity_uncompressed", "wire_bytes"} <= set(rows[0])
    assert rows[0]["perplexity_compressed"] > rows[1]["perplexity_compressed"]
    printed = capsys.readouterr().out
    for words in ("perplexity on", "perplexity off", "MB a step", "random weights", "tie"):
        assert words in printed
    assert "act topk:0.2 / grad quant:8, tie ef+topk:0.1" in printed
    assert (out / "uncompressed" / "model" / "config.json").exists()


def test_saved_model_is_a_plain_one(tmp_path, command, text):
    """It has the trained weights, also after another run has begun with it."""
    out, tuned = tmp_path / "run", tmp_path / "tuned"
    wikitext.main(command("--out", out))
    weights = load_file(out / "checkpoint" / "weights.safetensors")
    assert logits_of(out / "model").shape[-1] == 320  # 270 tokens, rounded up
    saved = load_file(out / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    options = {"model": str(out / "model"), "data": str(text), "seq_len": 16, "split": "2"}
    config = TextConfig.for_model(**options, batch_size=4, chunks=2, precision="fp32", eval_limit=5)
    before = TextTrainer(config, load_data(config)).evaluate()[1]
    last = json.loads((out / "summary.json").read_text())
    assert before == pytest.approx(last["perplexity_uncompressed"], rel=1e-6)
    own = ["--model", out / "model", "--epochs", "1", "--split", "auto", "--out", tuned]
    wikitext.main(command(*own))
    assert json.loads((tuned / "config.json").read_text())["split"] == "auto"


@pytest.mark.slow  # every day that of images, in test_cifar10.py
@pytest.mark.parametrize(
    "methods",
    [
        ["--act", "ef21+topk:0.1", "--grad", "ef+randomk:0.2", "--lr-warmup-steps", "3"],
        ["--act", "aqsgd+quant:4", "--accumulate", "3", "--recompute", "--tie", "ef+topk:0.1"],
        ["--precision", "fp16", "--weight-decay", "0.1", "--train-limit", "6"],
        ["--model", "lstm", "--hidden", "24", "--act", "ef21+topk:0.1", "--clip", "0.25"],
    ],
    ids=["feedback", "aqsgd", "fp16", "lstm"],
)
def test_resumed_run_is_the_uninterrupted_run(tmp_path, command, methods):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    wikitext.main(command(*methods, "--out", whole))
    wikitext.main(command(*methods, "--out", parts, "--stop-after", "1"))
    assert not (parts / "model").exists()
    wikitext.main(["--resume", str(parts)])
    assert rows_without_time(whole) == rows_without_time(parts)
    name = "checkpoint/weights.safetensors"
    expected, resumed = load_file(whole / name), load_file(parts / name)
    assert expected.keys() == resumed.keys()
    assert all(expected[key].equal(resumed[key]) for key in expected)


@pytest.mark.slow
def test_a_run_stopped_within_an_epoch_is_the_uninterrupted_run(tmp_path, command):
    """With what is remembered of each sample, and several batches to a step."""
    options = command("--accumulate", 2, "--act", "aqsgd+quant:4", "--grad", "ef+topk:0.2")
    wikitext.main([*options, "--out", str(tmp_path / "straight")])
    stopped = [*options, "--out", str(tmp_path / "stopped")]
    made = stopped_in_step(wikitext.main, stopped, TextTrainer, lambda epoch: epoch + 2)
    assert made > 4
    wikitext.main(["--resume", str(tmp_path / "stopped")])
    assert rows_without_time(tmp_path / "stopped") == rows_without_time(tmp_path / "straight")
    name = "checkpoint/weights.safetensors"
    ours, theirs = (load_file(tmp_path / run / name) for run in ("stopped", "straight"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_memory_of_aqsgd_is_said_before(tmp_path, command, capsys):
    wikitext.main(command("--act", "aqsgd+quant:4", "--epochs", "1", "--out", tmp_path / "run"))
    line = next(one for one in capsys.readouterr().out.splitlines() if "AQ-SGD will keep" in one)
    num_blocks = len(load_data(TextConfig(**_read(tmp_path / "run"))).train)
    both_ends = 2 * 2 * num_blocks * 16 * 128 * 4  # of two cuts, the second before the head
    assert float(line.split("up to ")[1].split(" MB")[0]) == pytest.approx(both_ends / 1e6, abs=0.1)


def _read(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def test_accumulated_batches_are_one_large_batch(command, text):
    """Gradients, and so weights, of two batches of 4 are those of one of 8."""
    base = {"model": "tiny", "data": str(text), "vocab_size": 270, "seq_len": 16, "split": "2"}
    base |= {"act": ("none",), "grad": ("none",), "chunks": 2, "precision": "fp32"}
    ends = []
    for chosen in ({"batch_size": 4, "accumulate": 2}, {"batch_size": 8}):
        config = TextConfig.for_model(**base, **chosen)
        trainer = TextTrainer(config, load_data(config))
        trainer.optimizer = torch.optim.SGD(trainer.pipe.parameters(), lr=0.1)
        trainer.pipe.train()
        blocks = [trainer.train_loader.blocks.take(torch.arange(i, i + 4)) for i in (0, 4)]
        if "accumulate" not in chosen:
            blocks = [{name: torch.cat([one[name] for one in blocks]) for name in blocks[0]}]
        trainer._iteration([(one, torch.arange(len(one["labels"])), None) for one in blocks])
        ends.append({name: one.detach().clone() for name, one in trainer.pipe.named_parameters()})
    small, large = ends
    for name in small:
        torch.testing.assert_close(small[name], large[name], rtol=1e-5, atol=1e-6)


def test_learning_rate_rises_and_falls_to_zero(command, text):
    chosen = {"vocab_size": 270, "seq_len": 16, "split": "2", "batch_size": 4, "epochs": 1}
    config = TextConfig.for_model("tiny", data=str(text), lr_warmup_steps=2, lr=1.0, **chosen)
    trainer = TextTrainer(config, load_data(config))
    total = trainer.steps_per_epoch
    rates = [trainer._rate(step) for step in range(total + 1)]
    assert rates[:3] == [1 / 3, 2 / 3, 1.0] and rates[-1] == 0.0
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-2] == pytest.approx(1 / (total - 2))


LSTM = ["--model", "lstm", "--hidden", "24", "--split", "auto"]


def test_lstm_has_a_stage_for_each_layer_and_one_for_the_head(tmp_path, command, capsys):
    """And it is saved with its sizes and a tokenizer that other runs can take."""
    out = tmp_path / "run"
    wikitext.main(command(*LSTM, "--compare", "--lr", "0.01", "--epochs", "3", "--out", out))
    printed = capsys.readouterr().out
    assert "3 stages" in printed and "lstm with random weights: " in printed
    assert "layer1" in printed and "layer2" in printed
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["act"], summary["grad"]) == ("quant:4", "quant:8")
    assert 1 < summary["perplexity_compressed"] < 100  # of 270 tokens
    assert summary["perplexity_compressed"] != summary["perplexity_uncompressed"]
    assert 0.1 < summary["wire_ratio"] < 0.5  # compressed indeed
    assert summary["uncompressed_run"]["wire_ratio"] == pytest.approx(1.0, abs=0.02)
    saved = json.loads((out / "model" / "config.json").read_text())
    assert saved["model_type"] == "lstm" and saved["hidden_size"] == 24
    assert saved["vocab_size"] == 320  # 270 tokens, rounded up
    model = stages.lstm_lm(320, hidden=24, dropout=saved["dropout"])
    model.load_state_dict(load_file(out / "model" / "model.safetensors"))
    assert len(tokenizer_of(str(out / "model"), [], vocab_size=0)) == 270


def test_lstm_gives_the_perplexity_of_the_plain_model(tmp_path, command, text):
    """Also where the last block of the text is padded."""
    out = tmp_path / "run"
    everything = text.read_text()
    text.write_text(everything + "the")  # no whole number of blocks
    wikitext.main(command(*LSTM, "--epochs", "1", "--eval-limit", "1000", "--out", out))
    config = TextConfig(**{**_read(out), "act": ("quant:4",), "grad": ("quant:8",)})
    held_out = load_data(config).held_out
    assert (held_out.labels == -100).any() and held_out.attention_mask is None
    model = stages.lstm_lm(320, hidden=24).eval()
    model.load_state_dict(load_file(out / "model" / "model.safetensors"))
    with torch.no_grad():
        loss = mpcomp.CausalLMLoss()(model(held_out.input_ids), held_out.labels)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["perplexity_uncompressed"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_lstm_and_its_width_belong_together(tmp_path, command):
    out = tmp_path / "run"
    assert "hidden is 24, but the model tiny" in error_of(command("--hidden", 24, "--out", out))
    assert "lora is 2, but adapters" in error_of(command(*LSTM, "--lora", 2, "--out", out))
    assert "hidden is 0" in error_of(command(*LSTM, "--hidden", 0, "--out", out))
    assert not out.exists()
    lstm = TextConfig.for_model("lstm")
    assert (lstm.seq_len, lstm.batch_size, lstm.tokenizer, lstm.hidden) == (35, 20, "bpe", None)
    assert TextConfig.from_json(lstm.to_json()) == lstm


@pytest.mark.slow
def test_adapters_alone_are_trained(tmp_path, command):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base, out = tmp_path / "base", tmp_path / "run"
    wikitext.main(command("--epochs", "1", "--out", base))
    own = ["--model", base / "model", "--lora", "2", "--lr", "0.01", "--out", out]
    wikitext.main(command(*own))
    assert not (out / "model" / "model.safetensors").exists()
    adapters = load_file(out / "model" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    loaded = peft.PeftModel.from_pretrained(model, out / "model").eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        tuned = loaded(ids).logits
        with loaded.disable_adapter():
            assert not torch.equal(tuned, loaded(ids).logits)


def test_adapters_need_peft(command, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install peft" in error_of(command("--lora", 4, "--out", tmp_path / "run"))


def test_mistakes_end_with_one_line_and_leave_nothing(tmp_path, command):
    out = tmp_path / "run"
    (tmp_path / "empty.txt").write_text("")
    mistakes = {
        "seq_len is 200, but the model tiny has 128 positions": ["--seq-len", 200],
        "seq_len is 1;": ["--seq-len", 1],
        "chunks is 5": ["--chunks", 5],
        "no file or folder ./nowhere": ["--data", "./nowhere"],
        "at least 2 are needed": ["--data", tmp_path / "empty.txt"],
        "there is no folder ./nobody": ["--model", "./nobody"],
        f"cannot load the model {tmp_path}": ["--model", tmp_path],
        "there is no folder ./words": ["--tokenizer", "./words"],
        "part is 'half'": ["--part", "half"],
        "part is 3 of 2": ["--part", "3/2"],
        "blocks of training text; pass a smaller --batch-size": ["--batch-size", 500],
        "more stages (5) than blocks (4)": ["--split", 5],
        "topk": ["--act", "topc:0.1"],
        "unknown method 'foo'": ["--tie", "foo"],
        "eval_limit is 0": ["--eval-limit", 0],
        "with itself": ["--act", "none", "--grad", "none", "--compare"],
    }
    for message, options in mistakes.items():
        assert message in error_of(command(*options, "--out", out))
        assert not out.exists(), message


@pytest.mark.slow
def test_tokens_beyond_the_vocabulary(tmp_path, command):
    base = tmp_path / "base"
    wikitext.main(command("--epochs", "1", "--vocab-size", "260", "--out", base))
    other = ["--model", base / "model", "--tokenizer", "bpe", "--vocab-size", "400"]
    more = ["--data", "python-docs", "--train-limit", "3"]
    message = error_of(command(*other, *more, "--out", tmp_path / "run"))
    assert "the tokenizer has 400 tokens, the model embeddings for 320" in message


def test_sizes_have_their_own_defaults():
    pretrained, tiny, new = (TextConfig.for_model(m) for m in ("a/b", "tiny", "gpt2"))
    assert (pretrained.epochs, pretrained.batch_size, pretrained.seq_len) == (4, 8, 1024)
    assert (pretrained.lr, pretrained.weight_decay, pretrained.seed) == (5e-5, 0.0, 555)
    assert (tiny.lr, tiny.seq_len, tiny.tokenizer, new.lr, new.seq_len) == (
        *(1e-3, 128, "bpe", 6e-4, 1024),
    )
    assert TextConfig.for_model("tiny", lr=0.5).lr == 0.5
    assert (tiny.act, tiny.grad, tiny.tie) == (("quant:4",), ("quant:8",), None)
    assert TextConfig.for_model("tiny", act=("none",), grad=("none",)).label == "uncompressed"


def test_uncompressed_has_no_compressed_tie():
    config = TextConfig(tie="quant:8", act=("quant:4",))
    assert config.uncompressed() == TextConfig(act=("none",), grad=("none",))
    assert config.label == "act quant:4 / grad topk:0.1, tie quant:8"
    assert TextConfig.from_json(config.to_json()) == config


def test_perplexity_that_overflows(monkeypatch, text):
    chosen = {"vocab_size": 270, "seq_len": 16, "split": "2", "batch_size": 4}
    config = TextConfig.for_model("tiny", data=str(text), **chosen)
    trainer = TextTrainer(config, load_data(config))
    monkeypatch.setattr(type(trainer.pipe), "evaluate", lambda self, loader: 1e4)
    assert trainer.judge() == math.inf
