"""Capabilities in place of classes: what methods say of themselves, and that nobody asks more.

A method's class is known in its own module alone. Elsewhere a method is asked what it can do
(`mpcomp.core.spec.SpecValue`, `mpcomp.Compressor`), so that one from outside the library is taken
as one of its own.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from methods import COMPRESSORS, FEEDBACK, SELECTING, round_trip

import mpcomp
from mpcomp import (
    QSGD,
    Accordion,
    Adaptive,
    GraVAC,
    Identity,
    MultiLevel,
    Quantize,
    RandomBlock,
    RandomK,
    SameIndices,
    TensorMeta,
    TopK,
)
from mpcomp.compressors.base import check_contractive
from mpcomp.core.spec import SpecValue, registered

PACKAGE = Path(mpcomp.__file__).parent


def concrete() -> dict[str, str]:
    """The method classes of the library that can be named in a spec: name -> module."""
    return {
        cls.__name__: cls.__module__
        for cls in registered(SpecValue)
        if cls.__module__.startswith("mpcomp.")
    }


def named(node: ast.AST, aliases: dict[str, str]) -> Iterator[ast.AST]:
    """The classes of a test: a name, a tuple of them, or a union."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield ast.copy_location(ast.Name(aliases.get(part.id, part.id)), part)
        elif isinstance(part, ast.Attribute):
            yield ast.copy_location(ast.Name(part.attr), part)


def asks_type(node: ast.AST) -> bool:
    """Whether it is ``type(x)`` or ``x.__class__``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def classes_asked_for(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and line of each class that a module tests a value for."""
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        tests: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("isinstance", "issubclass"):
                tests = list(node.args[1:])
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(asks_type, sides)):
                tests = [side for side in sides if not asks_type(side)]
        elif isinstance(node, ast.MatchClass):
            tests = [node.cls]
        for test in tests:
            for name in named(test, aliases):
                assert isinstance(name, ast.Name)
                yield name.id, node.lineno


def test_no_method_is_known_by_its_class_outside_its_own_module():
    classes = concrete()
    assert {"Identity", "TopK", "EF21", "Adaptive", "GraVAC", "PowerSGD"} <= classes.keys()
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for name, line in classes_asked_for(ast.parse(path.read_text())):
            if classes.get(name, module) != module:
                found.append(f"{path.relative_to(PACKAGE.parent)}:{line} asks for {name}")
    assert not found, "ask for a capability instead:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(x, TopK)",
        "isinstance(x, (int, TopK))",
        "isinstance(x, Compressor | topk.TopK)",
        "issubclass(c, TopK)",
        "type(x) is TopK",
        "type(x) in (TopK, Sign)",
        "TopK == type(x)",
        "x.__class__ is not TopK",
        "from mpcomp import TopK as T; isinstance(x, T)",
        "match x:\n    case TopK(keep=0.1): pass",
    ],
)
def test_the_search_sees(line):
    assert "TopK" in dict(classes_asked_for(ast.parse(line)))


@pytest.mark.parametrize("line", ["TopK(0.1)", "isinstance(x, int)", "x == TopK(0.1)", "y: TopK"])
def test_the_search_lets_pass(line):
    assert "TopK" not in dict(classes_asked_for(ast.parse(line)))


# -- what methods say of themselves ---------------------------------------------------------------


def test_dense_means_every_bit():
    assert {type(c) for c in COMPRESSORS if c.sends_dense} == {Identity}


def test_selections():
    """`selects` is what `SameIndices` may reuse: no more and no less than the positions sent."""
    assert [c for c in COMPRESSORS if c.selects] == SELECTING
    assert not SameIndices().selects
    assert Adaptive(TopK(0.1)).selects and not Adaptive(Quantize(4)).selects


def test_what_adapts():
    assert Adaptive(TopK(0.1)).adapts and GraVAC(TopK(0.1)).adapts
    assert Accordion(TopK(0.5), TopK(0.1), interval=5).adapts
    assert not any(value.adapts for value in (*COMPRESSORS, *FEEDBACK))


UNBIASED = [
    QSGD(4),
    QSGD(2, group=16),
    Quantize(4, rounding="stochastic"),
    Quantize(3, scale=16, rounding="stochastic"),
    RandomK(0.3, unbiased=True),
    RandomBlock(0.3, unbiased=True),
    MultiLevel(RandomK(0.5, unbiased=True), 0.2),
]


@pytest.mark.parametrize("unbiased", UNBIASED, ids=str)
def test_unbiased_means_that_the_mean_is_the_tensor(unbiased):
    assert unbiased.is_unbiased
    x = torch.randn(40)
    draws = torch.stack([round_trip(unbiased, x, seed) for seed in range(1000)])
    deviation = draws.std(dim=0) / 1000**0.5
    # 6 standard deviations, and the rounding of a scale's end to bf16
    assert ((draws.mean(dim=0) - x).abs() <= 6 * deviation + 1e-5).all()


def test_unbiased_is_claimed_where_it_holds():
    claims = {str(c) for c in COMPRESSORS if c.is_unbiased}
    assert {"qsgd:4", "quant:4:rounding=stochastic", "randomk:0.3:unbiased=True"} <= claims
    assert not claims & {"none", "topk:0.1", "quant:4", "sign", "randomk:0.1", "lowrank:1", "bf16"}


#: Whose few levels lose more than there is: their users are told of more bits or smaller groups.
TOO_FEW_LEVELS = {"quant:1", "qsgd:2"}
CONTRACTIVE = [c for c in COMPRESSORS if c.contractive and str(c) not in TOO_FEW_LEVELS]


@pytest.mark.parametrize("compressor", CONTRACTIVE, ids=str)
def test_contractive_means_an_error_no_larger_than_the_tensor(compressor):
    """On average over draws, for a tensor of the size that a row mostly has."""
    x = torch.randn(4, 64)
    errors = [(round_trip(compressor, x, seed) - x).square().sum() for seed in range(20)]
    assert torch.stack(errors).mean() <= x.square().sum() * (1 + 1e-3)


def test_only_what_is_scaled_up_is_not_contractive():
    scaled_up = [c for c in COMPRESSORS if getattr(c, "unbiased", False)]
    assert scaled_up and not any(c.contractive for c in scaled_up)
    # But for one that adds noise, or takes means away, that a small element is smaller than.
    others = [c for c in COMPRESSORS if not c.contractive and c not in scaled_up]
    assert {type(c).__name__ for c in others} == {"ECSQ"}
    assert all(c.is_unbiased or c.centre for c in others)
    for compressor in (RandomK(0.1, unbiased=True), MultiLevel(RandomK(0.1, unbiased=True), 0.1)):
        with pytest.raises(ValueError, match="unbiased=True inside feedback diverges.*leave it"):
            check_contractive(compressor, "inside feedback")
    with pytest.raises(ValueError, match="unbiased=True with a residual diverges"):
        GraVAC(RandomK(0.1, unbiased=True))
    for compressor in others:
        with pytest.raises(ValueError, match="inside feedback it diverges"):
            check_contractive(compressor, "inside feedback")
    check_contractive(RandomK(0.1), "inside feedback")


@pytest.mark.parametrize("compressor", [TopK(0.1), RandomK(0.1), Quantize(4), QSGD(4)], ids=str)
def test_a_ladder_ascends_between_its_ends(compressor):
    rungs = compressor.cf_ladder(2.0, 50.0)
    assert rungs[0] == 2.0 and rungs[-1] == 50.0 and list(rungs) == sorted(set(rungs))
    sizes = [compressor.with_cf(cf).wire_bytes(TensorMeta((64, 256))) for cf in rungs]
    assert sizes == sorted(sizes, reverse=True)
