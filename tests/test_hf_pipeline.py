"""The pipeline that transformers makes of a model, compressed: tokens, logits and bytes."""

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lms import language_model, text, without_labels
from ranks import preload
from torch import nn

import mpcomp
from mpcomp.hf import compress_pipeline

preload("mpcomp.hf.pipeline", "transformers.models.llama.modeling_llama", "lms")
HAS_PIPELINE = importlib.util.find_spec("transformers.distributed.pipeline_parallel") is not None
needs_pipeline = pytest.mark.skipif(
    not HAS_PIPELINE,
    reason=f"transformers {transformers.__version__} has no pipeline: it came with 5.23",
)

# All of one length: of padded ones transformers' own pipeline generates others with a cache.
PROMPTS = without_labels(text(3))
NEW = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
SETTINGS: list[dict[str, Any] | None] = [
    None,
    {"act_comp": "none"},
    {"act_comp": "none", "top_logits": 3},
    {"act_comp": "quant:4"},
    {"act_comp": "auto"},
]


def outputs(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all positions, and prompts with what is generated."""
    with torch.no_grad():
        return model(**PROMPTS).logits, model.generate(**PROMPTS, **NEW)


def piped(folder: str) -> list[Any]:
    """On a rank, of each setting: outputs, bytes of its cut and uncompressed, blocks before cuts.

    Without a setting the pipeline is transformers' own.
    """
    ended = []
    for given in SETTINGS:
        config = transformers.distributed.DistributedConfig(pp_size=dist.get_world_size())
        auto = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(folder, distributed_config=config).eval()
        stage = None if given is None else compress_pipeline(model, **given)
        found = outputs(model)
        links = stage.links[stage.pp_rank : stage.pp_rank + 1] if stage else ()
        sent = [(link.meter.eval.wire_bytes, link.meter.eval.dense_bytes) for link in links]
        ends = [model._pp_stage.layer_range_for_rank(r, 4)[1] for r in range(dist.get_world_size())]
        ended.append((*found, sent, ends[:-1]))
    return ended


def coded(model: Any, ends: list[int], method: str) -> nn.Module:
    """The plain model whose hidden states go through a compressor at the cuts."""
    compressor: Any = mpcomp.parse(method)

    def arrived(_: Any, __: Any, x: torch.Tensor) -> torch.Tensor:
        return compressor.decompress(compressor.compress(x), mpcomp.TensorMeta.of(x))

    for end in ends:
        model.model.layers[end - 1].register_forward_hook(arrived)
    return model


@needs_pipeline
@pytest.mark.slow
@pytest.mark.parametrize(
    "family, size", [("llama", 2), ("llama", 3), ("qwen2", 2), ("qwen3", 2), ("olmo2", 2)]
)
def test_tokens_and_logits_are_the_plain_models_through_compressors(ranks, tmp_path, family, size):
    plain = language_model(family, tie_word_embeddings=family == "qwen2").eval()
    plain.save_pretrained(tmp_path)
    logits, tokens = outputs(plain)
    kept = torch.zeros_like(logits).scatter(-1, logits.topk(3).indices, 1) > 0
    by_rank = ranks(piped, size, str(tmp_path))
    _, _, _, (*_, ends), (_, continued, *_) = by_rank[0]
    through = outputs(coded(plain, ends, "quant:4"))
    for theirs, none, top, quantized, auto in by_rank:
        assert torch.equal(theirs[0], none[0]), "the bits of transformers' own"
        torch.testing.assert_close(none[0], logits)
        torch.testing.assert_close(top[0], logits.masked_fill(~kept, -torch.inf))
        for each in (theirs, none, top):
            assert torch.equal(each[1], tokens)
        torch.testing.assert_close(quantized[:2], through)
        assert torch.equal(auto[1], continued), "all ranks go on with the same tokens"
        for wire, dense in quantized[2] + auto[2]:
            assert 0 < wire < dense / 2
    assert all(len(run[4][2]) == 1 for run in by_rank[:-1])


class PlainStage:
    """The part that `compress_pipeline` reads of a stage of transformers'."""

    communicate, comm_on_cpu, pp_group = None, True, None

    @property
    def pp_size(self) -> int:
        return dist.get_world_size()


def differing() -> None:
    """On a rank: a number of logits of its own."""
    model = language_model("llama")
    model._pp_stage = PlainStage()
    compress_pipeline(model, top_logits=5 + dist.get_rank())


@pytest.mark.slow
def test_ranks_with_other_settings_all_raise(ranks):
    for kind, message in ranks(differing, 2, may_fail=True):
        assert kind == "ValueError" and "different settings" in message


@pytest.mark.parametrize(
    "stage, given, says",
    [
        (None, {}, "expected a model not yet compressed"),
        (PlainStage(), {"top_logits": 0}, "expected 1 to 53"),
        (PlainStage(), {"top_logits": 54}, "expected 1 to 53"),
    ],
)
def test_what_cannot_be_compressed_is_refused(stage, given, says):
    model = language_model("llama")
    model._pp_stage = stage
    with pytest.raises((TypeError, ValueError), match=says):
        compress_pipeline(model, **given)
