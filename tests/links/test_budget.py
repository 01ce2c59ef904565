"""Budgets of quality: steps that follow the committed curves, and refusals of all else."""

import itertools
import re
from pathlib import Path

import pytest

from mpcomp.core.spec import parse
from mpcomp.links.auto import AUTO, INFERENCE
from mpcomp.links.budget import CURVES, LEAST, MOST, percent_of, spelt
from recipes.lab.rate_quality import points_of
from recipes.run_folder import read_json_lines

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ROWS = [(word, row) for word, curve in CURVES.items() for row in curve.rows]


@pytest.mark.parametrize(("word", "row"), ROWS, ids=lambda each: getattr(each, "row", each))
def test_a_cost_is_that_of_its_study(word, row):
    rows = read_json_lines(RESULTS / f"{row.study}.jsonl")
    if word == INFERENCE:  # some rows were run before it was measured
        rows = [each for each in rows if "divergence" in each]
    _, points = points_of(rows, divergence=word == INFERENCE)
    point = next(point for point in points if point.method == row.row)
    assert row.cost == round(point.cost, 2)
    # And its methods are the curve's at these steps, where the file says them.
    steps = {"act": row.act, "grad": row.grad}
    own = [str(parse(spec.format(**steps))) for spec in CURVES[word].methods.values()]
    told = [[each["act"], each["grad"]] for each in rows if each.get("row") == row.row]
    if word == INFERENCE:
        assert own[0] == str(parse(row.row))
    assert all([str(parse(spec)) for spec in each] == own for each in told)


def steps_of(word, percent):
    """Steps of the methods, activations and gradients."""
    return [float(re.search(r"step:([0-9.]+)", spec)[1]) for spec in spelt(word, percent).values()]


@pytest.mark.parametrize("word", CURVES)
def test_more_budget_never_gives_finer_steps(word):
    curve = CURVES[word]
    costs = list(itertools.accumulate((row.cost for row in curve.rows), max))
    budgets = [costs[0] + i * (MOST - costs[0]) / 60 for i in range(61)]
    found = [steps_of(word, percent) for percent in budgets]
    for finer, coarser in itertools.pairwise(found):
        assert finer[0] <= coarser[0] and finer[1] <= coarser[1]
    # A row's own cost takes its steps; what costs the same and is coarser goes before.
    for i, (row, cost) in enumerate(zip(curve.rows, costs, strict=True)):
        if i == len(costs) - 1 or costs[i + 1] > cost:
            assert steps_of(word, cost) == [row.act, row.grad]
    assert found[-1] == [curve.rows[-1].act, curve.rows[-1].grad]
    assert len({step for step, _ in found}) > 5  # in between, too


@pytest.mark.parametrize("word", CURVES)
def test_what_was_not_measured_is_refused(word):
    with pytest.raises(ValueError, match="the finest steps that were measured cost") as caught:
        spelt(word, min(row.cost for row in CURVES[word].rows) - 0.01)
    assert CURVES[word].rows[0].study in str(caught.value) and word in str(caught.value)


@pytest.mark.parametrize("word", sorted(AUTO.keys() - CURVES.keys()))
def test_a_word_without_a_curve_is_refused(word):
    with pytest.raises(ValueError, match=f"budget of 1 % with '{word}': no study has") as caught:
        spelt(word, 1.0)
    # Words that have one are named as a user gives them.
    _, _, others = str(caught.value).partition("only ")
    assert others.startswith("'auto:scratch', 'auto:relu', and 'auto' at inference; leave")


def test_without_a_budget_words_are_what_they_are():
    for word, methods in AUTO.items():
        assert spelt(word, None) == methods
    assert spelt(INFERENCE, None)["act_comp"] == "step:0.2:centre=true:spikes=16"


@pytest.mark.parametrize(
    ("given", "percent"),
    [("1 %", 1), ("1%", 1), (" 0.5 % ", 0.5), (0.01, 1), (0.05, 5), ("0.1 %", 0.1), ("5 %", 5)],
)
def test_forms_of_a_budget(given, percent):
    assert percent_of(given) == pytest.approx(percent)


@pytest.mark.parametrize(
    "given", ["1", "one %", "% 1", "1 % 2", "", "0.09 %", "5.1 %", "-1 %", "nan %", 1, 0.0, 0.051]
)
def test_what_is_no_budget(given):
    with pytest.raises(ValueError, match=f"expected '{LEAST:g} %' to '{MOST:g} %'"):
        percent_of(given)


@pytest.mark.parametrize("given", [True, [1], b"1 %"])
def test_what_is_neither_a_string_nor_a_number(given):
    with pytest.raises(TypeError, match="expected a string such as '1 %'"):
        percent_of(given)
