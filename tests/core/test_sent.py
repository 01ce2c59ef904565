"""Totals of what was sent: the one factor, and its absence where something was not counted."""

import json
import math

import pytest

from mpcomp.core.sent import Sent, below_bf16, below_bf16_text


@pytest.mark.parametrize(
    "bytes_of_an_element, factor", [(2, 1.0), (4, 0.5), (8, 0.25), (0.25, 8.0)]
)
def test_bf16_is_one(bytes_of_an_element, factor):
    assert below_bf16(1000 * bytes_of_an_element, 1000) == factor
    assert Sent(1000 * bytes_of_an_element, 4000, 1000).below_bf16 == factor


def test_text_of_a_factor():
    assert [below_bf16_text(factor) for factor in (0.5, 8.26, 34.0, None)] == [
        *("0.5", "8.3", "34.0", ""),
    ]


def test_nothing_sent_has_no_factor():
    assert Sent().below_bf16 is None and math.isnan(Sent().wire_ratio)
    assert Sent(0, 40, 10).below_bf16 is None  # a step in which nothing goes


def test_sums_differences_and_means():
    total = sum([Sent(10, 40, 10), Sent(30, 40, 20)], Sent())
    assert total == Sent(40, 80, 30) and total.wire_ratio == 0.5 and total.below_bf16 == 1.5
    assert total - Sent(10, 40, 10) == Sent(30, 40, 20)
    assert 0.5 * total == Sent(20, 40, 15)


def test_what_was_not_counted_stays_unknown():
    old = Sent.from_dict({"wire_bytes": 10, "dense_bytes": 40, "step": 3})
    total = old + Sent(10, 40, 10)
    assert total.below_bf16 is None and total.wire_ratio == 0.25
    said = json.loads(json.dumps(total.to_dict(), allow_nan=False))
    assert said == {"wire_bytes": 20, "dense_bytes": 80, "num_elements": None}
    assert Sent.from_dict(said).below_bf16 is None


def test_whole_numbers_come_back_from_a_sum_of_floats():
    found = Sent.of([10.0, 40.0, math.nan])
    assert (found.wire_bytes, found.dense_bytes) == (10, 40) and type(found.wire_bytes) is int
    assert found.below_bf16 is None
