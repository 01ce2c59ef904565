"""Statistics of the study, against numbers worked out by hand."""

import pytest

from recipes.lab import wikitext_study
from recipes.lab.cifar10_study import ROWS, TABLE
from recipes.lab.study_table import Claim, Results, render, spread, verdict


def line(row, seed, on, off=0.0, **more):
    return {
        "row": row,
        "seed": seed,
        "accuracy_compressed": on,
        "accuracy_uncompressed": off,
        "wire_bytes": 6_000_000,
        "wire_ratio": 0.125,
        "epochs": 3,
        **more,
    }


@pytest.mark.parametrize(
    ("rows", "table", "numbers"),
    [
        (ROWS, TABLE, {1, 2, 3, 4, 5}),
        (wikitext_study.ROWS, wikitext_study.TABLE, {1, 2, 3, 4, 5, 6, "AQ-SGD", "auto"}),
    ],
    ids=["cifar10", "wikitext"],
)
def test_every_claim_is_about_rows_of_the_grid(rows, table, numbers):
    assert {one for claim in table.claims for one in (claim.first, claim.second)} <= set(rows)
    assert {at for claim in table.claims for at in (claim.first_at, claim.second_at)} <= set(
        table.effects
    )
    assert {claim.number for claim in table.claims} == numbers
    formulas = [claim.formula for claim in table.claims]
    assert len(set(formulas)) == len(formulas)


def test_differences_are_paired_by_seed():
    lines = [line("a", 0, 0.5), line("a", 1, 0.6), line("b", 1, 0.55), line("b", 2, 0.9)]
    claim = Claim(1, "", "a", "b", above=True)
    assert claim.differences(Results.of(lines, order=[]), TABLE) == pytest.approx([5.0])


def test_second_may_be_off_at_inference():
    claim = Claim(3, "", "a", "a", above=True, second_at="off")
    results = Results.of([line("a", 0, 0.5, 0.2)], order=[])
    assert claim.differences(results, TABLE) == pytest.approx([30.0])


# Half of the interval of these three: t of two degrees of freedom 4.303 × 1/√3 = 2.484.
@pytest.mark.parametrize(
    ("bound", "above", "expected"),
    [
        (-0.49, True, "confirmed"),
        (-0.48, True, "undecided"),
        (4.48, True, "undecided"),
        (4.49, True, "not confirmed"),
        (4.49, False, "confirmed"),
        (2.0, False, "undecided"),
        (-0.49, False, "not confirmed"),
    ],
)
def test_verdict(bound, above, expected):
    assert verdict([1.0, 2.0, 3.0], above=above, bound=bound) == expected


@pytest.mark.parametrize("differences", [[50.0], [50.0, 50.1]])
def test_fewer_than_three_seeds_decide_nothing(differences):
    assert verdict(differences, above=True, bound=0.0) == "undecided"


def test_spread():
    assert spread([1.0, 2.0, 3.0]) == "2.00 ± 1.00"
    assert spread([1.0, 2.0, 3.0], sign=True) == "+2.00 ± 1.00"
    assert spread([1.5]) == "1.50"


def test_table_keeps_the_order_and_counts_divergence():
    lines = [
        line("top 10 %", 0, 0.5, 0.25),
        line("top 10 %", 1, 0.6, 0.35),
        line("none", 0, 0.7, 0.7),
        {"row": "top 2 %", "seed": 0, "diverged": "NaN at boundary 0"},
    ]
    text = render(Results.of(lines, order=list(ROWS)), TABLE)
    rows = [one for one in text.splitlines() if one.startswith("| ")]
    assert rows[1] == "| none | 70.00 | 70.00 | 1 | 2.0 | 0.125 |"
    assert rows[2] == "| top 10 % | 55.00 ± 7.07 | 30.00 ± 7.07 | 2 | 2.0 | 0.125 |"
    assert rows[3] == "| top 2 % (1 diverged) | | | 0 | | |"
    assert "| 3 | top 10 %: needs compression at inference |" in text
    assert "EF21" not in text  # nothing is claimed about rows that did not run
    assert "crops" not in text


def test_what_else_moves_a_row_stands_beside_it():
    lines = [line(row, 0, 0.5, 0.5) for row in ("none", "top 10 %, AQ-SGD", "quant fw2-bw8")]
    text = render(Results.of(lines, order=list(ROWS)), TABLE)
    assert "| top 10 %, AQ-SGD (fresh crops) | 50.00 |" in text
    assert "| quant fw2-bw8 (one scale) | 50.00 |" in text
    assert "| 5 | top 10 %, AQ-SGD: severe harm (fresh crops) | (none) − " in text
    assert "Fresh crops: " in text and "One scale: " in text
