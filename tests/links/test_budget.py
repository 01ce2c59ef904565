"""Budgets of quality: steps that follow the committed curves, and refusals of all else."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mpcomp.core.spec import parse
from mpcomp.links import budget
from mpcomp.links.auto import AUTO, BEFORE_HEAD, INFERENCE
from mpcomp.links.budget import CURVES, LEAST, MOST, Measured, percent_of, scaled, spelt
from recipes.lab.finetune_study import ROWS as ROWS_OF_FINE_TUNING
from recipes.lab.rate_quality import points_of
from recipes.run_folder import read_json_lines

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ROWS = [(word, row) for word, curve in CURVES.items() for row in curve]


@pytest.mark.parametrize(("word", "row"), ROWS, ids=lambda each: getattr(each, "row", each))
def test_a_cost_is_that_of_its_study(word, row):
    rows = read_json_lines(RESULTS / f"{row.study}.jsonl")
    if word == INFERENCE:  # some rows were run before it was measured
        rows = [each for each in rows if "divergence" in each]
    _, points = points_of(rows, divergence=word == INFERENCE)
    point = next(point for point in points if point.method == row.row)
    assert row.cost == round(point.cost, 2)
    # And its methods are the word's at these steps, where the file says them.
    if word == INFERENCE:
        assert methods_at(word, row)["act_comp"] == str(parse(row.row))
    for each in rows:
        if each.get("row") == row.row:
            check_methods(word, row, each)


def check_methods(word, row, line):
    """Holds the methods of a file's line to the ones of a curve's row."""
    for argument, given in (("act_comp", line["act"]), ("grad_comp", line["grad"])):
        at_cuts = given if isinstance(given, list) else [given]
        for i, spec in enumerate(at_cuts):
            before_head = 0 < i == len(at_cuts) - 1
            if spec == word:  # by itself
                spec = spelt(word, None)[argument]
            assert str(parse(spec)) == methods_at(word, row, before_head=before_head)[argument]


def methods_at(word, row, **where):
    """Methods at the steps of a row, as a budget takes them from a curve of this row alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(budget.CURVES, word, [row])
        return {name: str(parse(spec)) for name, spec in spelt(word, MOST, **where).items()}


def test_rows_of_fine_tuning_are_methods_of_its_curve():
    """Each line of such a study has methods of all cuts."""
    study_row = ROWS_OF_FINE_TUNING["training steps times 1.6"]
    row = Measured(1.0, 0.64, 1.6, "finetune_long", "")
    line = {"act": list(study_row.act), "grad": list(study_row.grad)}
    check_methods("auto:memory", row, line)
    with pytest.raises(AssertionError):
        check_methods("auto:memory", replace(row, grad=3.2), line)
    with pytest.raises(AssertionError):
        check_methods("auto:memory", row, {**line, "act": line["act"][::-1]})
    check_methods(
        "auto:memory", replace(row, act=0.4, grad=1.0), dict.fromkeys(line, "auto:memory")
    )


def steps_of(word, percent):
    """Steps of the methods, activations and gradients."""
    return [float(re.search(r"step:([0-9.]+)", spec)[1]) for spec in spelt(word, percent).values()]


@pytest.mark.parametrize("word", CURVES)
def test_more_budget_never_gives_finer_steps(word):
    curve = CURVES[word]
    costs = list(itertools.accumulate((row.cost for row in curve), max))
    budgets = [costs[0] + i * (MOST - costs[0]) / 60 for i in range(61)]
    found = [steps_of(word, percent) for percent in budgets]
    for finer, coarser in itertools.pairwise(found):
        assert finer[0] <= coarser[0] and finer[1] <= coarser[1]
    # A row's own cost takes its steps; what costs the same and is coarser goes before.
    for i, (row, cost) in enumerate(zip(curve, costs, strict=True)):
        if i == len(costs) - 1 or costs[i + 1] > cost:
            assert steps_of(word, cost) == [row.act, row.grad]
    assert found[-1] == [curve[-1].act, curve[-1].grad]
    assert len({step for step, _ in found}) > 5  # in between, too


@pytest.mark.parametrize("word", CURVES)
def test_what_was_not_measured_is_refused(word):
    with pytest.raises(ValueError, match="the finest steps that were measured cost") as caught:
        spelt(word, min(row.cost for row in CURVES[word]) - 0.01)
    assert CURVES[word][0].study in str(caught.value) and word in str(caught.value)


@pytest.mark.parametrize("word", sorted(AUTO.keys() - CURVES.keys()))
def test_a_word_without_a_curve_is_refused(word):
    with pytest.raises(ValueError, match=f"budget of 1 % with '{word}': no study has") as caught:
        spelt(word, 1.0)
    # Words that have one are named as a user gives them.
    named = [repr(each) if each in AUTO else "'auto' at inference" for each in CURVES]
    assert f"at several steps, only {', '.join(named)}; leave budget out" in str(caught.value)


@pytest.mark.parametrize("methods", [AUTO["auto:memory"], BEFORE_HEAD["auto:memory"]])
def test_all_steps_of_training_go_by_one_factor(methods):
    for spec in methods.values():
        assert scaled(spec, 1.0) == spec
        before, after = (
            re.findall("(eval=)?step.([0-9.]+)", each) for each in (spec, scaled(spec, 0.5))
        )
        halved = [float(step) / (1 if evaluation else 2) for evaluation, step in before]
        assert halved == [float(step) for _, step in after]
        assert len(before) > 1 and parse(scaled(spec, 1 / 3))


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
