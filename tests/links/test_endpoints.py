"""Endpoints: each method of a cut has one, and a link asks it and nothing else."""

import ast
from pathlib import Path

import pytest
import torch
from methods import ALL, beside, same_bits

from mpcomp import (
    AQSGD,
    EF21,
    KLT,
    Adaptive,
    ErrorFeedback,
    Identity,
    Link,
    SameIndices,
    TensorMeta,
    TopK,
    parse,
)
from mpcomp.core.context import Step
from mpcomp.feedback import Side
from mpcomp.links import build, equal_copies, state
from mpcomp.links import link as link_module
from mpcomp.links.boundary import Boundary
from mpcomp.links.endpoints import Endpoint, endpoint_of
from mpcomp.links.equal_copies import bits_by_slot, bits_of
from mpcomp.links.state import restored

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
AT_CUTS = [method for method in ALL if method.at_cuts]
SHAPE = (4, 120)


def boundary_of(act, grad) -> Boundary:
    return Boundary(
        Link(act, boundary=0, direction="act"), Link(grad, boundary=0, direction="grad")
    )


def step_of(index: int, **kwargs) -> Step:
    return Step(index, True, sample_ids=(tuple((i,) for i in range(4)),), **kwargs)


def train(boundary: Boundary, index: int) -> list[torch.Tensor]:
    """Messages of a step with one microbatch, both ways."""
    step, messages = step_of(index), []
    for i, link in enumerate(boundary.links):
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2 * index + i))
        messages.append(link.encode(x, step, 0))
        link.decode(messages[-1], TensorMeta.of(x), step, 0)
    boundary.finish_step(finite=True)
    return messages


def endpoint_names(tree: ast.Module) -> set[str]:
    """Attributes that a module asks of ``….endpoint``."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "endpoint"
    }


def test_a_link_asks_the_contract_and_nothing_else():
    tree = ast.parse(Path(link_module.__file__).read_text())
    asked = endpoint_names(tree)
    contract = {name for name in dir(Endpoint) if name[0] != "_"} | {"partner"}
    assert {"plan", "observe", "hear", "crossed", "commit", "discard"} <= asked
    assert asked <= contract
    for module, names in ((equal_copies, {"copies"}), (state, {"state_size"}), (build, {"coders"})):
        assert endpoint_names(ast.parse(Path(module.__file__).read_text())) == names
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip
    assert not imported & {"Feedback", "KLT", "Adaptive", "SameIndices", "Compressor"}
    assert endpoint_names(ast.parse("link.endpoint.news(other.endpoint.policy)")) == {
        "news", "policy",
    }  # fmt: skip


@pytest.mark.parametrize("method", AT_CUTS, ids=str)
def test_each_method_of_a_cut_has_an_endpoint(method):
    endpoint = endpoint_of(method)
    assert endpoint.method == method and endpoint.partner is None
    assert not endpoint.ends and not endpoint.state_dict().get("sample")
    assert [list(endpoint.copies(side)) for side in Side] == [[], []]


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("topk:0.1", "PlainEndpoint"),
        ("none", "PlainEndpoint"),
        ("ef+topk:0.1", "MemoryEndpoint"),
        ("aqsgd+quant:4", "MemoryEndpoint"),
        ("klt+step:0.3", "BasisEndpoint"),
        ("same", "SelectionEndpoint"),
        ("adaptive+ef21+topk:0.1", "AdaptiveEndpoint"),
    ],
)
def test_the_nearest_class_counts(spec, kind):
    assert type(endpoint_of(parse(spec))).__name__ == kind


def test_a_class_of_ones_own_goes_before_those_of_its_bases():
    class Mine(TopK):
        pass

    assert type(endpoint_of(Mine(0.1))).__name__ == "PlainEndpoint"

    class MyEndpoint(type(endpoint_of(TopK(0.1))), of=Mine):
        pass

    assert type(endpoint_of(Mine(0.1))) is MyEndpoint
    assert type(endpoint_of(TopK(0.1))) is not MyEndpoint


PAIRS = [
    (TopK(0.1), SameIndices()),
    (TopK(0.1), SameIndices(where="nonzero")),
    (Adaptive(TopK(0.1), window=2), SameIndices()),
    (EF21(TopK(0.1)), ErrorFeedback(TopK(0.2))),
    (parse("aqsgd:along=bf16+step:0.3"), AQSGD(TopK(0.1))),
    (parse("klt:weighted=true+step:0.3"), Identity()),
    (parse("klt+step:0.3"), KLT(parse("step:1"))),
]


@pytest.mark.parametrize(("act", "grad"), PAIRS, ids=str)
def test_both_directions_know_each_other_also_when_they_are_restored(act, grad):
    """Link by link, in either order, and they go on with the same messages."""
    devices = dict.fromkeys(("sender", "receiver"), torch.device("cpu"))
    boundary, again = boundary_of(act, grad), boundary_of(act, grad)
    for index in range(4):
        train(boundary, index)
    for turn, links in enumerate((again.links, again.links[::-1])):
        for link in links:
            own = next(each for each in boundary.links if each.direction == link.direction)
            restored(link, own.endpoint.state_dict(), devices)()
        here, there = (link.endpoint for link in again.links)
        assert here.partner is there and there.partner is here
        ours, theirs = (train(each, 4 + turn) for each in (boundary, again))
        assert all(map(same_bits, ours, theirs))


@pytest.mark.parametrize(
    ("act", "grad", "told"),
    [
        (TopK(0.1), Identity(), []),
        (EF21(TopK(0.1)), ErrorFeedback(TopK(0.2)), []),
        (parse("klt+step:0.3"), Identity(), []),
        (TopK(0.1), SameIndices(), ["act"] * 2),
        (parse("klt:weighted=true+step:0.3"), Identity(), ["grad"] * 2),
    ],
    ids=str,
)
def test_who_does_not_follow_is_told_nothing(act, grad, told, monkeypatch):
    boundary, found = boundary_of(act, grad), []
    for link, other in zip(boundary.links, boundary.links[::-1], strict=True):
        crossed = link.endpoint.crossed
        monkeypatch.setattr(
            link.endpoint, "crossed",
            lambda *args, of=other.direction, crossed=crossed: (found.append(of), crossed(*args)),
        )  # fmt: skip
    train(boundary, 0)
    assert found == told


@pytest.mark.parametrize("method", AT_CUTS, ids=str)
def test_copies_are_alike_at_both_ends_before_a_step_is_kept(method):
    """Of the slots of its messages, and nothing of those of a step that was given up."""
    link = boundary_of(method, beside(method, Identity())).act
    x = torch.randn(SHAPE)
    for index in range(3):
        step = step_of(index)
        link.decode(link.encode(x + index, step, 0), TensorMeta.of(x), step, 0)
        sent, received = (
            [(list(names), rows.clone()) for names, rows in link.endpoint.copies(side)]
            for side in Side
        )
        assert [names for names, _ in sent] == [names for names, _ in received]
        assert all(same_bits(a, b) for (_, a), (_, b) in zip(sent, received, strict=True))
        estimated = any(end.estimate for end in link.endpoint.ends.values())
        assert bool(sent) == estimated
        assert int(bits_of(link, Side.SENDER)) == int(bits_of(link, Side.RECEIVER))
        assert bits_by_slot(link, Side.SENDER) == bits_by_slot(link, Side.RECEIVER)
        link.discard() if index == 1 else link.commit()
        assert not any(list(link.endpoint.copies(side)) for side in Side)
