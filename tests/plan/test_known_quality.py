"""Quality in a plan: the figures of the committed studies, and of no other methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpcomp.links.build import method_of
from mpcomp.plan.known_quality import KNOWN, TASKS, UNITS, Known, known_of, methods_of
from recipes.lab.rate_quality import points_of
from recipes.run_folder import read_json_lines

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def named(known: Known) -> str:
    return f"{known.task} {known.row}"


@pytest.mark.parametrize("known", KNOWN, ids=named)
def test_a_figure_is_that_of_its_study(known: Known) -> None:
    rows = read_json_lines(RESULTS / f"{known.study}.jsonl")
    _, points = points_of(rows)
    point = next(point for point in points if point.method == known.row)
    assert point.half_width is not None
    assert (known.loss, known.half_width) == (round(point.cost, 2), round(point.half_width, 2))
    assert known.n == point.num_runs
    # Also the methods are those of the row, where it says them.
    spelt = {(row["act"], row["grad"]) for row in rows if row.get("row") == known.row}
    own = tuple(
        str(method_of(argument, spec))
        for argument, spec in (("act_comp", known.act), ("grad_comp", known.grad))
    )
    assert not spelt or own in {
        tuple(str(method_of(a, s)) for a, s in zip(("act_comp", "grad_comp"), pair, strict=True))
        for pair in spelt
    }


def test_every_task_has_methods_to_look_at() -> None:
    for task in TASKS:
        assert task in UNITS
        assert len(methods_of(task)) > 3
        assert methods_of(task)[:2] == [("none", "none"), ("bf16", "bf16")]


def test_other_methods_are_unknown() -> None:
    assert known_of("images", "quant:3", "quant:3") is None
    assert known_of("images", "auto:scratch", "auto:scratch") is None
    lossless = known_of("images", "bf16", "bf16")
    assert lossless is not None and lossless.loss == 0
