"""Shared parameters are found by name, and refused across a cut."""

import pytest
import torch
from stage_models import Decoder, assert_computes_the_same, ids
from torch import nn

from stages import merge, resnet18, shared_parameters, split, ties


def chain(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


def test_none_in_a_plain_model():
    assert shared_parameters(resnet18(width=4)) == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_and_repeated_modules(device):
    with torch.device(device):
        tied, twice = nn.Linear(3, 3), nn.Linear(3, 3)
        model = chain(tied, nn.Linear(3, 3), twice, nn.Linear(3, 3), twice)
        model[3].weight = tied.weight
    assert shared_parameters(model) == [
        ("0.weight", "3.weight"),
        ("2.weight", "4.weight"),
        ("2.bias", "4.bias"),
    ]


def test_views_of_one_storage_are_shared_only_where_they_overlap():
    flat = torch.zeros(20)
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(flat[:10]),
            "b": nn.Parameter(flat[10:]),
            "c": nn.Parameter(flat[4:8].view(2, 2).T),
            "d": nn.Parameter(torch.zeros(10)),
            "e": nn.Parameter(flat[8:10]),
        }
    )
    assert shared_parameters(model) == [("a", "c", "e")]


def test_across_a_cut_there_are_two_copies():
    model = chain(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    cut = split(model, [2, 1])
    assert ties(cut) == [((0, "0.weight"), (1, "2.weight"))]
    first, last = cut[0].get_parameter("0.weight"), cut[1].get_parameter("2.weight")
    assert first is model[0].weight and last is not first and torch.equal(first, last)
    assert cut[1].get_parameter("2.bias") is model[2].bias  # which is not shared
    x = torch.randn(2, 3)
    assert torch.equal(cut[1](cut[0](x)), model(x))
    assert merge(cut) is model and model[2].weight is model[0].weight
    (stage,) = split(model, 1)
    assert not ties([stage])
    assert list(stage.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert_computes_the_same(model, [stage], torch.randn(2, 3))


def test_what_overlaps_is_not_one_parameter():
    flat = torch.randn(12)
    model = chain(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[0].weight = nn.Parameter(flat[:9].view(3, 3))
    model[2].weight = nn.Parameter(flat[3:].view(3, 3))
    with pytest.raises(ValueError, match=r"'0.weight' in stage 0 and '2.weight' in stage 1.*same"):
        split(model, [2, 1])


@pytest.mark.parametrize(
    ("module", "name"),
    [(nn.Linear(3, 3), "weight"), (nn.BatchNorm1d(3, affine=False), "running_mean")],
    ids=["parameters", "buffers"],
)
def test_a_module_with_state_on_both_sides_is_an_error(module, name):
    model = chain(module, nn.ReLU(), module)
    with pytest.raises(ValueError, match=f"'0.{name}' in stage 0 and '2.{name}' in stage 1"):
        split(model, ["1"])


def test_tied_head_of_a_model_with_a_forward():
    model = Decoder(tied=True)
    assert shared_parameters(model) == [("embed.weight", "head.weight")]
    cut = split(model, ["h.1"])
    assert ties(cut) == [((0, "embed.weight"), (1, "head.weight"))]
    assert torch.equal(cut[1](cut[0](ids())), model(ids()))
    assert_computes_the_same(model, split(model, 1), ids())


def test_a_parameter_read_by_two_stages():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.c(self.b(self.a(x) * self.scale)) * self.scale

    with pytest.raises(ValueError, match="'scale' in stage 0 and 'scale' in stage 1"):
        split(Scaled(), ["b"])


def test_parameters_without_a_shape_are_refused():
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet; run one batch"):
        split(chain(nn.LazyLinear(3), nn.ReLU()), [1, 1])
