"""The everyday suite leaves out no value of a parameter, whatever lists stand together."""

from pathlib import Path

import pytest
from everyday import LONG, by_halves, round_of, slow_after, slow_but, slow_but_one_a_class, together
from hypothesis import given
from hypothesis import strategies as st

from mpcomp import Identity, TopK

FIRST, SECOND, THIRD = range(7), range(3), range(2)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_every_value_of_every_list_has_its_turn(lengths):
    lengths = tuple(sorted(lengths, reverse=True))
    turns = [together(turn, lengths) for turn in range(lengths[0])]
    for i, length in enumerate(lengths):
        assert {places[i] for places in turns} == set(range(length))


def test_short_lists_do_not_march_in_step():
    pairs = {together(turn, (9, 3, 2))[1:] for turn in range(9)}
    assert pairs == {(a, b) for a in range(3) for b in range(2)}


@pytest.mark.each_once
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("second, same", [(i, i) for i in SECOND])
@pytest.mark.parametrize("third", THIRD)
def test_what_is_in_turn_is_not_slow(first, second, same, third, request):
    marked = request.node.get_closest_marker("slow") is not None
    assert round_of(request.node) == int(marked)
    turns = {together(turn, (len(FIRST), len(SECOND), len(THIRD))) for turn in FIRST}
    if marked:  # the second round has the values that follow
        second, third = (second - 1) % len(SECOND), (third - 1) % len(THIRD)
    assert (first, second, third) in turns


def test_long_files_are_there_and_begin(request):
    there = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert all(there.count(name) == 1 for name in LONG)
    turns = [item.path.name for item in request.session.items]
    places = [LONG.index(name) if name in LONG else len(LONG) for name in turns]
    assert places == sorted(places)


def values(parameters):
    """Those that are not slow."""
    return [value for value in parameters if not hasattr(value, "marks")]


def test_parameters_that_stay():
    assert values(slow_after(2, "abc")) == ["a", "b"]
    assert values(slow_but("ca", "abc")) == ["a", "c"]
    methods = [TopK(0.1), TopK(0.2), Identity()]
    assert values(slow_but_one_a_class(methods)) == [TopK(0.1), Identity()]
    (half,), (rest,) = (parameter.values for parameter in by_halves("abcde"))
    assert (half, rest) == (["a", "c", "e"], ["b", "d"])
    assert [bool(parameter.marks) for parameter in by_halves("abcde")] == [False, True]
    for found in (slow_after(2, "abc"), slow_but("c", "abc"), slow_but_one_a_class("abc")):
        assert len(found) == 3
    with pytest.raises(AssertionError, match=r"no such parameters: \['d'\]"):
        slow_but("ad", "abc")
