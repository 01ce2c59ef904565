"""The choice of tests that run every day; the others are marked slow, for the whole suite alone.

    @pytest.mark.each_once                       # of the 65 x 4 cases, 65: each compressor once,
    @pytest.mark.parametrize("dtype", FLOATS)    # and each dtype with every fourth of them; in the
    @pytest.mark.parametrize("compressor", COMPRESSORS)  # whole suite once more, with the next

    @pytest.mark.parametrize("schedule", slow_after(2, SCHEDULES))       # the first two
    @pytest.mark.parametrize("method", slow_but_one_a_class(FEEDBACK))   # the first of each class

Every law, method, engine and schedule stays in the everyday suite; what is marked are products of
what is tested one by one anyway, repetitions, and long runs.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

#: Files of few long tests, the longest first: they begin, or one worker is left with them.
LONG = (
    "test_commands_of_pages.py",
    "test_healing_launchers.py",
    "test_notebook.py",
    "test_fault_kinds.py",
    "test_healing_links.py",
    "test_ranks_dp.py",
    "test_launcher.py",
    "test_healing.py",
    "test_hf.py",
    "test_doctor.py",
    "test_ranks_checkpoint.py",
    "test_ranks_first_data.py",
    "test_soak.py",
    "test_ranks_background.py",
    "test_ranks_pipelining.py",
    "test_gpu_studies.py",
    "test_memory_generalizes.py",
    "test_stranger_feedback.py",
)


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of which the first ``count`` are run every day."""
    return [value if i < count else slow(value) for i, value in enumerate(values)]


def slow_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of which those in ``kept`` are run every day."""
    wanted, values = list(kept), list(values)
    missing = [value for value in wanted if value not in values]
    assert not missing, f"no such parameters: {missing}"
    return [value if value in wanted else slow(value) for value in values]


def slow_but_one(key: Callable[[Any], Hashable], values: Iterable[Any]) -> list[Any]:
    """Parameters of which the first of each key is run every day."""
    seen: set[Hashable] = set()
    found = []
    for value in values:
        found.append(slow(value) if key(value) in seen else value)
        seen.add(key(value))
    return found


def by_halves(values: Iterable[Any]) -> list[Any]:
    """Two lists of cases for a test that runs several at once: the first half is run every day."""
    values = list(values)
    return [
        pytest.param(values[::2], id="half"),
        pytest.param(values[1::2], id="rest", marks=pytest.mark.slow),
    ]


def slow_but_one_a_class(values: Iterable[Any]) -> list[Any]:
    """Parameters of which the first of each class is run every day."""
    return slow_but_one(type, values)


def slow(*values: Any) -> Any:
    """A parameter for the whole suite alone; several values where there are several names."""
    return pytest.param(*values, marks=pytest.mark.slow)


def round_of(item: pytest.Item) -> int | None:
    """The round in which a test's parameters are each in turn; None where they are in neither.

    In a round each value of each list comes once: as many cases stay as the longest list has. With
    the first of it goes the first of every other list, with the second the second, and so on.
    Lists begin again at their ends; where short ones would come together as before, the shorter
    goes on by one. Round 0 is run every day. In round 1, which is slow, every value of the longest
    list goes with those that follow. The rest of the product is left out: what a method does in
    one dtype and another, say, is seen in two of four.
    """
    axes = []
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args
        several = not isinstance(names, str) or "," in names
        first = (names.split(",") if isinstance(names, str) else names)[0].strip()
        given = [value[0] if several else value for value in map(_plain, values)]
        axes.append((len(given), _place(item.callspec.params[first], given)))  # type: ignore[attr-defined]
    axes.sort(key=lambda axis: -axis[0])
    lengths, places = zip(*axes, strict=True)
    turn = places[0]
    for number in range(2):
        first = together(turn, lengths)
        if places == (
            turn,
            *((p + number) % n for p, n in zip(first[1:], lengths[1:], strict=True)),
        ):
            return number
    return None


_Parameter = type(pytest.param())


def _plain(value: Any) -> Any:
    """The value inside a `pytest.param`, or the value itself."""
    if not isinstance(value, _Parameter):
        return value
    return value.values if len(value.values) > 1 else value.values[0]


def _place(value: Any, given: Sequence[Any]) -> int:
    """Index of the value: of the very object, if it is there, since NaN is equal to nothing."""
    same = [i for i, other in enumerate(given) if other is value]
    return same[0] if same else given.index(value)


def together(turn: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Of each list, the longest first, which of its values are together in this turn."""
    places = []
    for i, length in enumerate(lengths):
        around = math.lcm(*lengths[1 : i + 1]) if i > 1 else math.inf
        places.append(int(turn + turn // around) % length)
    return tuple(places)
