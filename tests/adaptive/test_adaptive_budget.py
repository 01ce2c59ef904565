"""Bytes shared out by gains: the greedy choice itself, and links that have a budget."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import CONV_SPLIT, MLP_SPLIT, convnet, images, mlp, rows

import mpcomp
from mpcomp import EF21, Adaptive, TensorMeta, TopK
from mpcomp.adaptive.budget import Ladder, bytes_at, share_out
from mpcomp.adaptive.gain import gain_of
from mpcomp.core.wire import Form

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


def test_bytes_go_where_the_gain_rises_most_for_them():
    steep = Ladder((0.9, 0.8, 0.5), (70.0, 30.0, 20.0), 100.0)
    flat = Ladder((0.99, 0.98, 0.97), (70.0, 30.0, 20.0), 100.0)
    assert share_out([steep, flat], 0.2) == [2, 2]
    assert share_out([steep, flat], 0.25) == [1, 2]  # 50 of 50
    assert share_out([steep, flat], 0.30) == [1, 1]  # 60
    assert share_out([steep, flat], 0.45) == [0, 2]  # 90; for `flat` nothing is left
    assert share_out([steep, flat], 0.50) == [0, 1]
    assert share_out([steep, flat], 0.70) == [0, 0]
    assert share_out([steep, flat], 0.01) == [2, 2]  # there is nothing smaller


def test_a_plateau_is_stepped_over():
    plateau = Ladder((0.9, 0.5, 0.5), (40.0, 20.0, 20.0), 100.0)
    assert share_out([plateau], 0.5) == [0]
    assert share_out([plateau], 0.3) == [2]


@given(
    gains=st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=4),
    budget=st.floats(0.2, 0.9),
)
def test_what_is_shared_out_fits_and_nothing_that_gains_is_left(gains, budget):
    sizes = (60.0, 35.0, 18.0, 10.0)
    ladders = [Ladder(sorted(one, reverse=True), sizes, 100.0) for one in gains]
    rungs = share_out(ladders, budget)
    spent = sum(sizes[rung] for rung in rungs)
    allowed = budget * 100 * len(ladders)
    assert spent <= allowed
    for ladder, rung in zip(ladders, rungs, strict=True):
        if rung and ladder.gains[rung - 1] > ladder.gains[rung]:
            assert spent + sizes[rung - 1] - sizes[rung] > allowed


def test_sizes_are_those_of_messages():
    method = Adaptive(TopK(0.1), cf=(1.0, 8.0))
    meta = TensorMeta((3, 40))
    dense, *sizes = bytes_at(method, meta)
    assert dense == meta.dense_bytes
    assert sizes[0] == 16 + dense  # TopK(1.0) would not shrink it
    for cf, size in zip(method.rungs[1:], sizes[1:], strict=True):
        assert size == Form(method.compressor(cf).layout(meta)).num_bytes


def pipe_of(act, grad, model=convnet, split=CONV_SPLIT, **kwargs):
    torch.manual_seed(0)
    options = {"loss_fn": F.cross_entropy, "engine": "local", **kwargs}
    return mpcomp.pipeline(model(), 2, split=split, act_comp=act, grad_comp=grad, **options)


def run(pipe, first, last, batch=images):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    for step in range(first, last):
        pipe.forward_backward(*batch(8, step))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("inner", [TopK(0.1), EF21(TopK(0.1), first=TopK(0.05))], ids=str)
def test_a_group_stays_within_its_budget(inner):
    method = Adaptive(inner, cf=(2, 50), budget=0.2, window=3, policy="geometric")
    pipe = pipe_of(method, method)
    before = 0, 0
    for step in range(8):
        run(pipe, step, step + 1)
        wire, dense = pipe.wire_bytes - before[0], pipe.dense_bytes - before[1]
        before = pipe.wire_bytes, pipe.dense_bytes
        assert wire <= 0.2 * dense
        assert wire > 0.1 * dense or step == 0  # EF21's first messages may be smaller
    first, *_, last = [
        [said["cf"] for said in entry["links"].values()] for entry in pipe.adaptive_history
    ]
    assert len(set(first)) == 1 and len(set(last)) > 1  # common at first, then each its own
    for link in pipe.links:
        gains = link.endpoint.policy.gains()
        assert list(gains) == list(method.rungs)
        if isinstance(inner, TopK):
            assert all(a >= b for a, b in itertools.pairwise(gains.values()))


def test_decisions_fall_at_the_start_of_windows():
    method = Adaptive(TopK(0.1), cf=(2, 50), budget=0.2, window=4, policy="geometric")
    pipe = pipe_of(method, method)
    run(pipe, 0, 13)
    cfs = [tuple(said["cf"] for said in e["links"].values()) for e in pipe.adaptive_history]
    changed = [i for i in range(1, 13) if cfs[i] != cfs[i - 1]]
    assert changed and all(i % 4 == 1 for i in changed)


def test_groups_are_by_value():
    a, b = (Adaptive(TopK(0.1), budget=share) for share in (0.1, 0.3))
    pipe = pipe_of(a, b)
    run(pipe, 0, 3)
    for way, share in (("act", 0.1), ("grad", 0.3)):
        traffic = [link.meter.train for link in pipe.links if link.direction == way]
        wire, dense = (sum(getattr(t, n) for t in traffic) for n in ("wire_bytes", "dense_bytes"))
        assert share * 0.5 * dense < wire <= share * dense


def test_a_budget_that_nothing_fits_is_refused_before_anything_is_sent():
    method = Adaptive(TopK(0.1), cf=(2, 8), budget=0.05)
    pipe = pipe_of(method, None)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"budget=0.05 of adaptive.*cf=8 everywhere takes 0.1"):
            pipe.forward_backward(*images(8))
    assert pipe.wire_bytes == 0 and pipe.num_steps == 0


def test_a_link_before_a_frozen_stage_needs_no_bytes():
    method = Adaptive(TopK(0.1), cf=(2, 50), budget=0.6, window=2, policy="geometric")
    pipe = pipe_of(method, method, mlp, MLP_SPLIT)
    for name, parameter in pipe.named_parameters():
        parameter.requires_grad_(not name.startswith("one"))
    run(pipe, 0, 5, rows)
    assert pipe.boundaries[0].grad.meter.train.messages == 0
    assert pipe.adaptive_history[-1]["links"]["1.grad"]["cf"] < 50


def test_skipped_and_uncompressed_steps_measure_nothing():
    method = Adaptive(TopK(0.1), cf=(2, 50), budget=0.3, window=3)
    pipe = pipe_of(method, method, warmup_steps=1)
    run(pipe, 0, 1)
    with pipe.compressed(act=True, grad=False):
        run(pipe, 1, 2)
    act, grad = pipe.boundaries[0].links
    assert act.endpoint.policy.gains() and not grad.endpoint.policy.gains()
    assert len({link.endpoint.policy.cf for link in pipe.links}) == 1  # a group decides together
    run(pipe, 2, 3)
    assert grad.endpoint.policy.gains()
    assert pipe.adaptive_history[0]["links"]["0.act"]["branch"] == "off"


def test_a_gain_below_zero_is_worth_what_it_rises_by():
    """A mean that compression drops costs more than all of the variance."""
    assert gain_of(1.0, [4.0, 0.5]) == [0.0, 0.5]
    assert gain_of(1.0, [4.0, 0.5, -1.0], clamped=False) == [-3.0, 0.5, 2.0]
    falling = Ladder((0.5, -1.0, -3.0), (40.0, 20.0, 10.0), 100.0)
    flat = Ladder((0.9, 0.85, 0.8), (40.0, 20.0, 10.0), 100.0)
    assert share_out([falling, flat], 0.25) == [0, 2]
