"""Depth of the engine's own schedule: no number depends on it, and memory can limit it."""

import pytest
import torch
import torch.nn.functional as F
from everyday import by_halves
from methods import same_bits
from models import MLP_SPLIT, mlp, rows, sgd
from torch import nn

import mpcomp

CHUNKS, NUM_STAGES = 6, 3
#: Steps that `in_flight="auto"` measures: 3, 5 and 6 microbatches, 4 steps each.
SEARCH = 12
#: What one microbatch of 2 rows keeps for backward at each stage, in bytes: outputs of tanh and
#: ReLU, the activations that arrived, and the logits; no weights, and nothing of the batch.
KEPT = (2 * 19 * 4, 2 * (19 + 17) * 4, 2 * (17 + 5) * 4)


def train(options, num_steps, alone=False):
    """Losses, weights and the depth of each step."""
    torch.manual_seed(0)
    options = {"act_comp": "ef21+topk:0.3", "grad_comp": "ef+topk:0.3", **options}
    if not alone:
        options["timeout"] = 60.0
    engine = "local" if alone else None
    pipe = mpcomp.pipeline(
        mlp(), CHUNKS, split=MLP_SPLIT, loss_fn=F.cross_entropy, engine=engine, **options
    )
    optimizer = sgd(pipe)
    losses, depths = [], []
    for step in range(num_steps):
        depths.append(pipe.engine.in_flight)
        losses.append(pipe.forward_backward(*rows(2 * CHUNKS, seed=step)))
        optimizer.step()
        optimizer.zero_grad()
    depths.append(pipe.engine.in_flight)
    return torch.stack(losses), dict(pipe.merge().state_dict()), depths, pipe.wire_bytes


def train_all(cases):
    return [train(options, num_steps) for options, num_steps in cases]


def check(results, num_steps):
    """Every rank's losses, weights and bytes are those of one process."""
    losses, weights, _, wire_bytes = train({}, num_steps, alone=True)
    for ours, state, _, sent in results:
        assert same_bits(ours, losses)
        assert all(same_bits(state[name], value) for name, value in weights.items())
        assert sent == wire_bytes


def test_results_do_not_depend_on_the_depth(ranks):
    """One, as many as stages, the default, all, more than there are, and what is measured."""
    steps = dict.fromkeys((1, NUM_STAGES, None, CHUNKS, 100), 3) | {"auto": SEARCH + 2}
    cases = [({"in_flight": depth}, num_steps) for depth, num_steps in steps.items()]
    by_case = list(zip(*ranks(train_all, NUM_STAGES, cases), strict=True))
    for (depth, num_steps), results in zip(steps.items(), by_case, strict=True):
        check(results, num_steps)
        depths = [depths for _, _, depths, _ in results]
        assert depths[0] == depths[1] == depths[2]  # of every step, so the choice is one too
        if depth == "auto":
            assert depths[0][:SEARCH] == [3] * 4 + [5] * 4 + [6] * 4
            chosen = set(depths[0][SEARCH:])
            assert len(chosen) == 1 and chosen < {3, 5, 6}
        else:
            expected = 2 * NUM_STAGES - 1 if depth is None else min(depth, CHUNKS)
            assert set(depths[0]) == {expected}


LIMITED = [
    ({"in_flight_bytes": max(KEPT)}, 1),  # the middle stage has room for one
    ({"in_flight_bytes": 2 * max(KEPT)}, 3),  # for two, so that the first has three
    ({"in_flight_bytes": 3 * max(KEPT)}, NUM_STAGES + 2),  # no longer what limits
    ({"in_flight_bytes": 10**6}, NUM_STAGES + 2),
    ({"in_flight_bytes": 1e6, "in_flight": 4}, 4),
    ({"in_flight_bytes": 2 * max(KEPT), "in_flight": 2}, 2),
    ({"in_flight_bytes": 2 * max(KEPT), "in_flight": CHUNKS}, 3),
]


@pytest.mark.parametrize("cases", by_halves(LIMITED))
def test_memory_limits_the_depth(ranks, cases):
    """The first step goes one deep, then as deep as the tightest rank allows."""
    runs = [(options, 3) for options, _ in cases]
    by_case = list(zip(*ranks(train_all, NUM_STAGES, runs), strict=True))
    for (options, depth), results in zip(cases, by_case, strict=True):
        check(results, 3)
        for _, _, depths, _ in results:
            assert depths == [1, depth, depth, depth], options


@pytest.mark.slow
def test_a_search_within_a_memory_bound(ranks):
    """Depths beyond the bound are not even tried."""
    num_steps = 1 + SEARCH
    cases = [
        ({"in_flight": "auto", "in_flight_bytes": 10**6}, num_steps),
        ({"in_flight": "auto", "in_flight_bytes": 2 * max(KEPT)}, num_steps),
    ]
    by_case = list(zip(*ranks(train_all, NUM_STAGES, cases), strict=True))
    for results in by_case:
        check(results, num_steps)
        assert results[0][2] == results[1][2] == results[2][2]
    # The first step counts as the one at the first depth that is left out.
    free, bound = (results[0][2] for results in by_case)
    assert free[:SEARCH] == [1] + [3] * 3 + [5] * 4 + [6] * 4
    assert free[SEARCH] == free[-1] and free[-1] in (3, 5, 6)
    assert bound == [1] + [3] * num_steps


def too_little(bound):
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(
        mlp(),
        CHUNKS,
        split=MLP_SPLIT,
        loss_fn=F.cross_entropy,
        in_flight_bytes=bound,
        act_comp="topk:0.3",
        timeout=60.0,
    )
    with pytest.raises(ValueError) as caught:
        pipe.forward_backward(*rows(2 * CHUNKS))
    return str(caught.value)


@pytest.mark.parametrize("bound", [1, max(KEPT) - 1])
def test_one_microbatch_that_does_not_fit(ranks, bound):
    """On every rank, though two of three would have room."""
    errors = ranks(too_little, NUM_STAGES, bound)
    assert errors[0] == errors[1] == errors[2]
    assert errors[0] == (
        f"in_flight_bytes={bound}: one microbatch keeps {max(KEPT)} bytes; allow more, use more "
        "chunks, or recompute=True"
    )


def wide():
    """Stages that keep much, of which recomputation keeps the ends."""
    layers = [nn.Sequential(nn.Linear(13, 200), nn.Tanh(), nn.Linear(200, 13)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(13, 5))


def depth_with(recompute):
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(
        wide(),
        CHUNKS,
        split=["1"],
        loss_fn=F.cross_entropy,
        in_flight_bytes=2 * (2 * 2 * 200 + 2 * 2 * 13) * 4,
        recompute=recompute,
        timeout=60.0,
    )
    losses = [pipe.forward_backward(*rows(2 * CHUNKS)) for _ in range(2)]
    return torch.stack(losses), pipe.engine.in_flight


def depths_with_and_without():
    return [depth_with(recompute) for recompute in (False, True)]


def test_recomputation_makes_room(ranks):
    """As the error about memory says."""
    for (losses, depth), (same, deeper) in ranks(depths_with_and_without, 2):
        assert same_bits(losses, same)
        assert (depth, deeper) == (2, 3)  # 3 is the default of two stages
