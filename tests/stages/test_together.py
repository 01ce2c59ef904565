"""A weight at both ends of a model: the last stage that runs beside the first."""

import copy
from collections import OrderedDict

import lms
import pytest
import torch
from torch import nn

import stages
from stages import merge, split
from stages.language_models.decoder import FAMILIES

TIED = {"tie_word_embeddings": True}


class Head(nn.Module):
    """A head of its own forward, with a weight from elsewhere."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def chain(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 6)
    middle = {f"b{i}": nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for i in range(blocks)}
    norm = nn.LayerNorm(6)
    return nn.Sequential(
        OrderedDict(embed=embedding, **middle, norm=norm, head=Head(embedding.weight))
    )


class Own(nn.Module):
    """A small GPT of one's own, with a forward that is traced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(self.norm(x))


MODELS = {
    **{
        family: lambda family=family: lms.language_model(family, **TIED)
        for family in sorted(FAMILIES)
    },
    "chain": chain,
    "traced": Own,
}


def inputs(name: str) -> dict[str, torch.Tensor] | torch.Tensor:
    if name in ("chain", "traced"):
        return torch.arange(8).reshape(2, 4)
    return lms.without_labels(lms.text(3, side="left"))


def run(cut: list[stages.Stage], batch: object) -> torch.Tensor:
    x = cut[0](**batch) if isinstance(batch, dict) else cut[0](batch)
    for stage in cut[1:]:
        x = stage(x, **stage.takes(batch))
    return x


@pytest.mark.parametrize("name", MODELS)
def test_stages_together_compute_the_model(name):
    """Bit for bit, forward and, of one microbatch, backward; with one stage more and one weight."""
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    batch = inputs(name)
    apart, cut = split(copy.deepcopy(model), 2), split(model, 2, together=True)
    assert not apart[0].together and len(apart) == 2
    assert cut[0].together and len(cut) == 3 and not cut[0].why_apart
    out = plain(**batch).logits if isinstance(batch, dict) else plain(batch)
    ours = run(cut, batch)
    assert torch.equal(out, ours)
    out.square().sum().backward()
    ours.square().sum().backward()
    (((_, first), (_, again)),) = stages.ties(cut)
    held = dict(cut[0].named_parameters())[first]
    use = cut[2].get_parameter(again)
    assert use.data_ptr() == held.data_ptr() and use is not held
    assert torch.equal(held.grad + use.grad, plain.get_parameter(first).grad)
    assert again not in dict(cut[2].named_parameters())
    assert again in dict(cut[2].named_parameters(remove_duplicate=False))
    # Each parameter of the model once, and each name of its state.
    assert sum(p.numel() for s in cut for p in s.parameters()) == sum(
        p.numel() for p in plain.parameters()
    )
    assert {k for s in cut for k in s.state_dict()} == set(plain.state_dict())
    merged = merge(cut)
    assert merged.get_parameter(again) is merged.get_parameter(first)


@pytest.mark.parametrize("name", ["gpt2", "chain", "traced"])
def test_the_first_stage_weighs_what_runs_beside_it(name):
    """Balanced by parameters with the head at the first stage, and by seconds likewise."""
    model = MODELS[name]()
    cut = split(model, 2, together=True)
    sizes = [sum(p.numel() for p in stage.parameters()) for stage in cut]
    beside = [sizes[0] + sizes[2], sizes[1]]
    moved = max(sum(p.numel() for p in block.module.parameters()) for block in stages.blocks(model))
    assert abs(beside[0] - beside[1]) <= moved
    batch = inputs(name)
    times = stages.unit_seconds(model, batch, together=True)
    whole = stages.unit_seconds(model, batch)
    assert len(times) == len(whole) and times[0] > 0
    assert len(split(model, stages.partition(times, 2), together=True)) == 3


def untied(name: str) -> nn.Module:
    """The model with a head of its own."""
    if name in FAMILIES:
        return lms.language_model(name, tie_word_embeddings=False)
    model = MODELS[name]()
    head = model.head if name == "chain" else model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())
    return model


@pytest.mark.parametrize("name", MODELS)
def test_ends_that_share_nothing_can_be_beside_each_other(name):
    """Bit for bit the model, of all families, with one stage more that has the head alone."""
    model = untied(name)
    plain, batch = copy.deepcopy(model), inputs(name)
    assert len(split(copy.deepcopy(model), 2, together=True)) == 2
    cut = split(model, 2, ends_first=True)
    assert cut[0].together and len(cut) == 3 and not stages.ties(cut)
    out = plain(**batch).logits if isinstance(batch, dict) else plain(batch)
    ours = run(cut, batch)
    assert torch.equal(out, ours)
    out.square().sum().backward()
    ours.square().sum().backward()
    theirs = {key: p.grad for key, p in plain.named_parameters()}
    assert {key for s in cut for key, _ in s.named_parameters()} == theirs.keys()
    for stage in cut:
        for key, p in stage.named_parameters():
            assert torch.equal(p.grad, theirs[key])
    sizes = [sum(p.numel() for p in stage.parameters()) for stage in cut]
    assert sizes[2] < sizes[0] + sizes[1]
    times = stages.unit_seconds(model, batch, ends_first=True)
    assert times[0] > 0 and len(times) == len(stages.unit_seconds(model, batch))
    assert merge(cut) is model


def test_where_ends_that_share_nothing_cannot_be():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    assert [s.block_names for s in split(model, [2, 2], ends_first=True)] == [
        ("0", "1"),
        ("2",),
        ("3",),
    ]
    for where in ([3, 1], 4):
        cut = split(model, where, ends_first=True)
        assert not cut[0].together and "cut earlier" in cut[0].why_apart
        assert len(cut) == (2 if isinstance(where, list) else 4)
    assert len(split(model, 1, ends_first=True)) == 1
    model[1].weight = model[2].weight  # both in the middle, and in one stage
    assert split(model, [1, 3], ends_first=True)[0].together
    parted = split(model, [2, 2], ends_first=True)[0]  # what becomes a tie apart
    assert not parted.together and parted.why_apart


def test_where_it_cannot_be():
    """A model without such a weight is cut as ever; else stages say why."""
    assert len(split(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 2, together=True)) == 2
    # Cut just before the second use.
    cut = split(chain(), ["b0", "norm"], together=True)
    assert not cut[0].together and "cut earlier" in cut[0].why_apart
    # A weight in the middle that two stages share.
    model = chain()
    model.b3[0].weight = model.b0[0].weight
    cut = split(model, ["b1"], together=True)
    assert not cut[0].together and "elsewhere than at both ends" in cut[0].why_apart
    cut = split(model, ["b3"], together=True)  # within one stage
    assert cut[0].together
    # A weight within the last stage.
    model = chain()
    model.head.weight = nn.Parameter(torch.randn(11, 6))
    model.b3[0].weight = model.b2[0].weight
    cut = split(model, ["b1"], together=True)
    assert not cut[0].together and not cut[0].why_apart and len(cut) == 2
    # One stage.
    assert not split(chain(), 1, together=True)[0].together
