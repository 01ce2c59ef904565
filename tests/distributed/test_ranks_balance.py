"""Stages by measured time: a slow machine gets less to do, and all ranks cut alike."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import slow_after
from methods import same_bits
from models import CLASSES, MLP_SPLIT, mlp, rows, sgd
from torch import nn

import mpcomp

NUM_BLOCKS = 21


class Slow(nn.Module):
    """Takes its time, on one rank more than on the others: by a clock that nothing else moves."""

    clock_s = 0.0

    def __init__(self, slow_rank):
        super().__init__()
        self.slow_rank = slow_rank

    def forward(self, x):
        here = dist.get_rank() if dist.is_initialized() else None
        Slow.clock_s += 0.012 if here == self.slow_rank else 0.003
        return x * 1.0


class Quick(nn.Linear):
    """By the same clock a tenth of the others, on every rank."""

    def forward(self, x):
        Slow.clock_s += 0.0003
        return super().forward(x)


def blocks(slow_rank):
    """Every second block has parameters."""
    layers = [Slow(slow_rank) if i % 2 == 0 else Quick(13, 13) for i in range(NUM_BLOCKS - 1)]
    return nn.Sequential(*layers, nn.Linear(13, CLASSES))


def by_that_clock():
    """Within it, the time that is measured is what the blocks say."""
    return mock.patch.object(time, "perf_counter", lambda: Slow.clock_s)


@by_that_clock()
def balanced(slow_rank, replicas):
    """Block counts, and the losses of two steps cut like that, there and in one process."""
    torch.manual_seed(0)
    sample = rows(3)[0]
    options = {"loss_fn": F.cross_entropy, "act_comp": "topk:0.3"}
    pipe = mpcomp.pipeline(
        blocks(slow_rank),
        2,
        split="time",
        sample=sample,
        replicas=replicas,
        timeout=60.0,
        **options,
    )
    counts = [len(stage.block_names) for stage in pipe.cut_stages]
    torch.manual_seed(0)
    alone = mpcomp.pipeline(blocks(None), 2, split=counts, engine="local", **options)
    losses = []
    for each in (pipe, alone):
        optimizer = sgd(each)
        for step in range(2):
            losses.append(each.forward_backward(*rows(4, seed=step)))
            optimizer.step()
            optimizer.zero_grad()
    return counts, losses[:2], losses[2:]


@pytest.mark.parametrize("slow_rank", slow_after(1, [0, 1, 2]))
def test_a_slow_rank_gets_fewer_blocks(ranks, slow_rank):
    """A fourth as fast, so about a ninth of the blocks where an even cut has a third."""
    outcomes = ranks(balanced, 3, slow_rank, 1)
    counts = outcomes[0][0]
    assert all(found == counts for found, _, _ in outcomes)
    assert sum(counts) == NUM_BLOCKS and min(counts) >= 1
    others = [count for rank, count in enumerate(counts) if rank != slow_rank]
    assert counts[slow_rank] * 2 <= min(others), counts
    for _, losses, alone in outcomes:
        assert all(same_bits(a, b) for a, b in zip(losses, alone, strict=True))


def test_replicas_are_cut_alike(ranks):
    """The slowest machine at a place counts: here rank 2, the first stage of the second replica."""
    outcomes = ranks(balanced, 4, 2, 2)
    counts = outcomes[0][0]
    assert all(found == counts for found, _, _ in outcomes)
    assert counts[0] * 2 <= counts[1], counts


@by_that_clock()
def counts_of(schedule):
    pipe = mpcomp.pipeline(
        blocks(1),
        4,
        split="time",
        sample=rows(3)[0],
        schedule=schedule,
        loss_fn=F.cross_entropy,
        timeout=60.0,
    )
    pipe.collect(None)
    counts = [len(stage.block_names) for stage in pipe.cut_stages]
    return counts, sum(len(stage.block_names) for stage in pipe.stages)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_two_stages_a_rank_are_weighed_where_they_will_be(ranks, schedule):
    """Interleaved stages of ranks 0 1 0 1, V-shaped ones of 0 1 1 0; rank 1 is the slow one."""
    (counts, fast), (same, slow) = ranks(counts_of, 2, schedule)
    assert counts == same and len(counts) == 4
    assert fast + slow == NUM_BLOCKS
    assert slow * 2 <= fast, counts


def refused(make, options):
    """The error of making a pipeline, and whether the model is as it was."""
    torch.manual_seed(0)
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dist.barrier()  # else one rank may have ended while another joins the group
    begin = time.monotonic()
    try:
        pipe = mpcomp.pipeline(model, 2, loss_fn=F.cross_entropy, timeout=60.0, **options)
        pipe.collect(None)  # so that no rank ends while another is being connected
    except ValueError as error:
        whole = all(same_bits(model.state_dict()[k], v) for k, v in before.items())
        return str(error), whole, time.monotonic() - begin
    return "", False, 0.0


def test_a_rank_without_parameters_is_refused_on_all(ranks):
    """It could not even make an optimizer. No rank waits for another to find that out."""
    outcomes = ranks(refused, 3, mlp, {"split": ["one", "tanh"]})
    assert [error for error, _, _ in outcomes] == 3 * [
        "stage 1 (tanh) would be alone on its rank and has no parameters: there is nothing to give "
        "to an optimizer there; cut the model at another block"
    ]
    assert all(whole and seconds < 40 for _, whole, seconds in outcomes)


def bare():
    """Two stages a rank, of which the V-shaped placement gives one rank none with parameters."""
    return nn.Sequential(nn.Linear(13, 13), nn.ReLU(), nn.Tanh(), nn.Linear(13, CLASSES))


def test_two_stages_without_parameters_on_one_rank(ranks):
    """Stages 1 and 2 are rank 1's in a V; interleaved each rank has one with parameters."""
    options = {"split": [1, 1, 1, 1], "schedule": "ZBVZeroBubble"}
    outcomes = ranks(refused, 2, bare, options)
    for error, whole, _ in outcomes:
        assert error.startswith("stage 1 (1) and stage 2 (2) would be alone on its rank") and whole
    outcomes = ranks(refused, 2, bare, {**options, "schedule": "Interleaved1F1B"})
    assert [error for error, _, _ in outcomes] == ["", ""]


def test_a_sample_is_needed_on_all(ranks):
    outcomes = ranks(refused, 2, mlp, {"split": "time"})
    for error, whole, _ in outcomes:
        assert error.startswith("split='time' measures the model's blocks: pass sample=x") and whole


@pytest.mark.parametrize("num_stages", [2, 4])
def test_as_many_stages_as_ranks(ranks, num_stages):
    """The own schedule has one stage a rank."""
    outcomes = ranks(refused, 3, mlp, {"split": num_stages})
    for error, whole, _ in outcomes:
        assert f"{num_stages} stages on 3 ranks" in error and whole
    assert ranks(refused, 3, mlp, {"split": MLP_SPLIT})[0][0] == ""
