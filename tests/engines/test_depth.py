"""Depth of the pipeline: what is tried, what memory allows, and how that is counted."""

import pytest
import torch
from models import mlp, rows
from torch import nn

from mpcomp.engines.in_flight import DepthSearch, SavedBytes, deepest_within
from mpcomp.engines.schedules import warmup_of


def alone(figures):
    """One rank's sum."""
    return list(figures)


def run(search, seconds_of, most=100):
    """Steps that take ``seconds_of(depth)``; returns the depths in turn."""
    depths = []
    while not search.finished:
        depths.append(search.depth)
        search.note(seconds_of(search.depth))
        assert len(depths) < most
    return depths


# -- the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_stages, chunks, limit, candidates",
    [
        (4, 16, 16, [4, 7, 11, 16]),
        (2, 8, 8, [2, 3, 5, 8]),
        (4, 16, 9, [4, 7, 9]),
        (4, 16, 2, [2]),
        (4, 3, 3, [3]),
        (3, 5, 5, [3, 5]),
        (8, 1, 1, [1]),
        (4, 16, 0, [1]),
    ],
)
def test_depths_that_are_tried(num_stages, chunks, limit, candidates):
    """1F1B, the default, between it and all, and all; never more than chunks or memory allow."""
    search = DepthSearch(num_stages, chunks, limit, alone)
    assert search.candidates == candidates
    assert search.depth == candidates[0]
    assert search.finished == (len(candidates) == 1)


def test_one_candidate_needs_no_steps():
    """And no agreement, which the other ranks would not come to."""

    def never(figures):
        raise AssertionError("agreed about nothing")

    search = DepthSearch(4, 2, 2, never)
    assert search.finished and search.depth == 2
    for _ in range(10):
        search.note(1.0)
    assert search.depth == 2


def test_each_depth_gets_as_many_steps_in_turn():
    search = DepthSearch(4, 16, 16, alone)
    assert run(search, lambda depth: 1 / depth) == [4] * 4 + [7] * 4 + [11] * 4 + [16] * 4
    assert search.finished and search.depth == 16
    search.note(0.0)
    assert search.depth == 16


@pytest.mark.parametrize(
    "seconds, chosen",
    [
        ({4: 1.00, 7: 1.00, 11: 1.00, 16: 1.00}, 4),
        ({4: 1.02, 7: 1.00, 11: 1.00, 16: 1.00}, 4),
        ({4: 1.04, 7: 1.00, 11: 1.00, 16: 1.00}, 7),
        ({4: 1.50, 7: 1.04, 11: 1.02, 16: 1.00}, 11),
        ({4: 2.00, 7: 1.50, 11: 1.20, 16: 1.00}, 16),
        ({4: 1.50, 7: 1.00, 11: 1.20, 16: 1.30}, 7),
        ({4: 1.00, 7: 1.10, 11: 1.20, 16: 1.30}, 4),
    ],
)
def test_the_smallest_within_three_percent_of_the_best(seconds, chosen):
    search = DepthSearch(4, 16, 16, alone)
    run(search, seconds.__getitem__)
    assert search.depth == chosen


def test_the_first_step_at_a_depth_and_an_outlier_do_not_count():
    """A change of depth begins with buffers to be made; one stall is no property of a depth."""
    search = DepthSearch(2, 8, 8, alone)
    for depth in (2, 3, 5, 8):
        assert search.depth == depth
        typical = 1.0 if depth == 5 else 2.0
        for seconds in (99.0, typical, 50.0 if depth == 5 else typical, typical):
            search.note(seconds)
    assert search.depth == 5


def test_all_ranks_choose_what_their_sum_says():
    """Two ranks whose own times would lead them apart."""
    seconds = [{2: 1.0, 3: 1.1, 5: 3.0, 8: 9.0}, {2: 9.0, 3: 3.0, 5: 1.0, 8: 1.0}]
    each = [DepthSearch(2, 8, 8, alone) for _ in seconds]
    for search, of_depth in zip(each, seconds, strict=True):
        run(search, of_depth.__getitem__)
    assert [search.depth for search in each] == [2, 5]

    asked = []

    def total(figures):
        """What an all-reduce gives."""
        asked.append(list(figures))
        return [sum(of_depth[depth] for of_depth in seconds) for depth in (2, 3, 5, 8)]

    together = [DepthSearch(2, 8, 8, total) for _ in seconds]
    while not together[0].finished:
        assert together[0].depth == together[1].depth
        for search, of_depth in zip(together, seconds, strict=True):
            search.note(of_depth[search.depth])
    assert [search.depth for search in together] == [3, 3]  # of 10, 4.1, 4 and 10 seconds
    assert asked == [list(of_depth.values()) for of_depth in seconds]  # once a rank, in one go


# -- what memory allows ---------------------------------------------------------------------------


def most_alive(stage, num_stages, chunks, depth):
    """Microbatches of a stage that wait for their backward, at the most: the schedule, played."""
    warmup = min(chunks, warmup_of(stage, num_stages, depth))
    alive, most, forwards = warmup, warmup, warmup
    for _ in range(chunks):
        alive -= 1
        if forwards < chunks:
            alive, forwards = alive + 1, forwards + 1
        most = max(most, alive)
    return most


@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_the_deepest_that_fits_is_the_deepest_that_fits(num_stages, chunks):
    """Brute force: the stage's peak is within the bound, and one more would not be."""
    for stage in range(num_stages):
        for size in (1, 7, 100):
            for bound in (0, 1, 6, 7, 20, 99, 100, 101, 350, 799, 800, 10**6):
                depth = deepest_within(bound, {stage: size}, num_stages, chunks)
                fits = [
                    d
                    for d in range(1, chunks + 1)
                    if most_alive(stage, num_stages, chunks, d) * size <= bound
                ]
                assert depth == max(fits, default=0), (stage, size, bound)


def test_stages_of_one_rank_share_its_memory():
    kept = {0: 100, 2: 10}
    for bound in range(0, 1000, 30):
        depth = deepest_within(bound, kept, 4, 8)
        used = [warmup_of(0, 4, d) * 100 + warmup_of(2, 4, d) * 10 for d in range(1, 9)]
        assert depth == sum(size <= bound for size in used)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_warm_up_falls_from_the_first_stage_to_one(num_stages):
    for depth in range(1, 20):
        warmups = [warmup_of(stage, num_stages, depth) for stage in range(num_stages)]
        assert warmups == sorted(warmups, reverse=True) and warmups[-1] == 1
        assert num_stages == 1 or warmups[0] == depth
        if depth == num_stages:
            assert warmups == list(range(num_stages, 0, -1))  # 1F1B


# -- counting what is kept ------------------------------------------------------------------------


def kept_by(module, x):
    saved = SavedBytes()
    with saved.counting(list(module.parameters())):
        output = module(x)
    return saved, output


def test_bytes_of_a_known_net():
    """The input once, the output of the ReLU once though two layers need it; no weights."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    saved, output = kept_by(net, torch.randn(5, 4))
    assert saved.total == 4 * (5 * 4 + 5 * 8)
    saved.add(output)
    assert saved.total == 4 * (5 * 4 + 5 * 8 + 5 * 3)
    saved.add(output)
    saved.add(output.view(-1)[2:])  # of the same memory
    assert saved.total == 4 * (5 * 4 + 5 * 8 + 5 * 3)


def test_half_precision_counts_half():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).to(torch.bfloat16)
    saved, output = kept_by(net, torch.randn(5, 4, dtype=torch.bfloat16))
    saved.add(output)  # which the tanh keeps itself
    assert saved.total == 2 * (5 * 4 + 5 * 8)


def test_weights_are_kept_anyway():
    """Not even where autograd saves a transposed view of them."""
    net = nn.Linear(4, 8, bias=False)
    saved, _ = kept_by(net, torch.randn(5, 4, requires_grad=True))
    assert saved.total == 4 * 5 * 4
    saved, _ = kept_by(net.requires_grad_(False), torch.randn(5, 4))
    assert saved.total == 0


def test_the_batch_is_kept_anyway():
    """A microbatch is a view of it: counting it would count the whole batch for each of them."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    batch = torch.randn(60, 4)
    saved = SavedBytes()
    with saved.counting([*net.parameters(), batch]):
        net(batch[:5])
    assert saved.total == 4 * 5 * 8


def test_nothing_is_counted_outside_the_block():
    net = mlp()
    saved, _ = kept_by(net, rows(6)[0])
    before = saved.total
    assert before > 0
    net(rows(6)[0])
    with torch.no_grad(), saved.counting(list(net.parameters())):
        net(rows(6)[0])
    assert saved.total == before


def test_counting_does_not_change_gradients():
    net = mlp()
    x, _ = rows(6)
    net(x).sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    _, output = kept_by(net, x)
    output.sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), expected, strict=True))
