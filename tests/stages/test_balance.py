"""`balance`: exact against brute force, and a measurement that leaves the model as it was."""

import copy
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_models import FreeResNet, images
from torch import nn

from stages import balance, blocks, partition, resnet18, seconds, split

SIZES = st.lists(st.integers(0, 20), min_size=1, max_size=8)


def every_split(num_units: int, num_stages: int) -> list[list[int]]:
    cuts = combinations(range(1, num_units), num_stages - 1)
    return [[j - i for i, j in pairwise([0, *cut, num_units])] for cut in cuts]


def loads(sizes: list[int], counts: list[int]) -> list[int]:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [sum(sizes[i:j]) for i, j in pairwise(ends)]


def loads_per_stage(rows: list[list[int]], counts: list[int]) -> list[int]:
    return [loads(row, counts)[stage] for stage, row in enumerate(rows)]


def at_cuts(prices: list[int], counts: list[int]) -> int:
    return sum(prices[sum(counts[:i]) - 1] for i in range(1, len(counts)))


@settings(deadline=None, max_examples=150)
@given(SIZES, st.data())
def test_partition_is_exact(sizes, data):
    num_stages = data.draw(st.integers(1, len(sizes)))
    counts = partition(sizes, num_stages)
    options = every_split(len(sizes), num_stages)
    assert counts in options
    best = min(max(loads(sizes, option)) for option in options)
    assert max(loads(sizes, counts)) == best
    even = [o for o in options if max(loads(sizes, o)) == best]
    assert sum(x**2 for x in loads(sizes, counts)) == min(
        sum(x**2 for x in loads(sizes, option)) for option in even
    )


@settings(deadline=None, max_examples=150)
@given(SIZES, st.data())
def test_partition_by_price_is_exact(sizes, data):
    num_stages = data.draw(st.integers(1, len(sizes)))
    prices = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    slack = data.draw(st.sampled_from([0.0, 0.25, 1.0]))
    counts = partition(sizes, num_stages, slack=slack, prices=prices)
    options = every_split(len(sizes), num_stages)
    limit = min(max(loads(sizes, option)) for option in options) * (1 + slack)
    allowed = [option for option in options if max(loads(sizes, option)) <= limit]
    assert counts in allowed
    assert at_cuts(prices, counts) == min(at_cuts(prices, option) for option in allowed)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_partition_for_unequal_machines_is_exact(data):
    num_units = data.draw(st.integers(1, 8))
    num_stages = data.draw(st.integers(1, num_units))
    line = st.lists(st.integers(0, 20), min_size=num_units, max_size=num_units)
    rows = data.draw(st.lists(line, min_size=num_stages, max_size=num_stages))
    prices = data.draw(st.none() | line)
    slack = data.draw(st.sampled_from([0.0, 0.25, 1.0]))
    counts = partition(rows, num_stages, slack=slack, prices=prices)

    def cost(option: list[int]) -> int:
        if prices is None:
            return sum(x**2 for x in loads_per_stage(rows, option))
        return at_cuts(prices, option)

    options = every_split(num_units, num_stages)
    limit = min(max(loads_per_stage(rows, option)) for option in options) * (1 + slack)
    allowed = [option for option in options if max(loads_per_stage(rows, option)) <= limit]
    assert counts in allowed
    assert cost(counts) == min(cost(option) for option in allowed)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.data())
def test_machines_that_are_alike_need_one_list(sizes, data):
    num_stages = data.draw(st.integers(1, len(sizes)))
    assert partition([sizes] * num_stages, num_stages) == partition(sizes, num_stages)


@pytest.mark.parametrize(
    ("slow", "expected"), [(0, [8, 16, 16]), (1, [16, 8, 16]), (2, [16, 16, 8])]
)
def test_a_machine_twice_as_slow_gets_half_the_work(slow, expected):
    times = [[0.01 * (1 + (stage == slow))] * 40 for stage in range(3)]
    assert partition(times, 3) == expected


def test_a_machine_gets_the_units_it_is_good_at():
    assert partition([1, 1, 1, 1], 2) == [2, 2]
    assert partition([[1, 9, 9, 9], [1, 1, 1, 1]], 2) == [1, 3]
    assert partition([[1, 1, 1, 1], [9, 9, 9, 1]], 2) == [3, 1]


@pytest.mark.parametrize(
    ("sizes", "num_stages", "error", "message"),
    [
        ([[1, 2, 3]], 2, ValueError, "lists for 1 stages, but the number of stages is 2"),
        ([[1, 2, 3]] * 3, 2, ValueError, "lists for 3 stages, but the number of stages is 2"),
        ([[1, 2, 3], [1, 2]], 2, ValueError, r"hold \[3, 2\] units"),
        ([[1, 2], 3], 2, TypeError, "1 numbers beside 1 lists"),
        ([[1], [1]], 2, ValueError, r"more stages \(2\) than blocks \(1\)"),
        ([], 1, ValueError, r"more stages \(1\) than blocks \(0\)"),
        ([1, 2], 0, ValueError, "number of stages is 0"),
        ([1, 2], 2.0, TypeError, "accepted is an int"),
        ([1, -2], 2, ValueError, "sizes holds -2; accepted is finite numbers of 0 or more"),
        ([[1, 2], [1, float("nan")]], 2, ValueError, "sizes holds nan"),
        ([[1, 2], [1, float("inf")]], 2, ValueError, "sizes holds inf"),
    ],
)
def test_sizes_that_do_not_fit(sizes, num_stages, error, message):
    with pytest.raises(error, match=message):
        partition(sizes, num_stages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slack": -0.1}, "slack is -0.1"),
        ({"prices": [1, 2]}, "2 prices for 3 units"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        partition([1, 2, 3], 2, **options)


def test_measured_times_give_a_split():
    model = resnet18(width=4)
    units = blocks(model)
    times = [seconds(units, images(), repeats=1) for _ in range(2)]  # each on its own rank
    counts = partition(times, 2)
    assert [len(stage.block_names) for stage in split(model, counts)] == counts


def test_by_parameters_is_what_split_does():
    model = resnet18(width=4)
    counts = balance(model, 4)
    assert len(counts) == 4 and sum(counts) == 14
    assert [len(stage.block_names) for stage in split(model, 4)] == counts


class Slow(nn.Module):
    def forward(self, x):
        for _ in range(300):
            x = x + 1
        return x


def test_by_time_finds_the_slow_blocks():
    # By parameters the first block is all there is; by time the last two are.
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Identity(), Slow(), Slow())
    assert balance(model, 2, by="time", sample=torch.randn(2, 8)) == [4, 1]
    assert balance(model, 2, by="parameters") != [4, 1]


def test_by_bytes_cuts_where_the_activation_is_small():
    sizes = [(4, 4), (4, 2), (2, 64), (64, 4)]
    model = nn.Sequential(*(nn.Linear(i, o) for i, o in sizes))
    x = torch.randn(3, 4)
    for slack, expected in ((0.0, [3, 1]), (1.0, [2, 2])):
        counts = balance(model, 2, by="bytes", sample=x, slack=slack, load="parameters")
        assert counts == expected


@pytest.mark.parametrize("build", [lambda: resnet18(width=4), FreeResNet])
@pytest.mark.parametrize("by", ["time", "bytes"])
def test_measuring_leaves_everything_as_it_was(build, by):
    model = nn.Sequential(build(), nn.Dropout(0.5)) if build is FreeResNet else build()
    model.train()
    next(model.modules()).training = False
    model(images()).sum().backward()
    x = images().requires_grad_()
    state = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    flags = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    counts = balance(model, 2, by=by, sample=x)
    assert sum(counts) == len(blocks(model))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is None


def test_measured_under_no_grad_still_counts_the_backward():
    ran = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ran.append(1)
            return gradient

    class Watched(nn.Module):
        def forward(self, x):
            return Spy.apply(x)

    with torch.no_grad():
        assert len(seconds(blocks(nn.Sequential(Watched())), torch.ones(2), repeats=3)) == 1
    assert len(ran) == 4  # three, and one that warms up


@pytest.mark.parametrize("sample", [torch.ones(2, 3), (torch.ones(2, 3),), {"x": torch.ones(2, 3)}])
def test_a_sample_is_a_tensor_a_tuple_or_a_mapping(sample):
    class First(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model = nn.Sequential(First(3, 3), nn.Linear(3, 3))
    assert balance(model, 2, by="time", sample=sample) == [1, 1]


@pytest.mark.parametrize(
    ("num_stages", "options", "message"),
    [
        (0, {}, "number of stages is 0; accepted is 1 or more"),
        (-1, {}, "number of stages is -1"),
        (15, {}, r"more stages \(15\) than blocks \(14\)"),
        (2, {"by": "time"}, "by='time' needs a sample"),
        (2, {"by": "bytes"}, "by='bytes' needs a sample"),
        (2, {"by": "parameter"}, "by is 'parameter'.* did you mean 'parameters'"),
        (2, {"by": "bytes", "load": "tme", "sample": images()}, "load is 'tme'.*'time'"),
        (2, {"slack": -0.1}, "slack is -0.1"),
        (2, {"slack": float("nan")}, "slack is nan"),
    ],
)
def test_bad_values(num_stages, options, message):
    with pytest.raises(ValueError, match=message):
        balance(resnet18(width=4), num_stages, **options)


@pytest.mark.parametrize("num_stages", [2.0, True, "2"])
def test_bad_number_of_stages(num_stages):
    with pytest.raises(TypeError, match="accepted is an int"):
        balance(resnet18(width=4), num_stages)


@pytest.mark.parametrize("by", ["time", "bytes"])
def test_a_block_that_gives_no_tensor(by):
    model = nn.Sequential(nn.LSTM(3, 3), nn.Identity())
    with pytest.raises(TypeError, match="block '0' returned a tuple; accepted is one tensor"):
        balance(model, 2, by=by, sample=torch.ones(2, 3))
    with pytest.raises(TypeError, match="block '0' returned a tuple"):
        blocks(model, sample=torch.ones(2, 3))
