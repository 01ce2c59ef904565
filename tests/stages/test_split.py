"""`split` on plain chains: every way of saying where, the same bits, and every bad input."""

from collections import OrderedDict

import pytest
import torch
from stage_models import assert_computes_the_same, assert_names_are_the_models, images
from torch import nn

from stages import blocks, resnet18, split, ties


@pytest.fixture
def model():
    torch.manual_seed(0)
    return resnet18(width=4)


def linears(*names: str) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in names))


WAYS = [
    1,
    4,
    14,
    [3, 2, 2, 7],
    (1, 12, 1),
    "paper",
    ["layer1"],
    ["conv1", "layer2.0", "pool"],
    ("bn1", "flatten"),
]


@pytest.mark.parametrize("where", WAYS, ids=str)
def test_chained_stages_are_the_model(model, where):
    stages = split(model, where)
    assert_computes_the_same(model, stages, images())
    assert_names_are_the_models(model, stages)


def test_blocks_expand_nested_chains(model):
    names = [block.name for block in blocks(model)]
    layers = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert names == ["conv1", "bn1", "relu", *layers, "pool", "flatten", "linear"]
    assert blocks(model)[3].module is model.layer1[0]


def test_what_is_not_plain_stays_one_block():
    class Doubled(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked = linears("b", "c")
    hooked.register_forward_hook(lambda module, args, output: output + 1)
    model = nn.Sequential(Doubled(nn.Linear(3, 3)), hooked, nn.Sequential(), linears("d", "e"))
    assert [block.name for block in blocks(model)] == ["0", "1", "2", "3.d", "3.e"]
    assert_computes_the_same(model, split(model, 5), torch.randn(2, 3))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("paper", [["conv1", "layer1.1"], ["layer2.0", "layer2.1"], ["layer3.0", "layer3.1"]]),
        (["layer1.0", "layer4"], [["conv1", "layer1.0"], ["layer1.1", "layer4.1"]]),
        ([1, 1, 12], [["conv1", "conv1"], ["bn1", "bn1"]]),
    ],
    ids=str,
)
def test_where_the_cuts_fall(model, where, expected):
    stages = split(model, where)
    ends = [[s.block_names[0], s.block_names[-1]] for s in stages]
    assert ends[: len(expected)] == expected
    assert ends[-1][-1] == "linear"
    assert [stage.index for stage in stages] == list(range(len(stages)))
    assert all(stage.num_stages == len(stages) for stage in stages)


def test_a_number_makes_the_largest_stage_small():
    model = nn.Sequential(*(nn.Linear(1, n, bias=False) for n in (5, 1, 2, 5, 9)))
    sizes = [sum(p.numel() for p in stage.parameters()) for stage in split(model, 3)]
    assert sizes == [6, 7, 9]


def test_the_same_stateless_module_may_stand_in_several_stages():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu)
    stages = split(model, [2, 2])
    assert stages[0].block_names == ("0", "1") and stages[1].block_names == ("2", "3")
    assert_computes_the_same(model, stages, torch.randn(2, 3))


def test_unused_tensors_keep_a_home():
    model = resnet18(width=4)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model.layer3.register_buffer("extra", torch.ones(3), persistent=False)
    stages = split(model, "paper")
    assert_names_are_the_models(model, stages)
    assert "unused" in stages[0].state_dict()
    assert "layer3.extra" in dict(stages[0].named_buffers())


def test_a_second_name_goes_with_the_first():
    model = resnet18(width=4)
    model.layer1[0].conv1.also = model.layer3[0].conv1.weight  # inside a block: shared in earnest
    copies = ((0, "layer1.0.conv1.also"), (2, "layer3.0.conv1.weight"))
    assert ties(split(model, "paper")) == [copies]
    del model.layer1[0].conv1.also
    model.also = model.layer3[0].conv1.weight
    stages = split(model, "paper")
    assert ["also" in stage.state_dict() for stage in stages] == [False, False, True, False]
    assert stages[2].also is model.layer3[0].conv1.weight


def test_split_changes_nothing(model):
    model.train()
    model.layer2.eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    stages = split(model, 3)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)
    assert stages[0].training


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (0, "number of stages is 0; accepted is 1 or more"),
        (15, r"more stages \(15\) than blocks \(14\)"),
        ([3, 2], "add up to 5, but the model has 14 blocks"),
        ([14, 0], r"\[14, 0\] hold 0"),
        ([15, -1], "hold -1"),
        (["layer9"], "no block 'layer9'; did you mean 'layer"),
        (["zzz"], "no block 'zzz'; there are: 'conv1'"),
        (["layer1.0.conv1"], "inside block 'layer1.0'"),
        (["layer1", "layer1"], "named twice"),
        (["layer2", "layer1"], "'layer1' comes before 'layer2'"),
        (["layer1", "layer1.1"], "'layer1' and 'layer1.1' end at the same block"),
        (["linear"], "would leave an empty stage"),
        ("layer1", r"pass \['layer1'\]"),
    ],
    ids=str,
)
def test_bad_values(model, where, message):
    with pytest.raises(ValueError, match=message):
        split(model, where)


@pytest.mark.parametrize("where", [2.0, None, True, [], [1, "layer1"], [True, 13], {"layer1"}])
def test_bad_types(model, where):
    with pytest.raises(TypeError, match="accepted is a number of stages, a sequence"):
        split(model, where)


def test_paper_needs_a_paper_cut():
    with pytest.raises(ValueError, match="Sequential has no paper_cut"):
        split(linears("a", "b"), "paper")


def test_a_model_is_a_module():
    with pytest.raises(TypeError, match="list as the model"):
        split([nn.Linear(3, 3)], 1)


def test_hooks_on_the_model_are_refused():
    model = linears("a", "b")
    model.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(ValueError, match="hooks on the model itself"):
        split(model, 2)


def test_blocks_named_as_a_stage_attribute():
    with pytest.raises(ValueError, match="called 'index', which a Stage uses"):
        split(linears("first", "index"), 2)
