"""Bytes of transformers' own pipeline: rows against what is known of them, and what is refused."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers
from lms import language_model
from ranks import preload

from mpcomp import CausalLMLoss
from recipes.lab import hf_pipeline
from recipes.lab.hf_pipeline import SETTINGS
from recipes.run_folder import read_json_lines
from recipes.text import load_text
from recipes.tokens import blocks_of, tokenizer_of

preload("recipes.lab.hf_pipeline", "transformers.models.llama.modeling_llama", "lms")
COMMITTED = Path(__file__).parents[3] / "docs" / "results" / "hf_pipeline.jsonl"
HIDDEN, BLOCKS, SEQ_LEN, NEW = 32, 3, 8, 2
needs_pipeline = pytest.mark.skipif(
    importlib.util.find_spec("transformers.distributed.pipeline_parallel") is None,
    reason=f"transformers {transformers.__version__} has no pipeline: it came with 5.23",
)


def test_committed_rows_are_of_one_run():
    rows = read_json_lines(COMMITTED)
    assert [(row["act_comp"], row["top_logits"]) for row in rows] == list(SETTINGS)
    assert len({json.dumps(row["settings"]) for row in rows}) == 1
    assert rows[0]["same_first_choice"] == 1


@pytest.mark.parametrize(
    "options, message", [((), "--model is missing"), (("--model", "some"), "with torchrun")]
)
def test_what_cannot_be_measured_is_refused(tmp_path, options, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        hf_pipeline.main(["--out", str(tmp_path / "rows.jsonl"), *options])


@needs_pipeline
@pytest.mark.slow
def test_rows_have_the_bytes_that_are_known(ranks, tmp_path, sentences):
    text = sentences(60)
    tokenizer = tokenizer_of(None, [Path(text).read_text()], vocab_size=300)
    plain = language_model("llama", vocab_size=len(tokenizer)).eval()
    for each in (plain, tokenizer):
        each.save_pretrained(tmp_path)
    out = tmp_path / "rows.jsonl"
    sizes = {"--blocks": BLOCKS, "--seq-len": SEQ_LEN, "--new-tokens": NEW}
    options = {"--model": tmp_path, "--data": text, "--out": out, **sizes}
    ranks(hf_pipeline.main, 2, [str(one) for pair in options.items() for one in pair])
    none, bf16, auto, top = rows = read_json_lines(out)
    assert [(row["act_comp"], row["top_logits"]) for row in rows] == list(SETTINGS)
    for row, size in ((none, 4), (bf16, 2)):
        for what, num_tokens in (("prompt", BLOCKS * SEQ_LEN), ("new", BLOCKS)):
            header = row[f"hidden_bytes_a_{what}_token"] - size * HIDDEN
            assert 0 <= header < 32 / num_tokens
    assert auto["hidden_bytes_a_prompt_token"] < bf16["hidden_bytes_a_prompt_token"]
    # Beside logits the last rank sends their shape: three numbers.
    shape = 3 * 8 / BLOCKS
    assert none["logits_bytes_a_new_token"] == 4 * len(tokenizer) + shape
    assert top["logits_bytes_a_new_token"] == 8 * 64 + shape
    ids = blocks_of(
        load_text(text).test, tokenizer, SEQ_LEN, keep_tail=False, limit=BLOCKS
    ).input_ids
    with torch.no_grad():
        perplexity = CausalLMLoss()(plain(ids).logits, ids).exp().item()
    assert none["perplexity"] == pytest.approx(perplexity)
    assert (none["same_first_choice"], top["perplexity"]) == (1, None)
