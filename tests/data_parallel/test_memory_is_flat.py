"""What methods and controllers remember does not grow with the number of steps."""

import gc
import sys
import types

import pytest
import torch
from replica_methods import LINKS, MAIN
from replica_runs import alone, exchange_of, exchanged, gradients

from mpcomp import TensorMeta
from mpcomp.adaptive.search import Search
from mpcomp.core.context import HISTORY_STEPS
from mpcomp.data_parallel.base import Controller, RunInfo
from mpcomp.data_parallel.methods import replica_method_of

#: What leads to all of the program.
_SHARED = (type, types.ModuleType, types.FunctionType, types.CodeType)


def held(root: object) -> int:
    """Bytes of all objects that are reached from one, tensors' storage included."""
    seen, waiting, total = set(), [root], 0
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, _SHARED):
            continue
        seen.add(id(found))
        total += sys.getsizeof(found)
        if isinstance(found, torch.Tensor):
            total += found.untyped_storage().nbytes()
        waiting += gc.get_referents(found)
    return total


@pytest.mark.parametrize("spec", MAIN)
def test_an_exchange(spec):
    """Of every method, with a history of 10 steps: as much as 100 steps before.

    GraVAC's decisions, one a step here, are all there only after 200.
    """
    spec, first = spec.replace("window=5", "window=1"), 210 if spec.startswith("gravac") else 30
    like = {"wide": torch.zeros(7, 30), "bias": torch.zeros(8)}
    with alone():
        exchange = exchange_of(spec, like, history=10)
        given = [gradients(like, 0, step) for step in range(5)]
        sizes = []
        for step in range(first + 100):
            exchanged(exchange, given[step % 5])
            if step + 1 in (first, first + 100):
                sizes.append(held(exchange))
        assert abs(sizes[1] - sizes[0]) < 1000 < sizes[0]
        assert len(sizes) == 2 and len(exchange.history) == 10


def test_a_history_is_bounded_where_nothing_is_said():
    with alone():
        assert exchange_of("topk:0.1", {"a": torch.zeros(40, 40)}).history.maxlen == HISTORY_STEPS


@pytest.mark.parametrize(
    "spec",
    [
        f"gravac:cf=2-64:eps=0.5:window=2:{LINKS}+topk:0.1",
        "accordion:low=topk/0.5:high=topk/0.1:interval=3",
        "dgc:0.1:warmup_steps=20",
    ],
)
def test_a_controller_over_thousands_of_steps(spec):
    setting = RunInfo(4, {f"w{i}": TensorMeta((30, 20)) for i in range(3)})
    controller = replica_method_of(spec).controller(setting)

    assert isinstance(controller, Controller)
    sizes = []
    for number in range(4000):
        controller.begin(number, 0.1 / (1 + number % 7))
        sums = [1.0 + (number * k) % 5 for k in range(len(controller.figures()))]
        controller.end(sums, finite=number % 11 > 0, traffic_bytes=1000.0 * (number % 3))
        if number in (1999, 3999):  # of what goes into every checkpoint as well
            sizes.append((held(controller), len(repr(controller.state_dict()))))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_a_search_remembers_its_last_decisions():
    search = Search((2.0, 64.0), window=2)
    for number in range(1000):
        search.average(0.9, 0.5)
        search.record("minimum", 0.1 + number % 3)
        search.end_step()
    assert len(search.history) == 200 and search.history[-1]["step"] == 1000
    other = Search((2.0, 64.0), window=2)
    other.load_state_dict(search.state_dict())
    other.end_step(), other.end_step()
    assert len(other.history) == 200 and other.history[-1]["step"] == 1002
    assert other.history[:-1] == search.history[1:]
