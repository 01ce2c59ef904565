"""Generation through the stages: the tokens of transformers' own, and nothing else is touched."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import lms
from lms import evaluation, gpt2, language_model, text, without_labels

import mpcomp

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*would not shrink"),
    pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning"),
]

NEW = 9
LONG: dict[str, Any] = {"max_position_embeddings": 32, "initializer_range": 0.4}


def model_of(family: str = "gpt2", **settings: Any) -> Any:
    """A model whose tokens do not repeat soon."""
    return language_model(family, **{**LONG, **settings})


def prompt_of(rows: int = 3, seed: int = 1, *, padded: bool = False) -> dict[str, Tensor]:
    return without_labels(text(rows, seed, side="left" if padded else None))


def theirs(model: Any, prompt: Mapping[str, Tensor], **options: Any) -> Tensor:
    """What transformers generates, greedy."""
    given = {"attention_mask": torch.ones_like(prompt["input_ids"]), **prompt}
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    if options.get("eos_token_id") == []:
        options["eos_token_id"] = -1  # an empty list is an IndexError there
    with evaluation(model):
        tokens: Tensor = model.generate(**given, **options)
    return tokens


def ours(pipe: mpcomp.Pipeline, prompt: Mapping[str, Tensor], **options: Any) -> Tensor:
    return pipe.generate(**prompt, **{"max_new_tokens": NEW, **options})


def new_tokens(tokens: Tensor, prompt: Mapping[str, Tensor]) -> Tensor:
    return tokens[:, prompt["input_ids"].shape[1] :]


# -- greedy: transformers' tokens ----------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2", "qwen3", "smollm3"])
def test_greedy_is_transformers_generate(family, num_stages):
    """The window of Mistral and Gemma 2 is 4 tokens; rows are padded by 0 to 7 tokens."""
    model = model_of(family)
    pipe = mpcomp.pipeline(model, 2, split=num_stages)
    for padded in (False, True):
        prompt = prompt_of(padded=padded)
        found = ours(pipe, prompt)
        assert torch.equal(found, theirs(model, prompt))
        assert len(new_tokens(found, prompt).unique()) > 2


@pytest.mark.parametrize(
    "family",
    [
        name
        for name in lms._OWN
        if name not in ("gpt2", "llama", "mistral", "gemma2", "qwen3", "opt", "mamba2", "rwkv")
    ],
)
def test_greedy_of_other_families(family):
    """Also of those that only a check of their logits lets through."""
    model = model_of(family)
    prompt = prompt_of(padded=True)
    assert torch.equal(ours(mpcomp.pipeline(model, 1, split=3), prompt), theirs(model, prompt))


def test_a_cache_goes_by_the_name_that_the_forward_has(monkeypatch):
    """Forwards took ``past_key_values``, and take ``cache`` from transformers 5.24 on."""
    model, prompt = model_of(), prompt_of()
    expected = theirs(model, prompt)
    pipe = mpcomp.pipeline(model, 2, split=2)
    kind, forward = type(model), type(model).forward
    name = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

    def older(self, *, past_key_values=None, use_cache, **given):
        assert use_cache == (past_key_values is not None)
        return forward(self, **{name: past_key_values}, use_cache=use_cache, **given)

    def newer(self, *, cache=None, use_cache, **given):
        assert use_cache == (cache is not None)
        return forward(self, **{name: cache}, use_cache=use_cache, **given)

    for renamed in (older, newer):
        monkeypatch.setattr(kind, "forward", renamed)
        assert torch.equal(ours(pipe, prompt), expected)


def test_a_prompt_of_one_token_and_one_new_token():
    model = model_of("llama")
    pipe = mpcomp.pipeline(model, 1, split=2)
    prompt = {"input_ids": torch.tensor([[5]])}
    assert torch.equal(ours(pipe, prompt), theirs(model, prompt))
    assert torch.equal(
        ours(pipe, prompt, max_new_tokens=1), theirs(model, prompt, max_new_tokens=1)
    )


def test_up_to_the_last_position():
    model = model_of(max_position_embeddings=12)
    prompt = prompt_of()  # 9 tokens
    found = ours(mpcomp.pipeline(model, 1, split=2), prompt, max_new_tokens=4)
    assert found.shape == (3, 13)  # the last is not fed again
    assert torch.equal(found, theirs(model, prompt, max_new_tokens=4))


def test_int32_prompts_and_bool_masks():
    model = model_of("qwen3")
    prompt = prompt_of(padded=True)
    pipe = mpcomp.pipeline(model, 1, split=2)
    other = {
        "input_ids": prompt["input_ids"].int(),
        "attention_mask": prompt["attention_mask"].bool(),
    }
    options = {"repetition_penalty": 1.4}
    assert torch.equal(ours(pipe, other, **options), theirs(model, prompt, **options))


def test_ends_of_rows():
    """Several ends; a row that has ended is padded, and all stop when the last has."""
    model = model_of("llama")
    prompt = prompt_of(padded=True)
    pipe = mpcomp.pipeline(model, 1, split=3)
    told = new_tokens(theirs(model, prompt, eos_token_id=[]), prompt)
    first, second, third = int(told[0, 1]), int(told[1, 3]), int(told[2, 5])
    for ends in ([first], [second, first], [first, second, third]):
        for pad in (0, 7):
            options = {"eos_token_id": ends, "pad_token_id": pad}
            found = ours(pipe, prompt, **options)
            assert torch.equal(found, theirs(model, prompt, **options)), ends
            assert (new_tokens(found, prompt)[0, 2:] == pad).all()
    assert found.shape[1] < prompt["input_ids"].shape[1] + NEW
    # As numbers of the model's own configuration.
    model.generation_config.eos_token_id = first
    assert torch.equal(ours(pipe, prompt), theirs(model, prompt))
    assert torch.equal(ours(pipe, prompt), theirs(model, prompt, eos_token_id=first))
    model.generation_config.eos_token_id = [second, third]
    model.generation_config.pad_token_id = None
    model.config.pad_token_id = None
    assert torch.equal(ours(pipe, prompt), theirs(model, prompt))
    assert torch.equal(ours(pipe, prompt, eos_token_id=[]), theirs(model, prompt, eos_token_id=[]))


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty(penalty):
    model = model_of("qwen2")
    prompt = prompt_of(padded=True)
    pipe = mpcomp.pipeline(model, 1, split=2)
    found = ours(pipe, prompt, repetition_penalty=penalty)
    assert torch.equal(found, theirs(model, prompt, repetition_penalty=penalty))
    assert not torch.equal(found, ours(pipe, prompt)) or penalty < 1


def test_logits_processors():
    """They see all tokens so far, after the penalty and before the temperature."""
    model = model_of("llama")
    prompt = prompt_of()
    pipe = mpcomp.pipeline(model, 1, split=2)
    lengths = []

    def only_low(ids: Tensor, scores: Tensor) -> Tensor:
        lengths.append(ids.shape[1])
        return scores.masked_fill(torch.arange(scores.shape[1]) >= 10, -torch.inf)

    found = ours(pipe, prompt, logits_processor=[only_low], eos_token_id=[])
    assert (new_tokens(found, prompt) < 10).all()
    assert lengths == list(range(9, 9 + NEW))
    expected = theirs(model, prompt, logits_processor=[only_low], eos_token_id=[])
    assert torch.equal(found, expected)

    seen = []
    ours(
        pipe,
        prompt,
        logits_processor=[lambda ids, scores: seen.append(scores) or scores],
        do_sample=True,
        temperature=2.0,
        top_k=1,
        max_new_tokens=1,
    )
    assert seen[0].isfinite().all()  # top-k comes later
    torch.testing.assert_close(seen[0], lms.logits_of(model, prompt)[:, -1])


def test_peft_and_bf16():
    model = model_of("llama").to(torch.bfloat16)
    prompt = prompt_of(padded=True)
    pipe = mpcomp.pipeline(model, 1, split=3)
    assert torch.equal(ours(pipe, prompt), theirs(model, prompt))
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model_of(),
        peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True),
    )
    expected = theirs(adapted, prompt)
    assert torch.equal(ours(mpcomp.pipeline(adapted, 1, split=2), prompt), expected)


# -- sampling ------------------------------------------------------------------------------------


def test_sampling_by_seed(global_rng_untouched):
    model = model_of("llama", initializer_range=0.1)
    prompt = prompt_of()
    pipe = mpcomp.pipeline(model, 1, split=2)
    with global_rng_untouched():
        drawn = [ours(pipe, prompt, do_sample=True, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    other = mpcomp.pipeline(copy.deepcopy(model), 2, split=4)
    assert torch.equal(ours(other, prompt, do_sample=True, seed=3), drawn[0])
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        assert torch.equal(ours(pipe, prompt, do_sample=True, **narrow), ours(pipe, prompt))


@pytest.mark.parametrize("temperature", [0.5, 1, 3.0])
def test_frequencies_are_the_softmax(temperature):
    model = model_of("llama", initializer_range=0.1)
    pipe = mpcomp.pipeline(model, 1, split=2)
    prompt = {"input_ids": torch.tensor([[4, 9, 30]]).repeat(4000, 1)}
    options = {"do_sample": True, "max_new_tokens": 1, "temperature": temperature}
    logits = lms.logits_of(model, {"input_ids": prompt["input_ids"][:1]})[0, -1]
    expected = (logits / temperature).softmax(-1)
    found = new_tokens(ours(pipe, prompt, **options), prompt)[:, 0]
    share = found.bincount(minlength=lms.VOCABULARY) / 4000
    assert (share - expected).abs().max() < 4 * 0.5 / 4000**0.5  # four standard deviations
    assert (share - expected).abs().sum() < 0.12
    kept = expected.topk(5)
    few = new_tokens(ours(pipe, prompt, top_k=5, **options), prompt)[:, 0]
    share = few.bincount(minlength=lms.VOCABULARY)[kept.indices] / 4000
    assert (share - kept.values / kept.values.sum()).abs().max() < 0.04
    falling = expected.sort(descending=True)
    inside = falling.indices[(falling.values.cumsum(0) - falling.values) < 0.6]
    nucleus = new_tokens(ours(pipe, prompt, top_p=0.6, **options), prompt)[:, 0]
    assert set(nucleus.tolist()) <= set(inside.tolist())
    assert len(set(nucleus.tolist())) > 1


# -- streamers -----------------------------------------------------------------------------------


class _Heard:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.said.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.said.append("end")


def test_streamers_hear_what_they_do_in_transformers():
    model = model_of()
    prompt = prompt_of(1)
    pipe = mpcomp.pipeline(model, 1, split=2)
    told = new_tokens(theirs(model, prompt, eos_token_id=[]), prompt)
    for ends in ([], [int(told[0, 4])]):
        mine, other = _Heard(), _Heard()
        ours(pipe, prompt, streamer=mine, eos_token_id=ends)
        theirs(model, prompt, streamer=other, eos_token_id=ends)
        assert mine.said == other.said
        assert mine.said[0] == ((1, 9), prompt["input_ids"].tolist())
        assert mine.said[-1] == "end"


# -- messages ------------------------------------------------------------------------------------


def test_a_message_a_token_and_cut():
    model = model_of("llama")
    prompt = prompt_of(padded=True)
    pipe = mpcomp.pipeline(model, 2, split=3, act_comp="topk:0.2", grad_comp="topk:0.2")
    compressed = ours(pipe, prompt, eos_token_id=[])
    with pipe.uncompressed():
        dense = ours(pipe, prompt, eos_token_id=[])
    assert torch.equal(dense, theirs(model, prompt, eos_token_id=[]))
    assert not torch.equal(compressed, dense)
    for boundary in pipe.boundaries:
        on, off = boundary.act.meter.eval, boundary.act.meter.eval_off
        assert on.messages == off.messages == NEW
        assert on.dense_bytes == off.dense_bytes == 4 * 3 * 32 * (9 + NEW - 1)
        assert on.wire_bytes < off.wire_bytes
        assert off.wire_bytes < off.dense_bytes + NEW * 100
        assert boundary.act.meter.train.messages == 0
        assert boundary.grad.meter.eval.messages == boundary.grad.meter.eval_off.messages == 0
    assert pipe.wire_bytes == 0


@pytest.mark.parametrize("method", ["fp16", "bf16", "quant:4", "ef21+topk:0.3", "randomk:0.5"])
def test_compressed_is_the_same_every_time(method):
    pipe = mpcomp.pipeline(model_of("qwen3"), 1, split=3, act_comp=method, grad_comp="none")
    prompt = prompt_of(padded=True)
    assert torch.equal(ours(pipe, prompt), ours(pipe, prompt))


# -- nothing else changes ------------------------------------------------------------------------


def _trained(generates: bool) -> list[Any]:
    torch.manual_seed(5)
    model = model_of("gpt2", resid_pdrop=0.2, attn_pdrop=0.2, embd_pdrop=0.2, initializer_range=0.1)
    pipe = mpcomp.pipeline(
        model, 2, split=3, act_comp="ef21+topk:0.3", grad_comp="ef+quant:4", seed=3
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for i in range(3):
        optimizer.zero_grad()
        losses.append(pipe.forward_backward(text(4, i, side="right")))
        if generates:  # with gradients in .grad, between a step's halves
            ours(pipe, prompt_of(padded=True))
            ours(pipe, prompt_of(2), do_sample=True)
        optimizer.step()
    judged = pipe.evaluate([text(4, 7)])
    bytes_sent = [pipe.wire_bytes, *(link.meter.train.messages for link in pipe.links)]
    return [losses, judged, bytes_sent, [p.detach() for p in pipe.parameters()]]


def test_training_does_not_notice(global_rng_untouched):
    expected = _trained(False)
    found = _trained(True)
    assert found[:3] == expected[:3]
    assert all(torch.equal(a, b) for a, b in zip(found[3], expected[3], strict=True))


def test_dropout_is_off_and_modes_come_back(global_rng_untouched):
    model = model_of(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    pipe = mpcomp.pipeline(model, 1, split=2)
    model.transformer.h[1].eval()  # one that the caller has frozen
    modes = [module.training for module in pipe.modules()]
    prompt = prompt_of()
    with global_rng_untouched():
        found = ours(pipe, prompt)
    assert [module.training for module in pipe.modules()] == modes
    assert True in modes and False in modes
    assert all(p.grad is None for p in pipe.parameters())
    assert torch.equal(found, theirs(model, prompt))
    assert not found.requires_grad


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"attention_mask": [[1, 1, 0]]}, {}, "pad on the left"),
        ({"attention_mask": [[0, 0, 0]]}, {}, "pad on the left"),
        ({"attention_mask": [[1, 1]]}, {}, "attention_mask is"),
        ({"attention_mask": [[[[1, 1, 1]]]]}, {}, "expected that of input_ids"),
        ({"input_ids": [3, 4]}, {}, "whole numbers"),
        ({"input_ids": [[3.0, 4.0]]}, {}, "whole numbers"),
        ({"input_ids": [[3, 99]]}, {}, "vocabulary"),
        ({"input_ids": [[]]}, {}, r"a token"),
        ({}, {"max_new_tokens": 0}, "max_new_tokens=0: expected 1 or more"),
        (
            {},
            {"max_new_tokens": 31},
            "3 tokens and max_new_tokens=31 need more than the model's 32",
        ),
        ({}, {"temperature": 0.0, "do_sample": True}, "do_sample=False is greedy"),
        ({}, {"temperature": -1.0, "do_sample": True}, "do_sample=False is greedy"),
        ({}, {"temperature": float("nan"), "do_sample": True}, "do_sample=False is greedy"),
        ({}, {"top_p": 0.0, "do_sample": True}, "top_p=0.0"),
        ({}, {"top_p": 1.5, "do_sample": True}, "top_p=1.5"),
        ({}, {"top_k": -2, "do_sample": True}, "top_k"),
        ({}, {"repetition_penalty": -1.0}, "penalty"),
        ({}, {"pad_token_id": 53, "eos_token_id": 4}, "pad_token_id=53"),
        ({}, {"pad_token_id": -1, "eos_token_id": 4}, "pad_token_id=-1"),
    ],
)
def test_refused(given, options, message):
    pipe = mpcomp.pipeline(model_of(), 1, split=2)
    prompt = {
        name: torch.tensor(value) for name, value in {"input_ids": [[3, 4, 5]], **given}.items()
    }
    if given.get("input_ids") == [[]]:
        prompt["input_ids"] = torch.empty(1, 0, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        ours(pipe, prompt, **options)
    assert all(link.meter.eval.messages == 0 for link in pipe.links)
    assert pipe.training


def test_refused_without_rows_or_a_language_model():
    pipe = mpcomp.pipeline(model_of(), 1, split=2)
    with pytest.raises(ValueError, match="a token at least"):
        pipe.generate(torch.empty(0, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="num_beams"):
        pipe.generate(torch.tensor([[3]]), num_beams=2)
    chain = mpcomp.pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 1, split=[1, 1])
    with pytest.raises(ValueError, match="Sequential is no causal language model"):
        chain.generate(torch.tensor([[1]]))


@pytest.mark.parametrize("act_comp", ["none", "topk:0.3", "quant:4"])
@pytest.mark.parametrize("block, said", [("h.0", "boundary 0 act"), ("ln_f", "logits")])
def test_nan_weights(block, said, act_comp):
    """Said as an error, and the pipeline goes on once they are gone."""
    model = model_of()
    pipe = mpcomp.pipeline(model, 1, split=2, act_comp=act_comp, grad_comp="none")
    prompt = prompt_of()
    expected = ours(pipe, prompt)
    before = copy.deepcopy(pipe.state_dict())
    with torch.no_grad():
        list(model.transformer.get_submodule(block).parameters())[-1][3] = torch.nan
    with pytest.raises(FloatingPointError, match=said):
        ours(pipe, prompt)
    assert pipe.training
    pipe.load_state_dict(before)
    assert torch.equal(ours(pipe, prompt), expected)
    assert pipe.evaluate([text(3, 1)]) > 0
    assert pipe.forward_backward(text(3, 1)).isfinite()


def test_an_error_in_a_processor_leaves_the_pipeline_usable():
    pipe = mpcomp.pipeline(gpt2(), 1, split=2)
    prompt = prompt_of(2)

    def broken(ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ours(pipe, prompt, max_new_tokens=2, logits_processor=[broken])
    assert pipe.training
    assert ours(pipe, prompt, max_new_tokens=2).shape == (2, 11)


def test_save_pretrained(tmp_path):
    model = model_of("llama")
    prompt = prompt_of()
    pipe = mpcomp.pipeline(model, 1, split=2)
    pipe.save_pretrained(tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model")
    assert torch.equal(theirs(again, prompt), ours(pipe, prompt))
    chain = mpcomp.pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 1, split=[1, 1])
    with pytest.raises(TypeError, match="Sequential is no model of transformers"):
        chain.save_pretrained(tmp_path / "other")
