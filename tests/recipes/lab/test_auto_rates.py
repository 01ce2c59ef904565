"""The choices of ``auto`` at several rates, in committed rows, against the best fixed setting."""

import itertools

import pytest

from recipes.lab.auto_rates import MACHINES, OUT, RATES, TASKS, Row, rows_of
from recipes.run_folder import read_json_lines

ROWS = [Row(**row) for row in read_json_lines(OUT)]


def test_there_is_a_row_of_each_task_rate_and_machine():
    assert [(row.gflops, row.task, row.mbps) for row in ROWS] == list(
        itertools.product(MACHINES, TASKS, RATES)
    )


def test_auto_loses_little_to_the_best_fixed_setting():
    assert [row for row in ROWS if row.step_s > 1.05 * row.best_s] == []


def test_it_compresses_on_slow_links_and_less_on_faster_ones():
    for _, rows in itertools.groupby(ROWS, key=lambda row: (row.gflops, row.task)):
        slowest, *_, fastest = rows
        assert slowest.sends == TASKS[slowest.task].word == slowest.best
        assert "bf16" in fastest.sends or fastest.best == fastest.sends


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ResNet-18 from scratch", "small GPT-2 of your own"])
@pytest.mark.parametrize("gflops", MACHINES)
def test_rows_are_what_the_simulation_gives(task, gflops):
    found = list(rows_of(task, gflops))
    kept = [row for row in ROWS if (row.task, row.gflops) == (task, gflops)]
    for ours, theirs in zip(found, kept, strict=True):
        assert (ours.sends, ours.best) == (theirs.sends, theirs.best)
        assert ours.step_s == pytest.approx(theirs.step_s)
        assert ours.best_s == pytest.approx(theirs.best_s)
