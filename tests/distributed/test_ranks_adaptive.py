"""Adaptive links over several processes: all decide alike, and as one process would."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from everyday import slow_after
from models import CONV_SPLIT, MLP_SPLIT, convnet, images, links_state, mlp
from runs import Run, assert_same, train, train_all

import mpcomp
from mpcomp import EF21, Adaptive, ErrorFeedback, Quantize, RandomK, TopK

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
CLOCK = {"bandwidth_mbps": 1.0, "latency_ms": 0.1, "compute_ms": 0.5}
SETTINGS = {"cf": (2.0, 20.0), "eps": 0.5, "window": 3, **CLOCK}
TOPK = Adaptive(TopK(0.1), **SETTINGS)
FEEDBACK = Adaptive(ErrorFeedback(TopK(0.1)), **SETTINGS)
ESTIMATE = Adaptive(EF21(TopK(0.1)), **SETTINGS)
RANDOM = Adaptive(RandomK(0.1), **{**SETTINGS, "eps": 0.2})
BUDGET = Adaptive(TopK(0.1), cf=(2.0, 20.0), window=3, policy="geometric", budget=0.5)
CENTRED = Adaptive(TopK(0.1), gain="centred", **SETTINGS)
SHARED_CENTRED = Adaptive(TopK(0.1), cf=(2.0, 20.0), window=2, gain="centred", budget=0.4)
COARSE = Adaptive(Quantize(4), cf=(4.0, 32.0), window=2, **CLOCK)
SHARED_COARSE = Adaptive(Quantize(4), cf=(4.0, 32.0), budget=0.1)
#: Seven steps are two windows of three, and the first of another.
RUNS = [
    Run("deep", act=TOPK, grad=TOPK, rows=(10, 9), steps=7),
    Run("deep convnet", act=ESTIMATE, grad=FEEDBACK, steps=7),
    Run("deep convnet", act=BUDGET, grad=BUDGET, evaluate=True, steps=4),
    Run("deep convnet", act=CENTRED, grad=COARSE, steps=7),
    Run("deep convnet", act=SHARED_CENTRED, grad=SHARED_COARSE, steps=6),
    Run("deep", act=RANDOM, grad="same", off=(0, 4), steps=7),
    # The first steps overflow: they are skipped, and count.
    Run("deep", act=TOPK, grad=BUDGET, scale=2.0**24, autocast=torch.float16, steps=12),
    Run("deep", act=TOPK, grad=FEEDBACK, scale=64.0, frozen=("0.", "1.", "2.", "3."), steps=5),
    Run("deep", act=TOPK, grad=TOPK, pipeline={"warmup_steps": 3}, steps=6),
]


@pytest.mark.parametrize("num_ranks", slow_after(1, [2, 4]))
def test_ranks_are_one_process(ranks, num_ranks):
    """Losses, weights, links' state and decisions, bit for bit."""
    runs = [replace(run, stages=num_ranks) for run in RUNS]
    if num_ranks == 4:  # what a loop does besides, too
        runs = [replace(runs[2], schedule="GPipe"), *runs[3:5], *runs[6:]]
    else:
        runs = [*runs[:2], runs[3], runs[5]]
    all_ours = list(zip(*ranks(train_all, num_ranks, runs), strict=True))
    for run, ours in zip(runs, all_ours, strict=True):
        alone = train(run)
        assert_same(run, ours, alone)
        for outcome in ours:  # what is adapted is the same on all ranks, of all links
            found = {name: state.get("adaptive") for name, state in outcome.links.items()}
            assert found == {n: state.get("adaptive") for n, state in alone.links.items()}
        states = [state["adaptive"] for state in alone.links.values() if "adaptive" in state]
        assert any(state["cf"] is not None for state in states), run  # something is compressed


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "Interleaved1F1B"])
def test_a_cut_within_a_rank_is_no_other(ranks, schedule):
    """Its bytes are not counted, but its step takes as long as one over a wire."""
    run = Run("deep", stages=4, schedule=schedule, act=TOPK, grad=BUDGET, steps=7)
    results = ranks(train_all, 2, [run])
    alone = train(run)
    assert_same(run, [outcomes[0] for outcomes in results], alone)


# -- replicas -------------------------------------------------------------------------------------


def pipe_of(act, grad, **kwargs):
    torch.manual_seed(0)
    return mpcomp.pipeline(
        mlp(), 2, split=MLP_SPLIT[:1], act_comp=act, grad_comp=grad, loss_fn=F.cross_entropy,
        timeout=60.0, **kwargs,
    )  # fmt: skip


def steps_of(pipe, first, last, seed=0):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(8 + 2 * seed, 13, generator=generator)
        y = torch.randint(5, (len(x),), generator=generator)
        losses.append(pipe.forward_backward(x, y))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def replicas_change_together(methods):
    found = []
    for act, grad in methods:
        pipe = pipe_of(act, grad, replicas=2)
        steps_of(pipe, 0, 9, seed=pipe.replica)
        states = {link.name: link.endpoint.state_dict().get("adaptive") for link in pipe.links}
        found.append((states, pipe.adaptive_history))
    return found


@pytest.mark.slow
def test_replicas_change_together(ranks):
    """Of their own data each, of different sizes; on the wall clock too."""
    wall = Adaptive(TopK(0.1), cf=(2.0, 20.0), eps=0.5, window=2)
    first, *others = ranks(
        replicas_change_together, 4, [(TOPK, ESTIMATE), (BUDGET, BUDGET), (CENTRED, wall)]
    )
    assert all(other == first for other in others)
    for _, history in first:
        assert len({str(entry["links"]) for entry in history}) > 2


# -- a budget that nothing fits, and resuming ------------------------------------------------------


def refuses():
    method = Adaptive(TopK(0.1), cf=(2.0, 4.0), budget=0.1)
    pipe = pipe_of(method, method)
    with pytest.raises(ValueError, match=r"budget=0.1 of adaptive.*cf=4 everywhere takes 0\.\d+"):
        steps_of(pipe, 0, 1)
    return pipe.wire_bytes, pipe.num_steps


def test_a_budget_that_nothing_fits_is_refused_on_all_ranks(ranks):
    assert ranks(refuses, 2) == [(0, 0), (0, 0)]


def conv_pipe(act, grad, seed, **kwargs):
    torch.manual_seed(seed)
    return mpcomp.pipeline(
        convnet(), 2, split=CONV_SPLIT[:1], act_comp=act, grad_comp=grad,
        loss_fn=F.cross_entropy, **kwargs,
    )  # fmt: skip


def run(pipe, first, last):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    losses = []
    for step in range(first, last):
        losses.append(pipe.forward_backward(*images(8, step)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


PAIRS = [(TOPK, FEEDBACK), (ESTIMATE, BUDGET), (CENTRED, TOPK)]


def goes_on(root):
    for number, (act, grad) in enumerate(PAIRS):
        straight = conv_pipe(act, grad, 0, timeout=60.0)
        folder = Path(root) / str(number)
        run(straight, 0, 5)
        straight.save(folder)
        expected = run(straight, 5, 9)
        resumed = conv_pipe(act, grad, 9, timeout=60.0)
        resumed.load(folder)
        assert torch.equal(run(resumed, 5, 9), expected)
        for link, twin in zip(resumed.links, straight.links, strict=True):
            assert link.endpoint.state_dict()["adaptive"] == twin.endpoint.state_dict()["adaptive"]
        assert resumed.adaptive_history == straight.adaptive_history[5:]
    straight.collect(None)


def loads(root, number):
    act, grad = PAIRS[number]
    pipe = conv_pipe(act, grad, 3, timeout=60.0)
    pipe.load(Path(root) / "alone")
    return run(pipe, 5, 8)


def test_going_on_is_as_if_never_stopped(ranks, tmp_path):
    ranks(goes_on, 2, str(tmp_path))
    for number, (act, grad) in enumerate(PAIRS):  # and from ranks to one process
        straight = conv_pipe(act, grad, 0, engine="local")
        run(straight, 0, 5)
        resumed = conv_pipe(act, grad, 9, engine="local")
        resumed.load(tmp_path / str(number))
        if number == 1:
            straight.save(tmp_path / "alone")
        expected = run(straight, 5, 8)
        assert torch.equal(run(resumed, 5, 8), expected)
        ours, theirs = links_state(resumed), links_state(straight)
        assert [s["adaptive"] for s in ours.values()] == [s["adaptive"] for s in theirs.values()]
        if number == 1:  # and from one process to ranks
            assert all(torch.equal(got, expected) for got in ranks(loads, 2, str(tmp_path), 1))
