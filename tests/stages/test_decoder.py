"""Language models are cut between their blocks, and the stages give the model's bits."""

import copy
import pickle

import pytest
import torch
import transformers
from everyday import slow_but
from lms import (
    chained,
    gpt2,
    language_model,
    llama,
    logits_of,
    text,
    without_labels,
)
from methods import same_bits
from torch import nn

from stages import balance, blocks, merge, seconds, shared_parameters, split, ties
from stages.language_models import FAMILIES, is_causal_lm

OTHERS = [
    "bloom",
    "cohere",
    "falcon",
    "gemma",
    "gpt_neo",
    "granite",
    "mixtral",
    "olmo",
    "phi",
    "stablelm",
    "starcoder2",
]
H = [f"transformer.h.{i}" for i in range(4)]

pytestmark = pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")


@pytest.mark.parametrize("family", slow_but(FAMILIES, [*sorted(FAMILIES), *OTHERS]))
def test_every_family_gives_the_models_logits(family):
    """2, 3 and 4 stages, without padding and with, in fp32 and bf16, with positions or without."""
    for dtype in (torch.float32, torch.bfloat16):
        model = language_model(family).to(dtype)
        keys, numbers = list(model.state_dict()), layer_numbers(model)
        padded = text(3, side="left")
        mask = padded["attention_mask"]
        given = {**padded, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        takes_positions = family not in ("bloom",)
        batches = [text(3), padded, text(3, 1, side="right"), *([given] if takes_positions else [])]
        expected = [logits_of(model, batch) for batch in batches]
        for number in (2, 3, 4):
            stages = split(model, number)
            assert [stage.num_stages for stage in stages] == [number] * number
            assert sorted({key for stage in stages for key in stage.state_dict()}) == sorted(keys)
            for batch, logits in zip(batches, expected, strict=True):
                assert same_bits(chained(stages, batch), logits)
                # The model itself is as it was, also while it is cut.
                assert same_bits(logits_of(model, batch), logits)
            assert layer_numbers(model) == numbers and list(model.state_dict()) == keys
            assert model.config.num_hidden_layers == 4
            assert merge(stages) is model


def layer_numbers(model):
    return [m.layer_idx for m in model.modules() if hasattr(m, "layer_idx")]


def test_stages_share_the_models_parameters():
    model = gpt2()
    stages = split(model, 3)
    first, *_, last = stages
    named = dict(model.named_parameters(remove_duplicate=False))
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert (parameter is named[name]) == (name != "lm_head.weight"), name
    assert ties(stages) == [((0, "transformer.wte.weight"), (2, "lm_head.weight"))]
    assert shared_parameters(model) == [("transformer.wte.weight", "lm_head.weight")]
    assert "transformer.ln_f.weight" in last.state_dict()
    assert "transformer.wpe.weight" in first.state_dict()
    assert all(stage.is_causal_lm for stage in stages)
    assert ties(split(llama(), 3)) == [] and ties(split(model, 1)) == []


def test_where_it_may_be_cut():
    model = gpt2()

    def cut(where):
        return [
            [name for name in stage.block_names if ".h." in name] for stage in split(model, where)
        ]

    assert cut([1, 3]) == cut([H[0]]) == [H[:1], H[1:]]
    assert cut([1, 2, 1]) == cut([H[0], H[2]]) == [H[:1], H[1:3], H[3:]]
    assert cut("paper") == cut(4) == [[name] for name in H]
    assert cut(1) == [H]
    assert [block.name for block in blocks(model)] == H


def test_the_cut_of_the_paper():
    """GPT-2's twelve blocks after 2, 5 and 8."""
    stages = split(gpt2(num_hidden_layers=12), "paper")
    assert [stage.block_names[-1] for stage in stages[:-1]] == [
        f"transformer.h.{i}" for i in (2, 5, 8)
    ]
    with pytest.raises(ValueError, match="four stages of equally many blocks, but the model has 6"):
        split(gpt2(num_hidden_layers=6), "paper")


@pytest.mark.parametrize(
    "where, message",
    [
        (["transformer.h.9"], r"the model has no block 'transformer.h.9'"),
        (["lm_head"], "the model has no block 'lm_head'"),
        (["transformer.h.3"], "it is the last block and would leave an empty stage"),
        (["transformer.h.2", "transformer.h.1"], "comes before"),
        ([2, 3], r"add up to 5, but the model has 4 blocks"),
        (5, r"more stages \(5\) than blocks \(4\)"),
        ("papers", "the only string accepted is 'paper'"),
    ],
)
def test_where_it_may_not(where, message):
    with pytest.raises(ValueError, match=message):
        split(gpt2(), where)


def test_balance_counts_embedding_and_head():
    """The first and last unit have them, so the ends get fewer blocks."""
    model = gpt2(vocab_size=2000, num_hidden_layers=8)
    counts = balance(model, 4)
    assert sum(counts) == 8 and counts[0] == counts[-1] == 1
    sizes = [sum(p.numel() for p in block.module.parameters()) for block in blocks(model)]
    assert sizes[0] > 2000 * 32 < sizes[-1] and max(sizes[1:-1]) < 2000 * 32
    assert [len([n for n in s.block_names if ".h." in n]) for s in split(model, 4)] == counts


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_balance_measures_with_a_batch_as_sample(family):
    model = language_model(family)
    before = copy.deepcopy(model.state_dict())
    sample = without_labels(text(2, side="left"))
    for given in (sample, sample["input_ids"]):
        assert sum(balance(model, 2, by="time", sample=given)) == 4
        assert sum(balance(model, 2, by="bytes", sample=given, load="parameters")) == 4
    assert len(seconds(blocks(model), sample)) == 4
    assert [block.name for block in blocks(model, sample)] == [b.name for b in blocks(model)]
    assert all(same_bits(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_stages_copy_and_pickle(family):
    """As modules of their own, which go on without the model that they were cut from."""
    model = language_model(family)
    batch = text(3, side="left")
    expected = logits_of(model, batch)
    stages = split(model, 2)
    assert same_bits(chained([copy.deepcopy(stage) for stage in stages], batch), expected)
    assert same_bits(chained(pickle.loads(pickle.dumps(stages)), batch), expected)
    with pytest.raises(ValueError, match="copied"):
        merge([copy.deepcopy(stage) for stage in stages])


def test_a_copied_head_with_a_bias_is_merged():
    """Tied weight, but a bias of its own, which is the model's and no copy."""
    model = language_model("phi", tie_word_embeddings=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    stages = split(model, 2)
    assert stages[-1].get_parameter("lm_head.bias") is model.lm_head.bias
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.add_(0.1)
    batch = text(2)
    expected = chained(stages, batch)
    merged = merge(stages)
    assert same_bits(logits_of(merged, batch), expected)
    assert merged.lm_head.weight is merged.get_input_embeddings().weight


def test_training_mode_and_dropout_follow_the_stage():
    model = language_model("gpt2", resid_pdrop=0.5)
    stages = split(model.eval(), 2)
    assert not any(stage.training for stage in stages)
    ids = text(2)["input_ids"]
    with torch.no_grad():
        quiet = stages[0](ids)
        assert same_bits(stages[0](input_ids=ids), quiet)
        assert not torch.equal(stages[0].train()(ids), quiet)


def test_side_inputs_come_from_the_batch():
    first, last = split(gpt2(), 2)
    batch = {**without_labels(text(2, side="left")), "position_ids": torch.zeros(2, 9).long()}
    assert first.takes(batch) == {} == last.takes(batch["input_ids"])
    assert set(last.takes(batch)) == {"attention_mask", "position_ids"}


def test_meta_models_get_the_buffers_that_no_file_has():
    """Rotary frequencies follow from the configuration; weights stay without memory."""
    for family in ("llama", "gpt_neo", "gemma", "gpt_neox"):
        expected = dict(language_model(family).named_buffers())
        with torch.device("meta"):
            model = language_model(family)
        stages = split(model, 2)
        assert all(parameter.is_meta for parameter in model.parameters())
        found = {name: b for stage in stages for name, b in stage.named_buffers()}
        assert found.keys() == expected.keys()
        for name, buffer in found.items():
            assert same_bits(buffer, expected[name]), name


# -- what cannot be cut ---------------------------------------------------------------------------


def test_opt_is_refused():
    """Its forward needs the mask before the blocks: the stages would give other logits."""
    model = language_model("opt")
    before = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="OPTForCausalLM cannot be cut like this: its stages do"):
        split(model, 2)
    assert [module.training for module in model.modules()] == before


def test_other_models_of_transformers_are_refused():
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, vocab_size=53, is_decoder=True)
    model = transformers.BertLMHeadModel(config)
    with pytest.raises(ValueError, match="BertLMHeadModel cannot be cut like this"):
        split(model, 2)


def test_blocks_that_cannot_be_found_are_named():
    model = gpt2()
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=r"= 5 modules, and none fits; there are 'transformer.h "):
        split(model, 2)
    model.block_list = "transformer.hs"
    with pytest.raises(ValueError, match=r"no nn.ModuleList of that name; .*'transformer.h'"):
        split(model, 2)
    model.block_list = "transformer.h"
    model.config.num_hidden_layers = 4
    assert len(split(model, 4)) == 4
    del model.block_list
    model.other = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    with pytest.raises(ValueError, match="several fit; there are .*Name it: model.block_list = "):
        split(model, 2)
    model.block_list = "transformer.h"
    batch = text(2)
    assert same_bits(chained(split(model, 2), batch), logits_of(model, batch))


def test_a_model_without_a_head_is_no_language_model():
    assert is_causal_lm(gpt2()) and is_causal_lm(llama())
    assert not is_causal_lm(gpt2().transformer)
    assert not is_causal_lm(nn.Linear(1, 1))


def test_hooks_on_the_model_are_refused():
    model = gpt2()
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has hooks on the model itself"):
        split(model, 2)
