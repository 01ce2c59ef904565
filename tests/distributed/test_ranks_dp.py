"""Compressed gradients between the replicas of a pipeline: equal weights, under every schedule.

What ranks find is checked in them where only they can; the first failed assert ends the test.
"""

import contextlib
import functools
import itertools
import json
import math
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import by_halves, slow, slow_after
from methods import same_bits
from models import plain_sgd as sgd
from models import rows
from runs import SCHEDULES, SINGLE, deep
from test_ranks_faults import AT_ONCE_S, PATIENT_S, die, ends
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpcomp
from mpcomp import DGC, PowerSGD, RedSync, ReplicaNetwork

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

#: Matrices of `deep` have 143 elements and more.
NETWORK = ReplicaNetwork(smallest=32)
GRAVAC = "gravac:cf=2-40:window=4:eps=0.5:smoothing=0.5:bandwidth_mbps=10:compute_ms=1+topk:0.1"
#: Where replicas remember something, or a controller does.
STATEFUL = [
    "ef+topk:0.1",
    "ef:storage=8+topk:0.2",
    "ef21+topk:0.2",
    "ef+randomk:0.2",
    "ef+sign",
    "ef+quant:4:rounding=stochastic",
    "powersgd:2",
    "dgc:0.1:warmup_steps=6",
    "redsync:0.1",
    "redsync:0.1:same_sign=true",
    "onebitsgd",
    GRAVAC,
    GRAVAC.replace("topk:0.1", "randomk:0.5")
    .replace("cf=2-40", "cf=1.5-4")
    .replace("0.5:s", "0.2:s"),
    "accordion:low=topk/0.5:high=topk/0.1:interval=4",
    "accordion:low=powersgd/2:high=powersgd/1:interval=4:threshold=0.1",
]
METHODS = [*STATEFUL, "topk:0.3", "randomblock:0.5:unbiased=true", "qsgd:4", "fp16", "lowrank:2"]


def pipe_of(dp, schedule=None, *, chunks=2, model=deep, seed=0, **kwargs):
    """Two replicas, of as many ranks each as there are."""
    torch.manual_seed(seed)
    replicas = kwargs.get("replicas", 2)
    stages = dist.get_world_size() // replicas * (1 if schedule in SINGLE else 2)
    if schedule == "DualPipeV":  # torch: as many microbatches as stages
        chunks = max(chunks, stages)
    options = {
        "split": [str(8 * (i + 1) // stages - 1) for i in range(stages - 1)] or 1,
        "loss_fn": F.cross_entropy,
        "network": None if dp is None else NETWORK,
        "replicas": replicas,
        "timeout": 60.0,
    }
    return mpcomp.pipeline(
        model(), chunks, dp_comp=dp, schedule=schedule, **{**options, **kwargs}
    )  # fmt: skip


def share_of(pipe, step, count=8):
    """This replica's rows of a step."""
    x, y = rows(count * pipe.num_replicas, step)
    own = slice(count * pipe.replica, count * (pipe.replica + 1))
    return x[own], y[own]


def train(pipe, steps, optimizer=None, *, batches=4, first=0):
    """Losses; the same few batches again and again, so that they fall."""
    optimizer = optimizer or sgd(pipe.parameters())
    losses = []
    for step in range(first, first + steps):
        losses.append(pipe.forward_backward(*share_of(pipe, step % batches)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def state_of(pipe):
    return {name: value.clone() for name, value in pipe.merge().state_dict().items()}


def memories_of(pipe):
    """What the replicas remember on this rank, by name."""
    tensors = pipe.exchange.state_dict()["tensors"]
    return {name: value.clone() for name, value in tensors.items()}


def assert_same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert same_bits(value, theirs[name]), name


def outcome(dp, schedule, steps, **kwargs):
    pipe = pipe_of(dp, schedule, **kwargs)
    losses = train(pipe, steps)
    own = {name: value.clone() for name, value in pipe.state_dict().items()}
    exchange = pipe.exchange
    return losses, own, state_of(pipe), pipe.report(show=False), list(exchange.history)


def outcomes(cases, steps, kwargs):
    found = []
    for dp, schedule in cases:
        try:
            found.append(outcome(dp, schedule, steps, **kwargs))
        except Exception:
            raise AssertionError(f"{dp}, {schedule}: {traceback.format_exc()}") from None
    return found


def check_replicas(results, cases):
    """Ranks at one place of their replicas hold the same bits; bytes are fewer.

    Where there are steps enough, losses fall: of all four batches from one round to a later one.
    """
    half = len(results) // 2
    for i, case in enumerate(cases):
        losses, _, whole, report, history = results[0][i]
        for rank, of_rank in enumerate(results):
            assert same_bits(of_rank[i][0], losses), case
            assert_same_tensors(of_rank[i][1], results[(rank + half) % len(results)][i][1])
            for name, value in of_rank[i][1].items():
                assert same_bits(value, whole[name]), (case, name)
        assert all(value.isfinite().all() for value in whole.values())
        assert len(losses) < 8 or losses[-4:].mean() < losses[:4].mean(), (case, losses)
        figures = report["replicas"]
        assert figures["method"] == str(mpcomp.parse(case[0]))
        assert 0 < figures["wire_bytes"] < figures["dense_bytes"], case
        assert figures["ratio"] == figures["wire_bytes"] / figures["dense_bytes"]
        assert figures["steps"] == len(losses) == len(history)
        assert sum(figures["paths"].values()) == 16  # parameters of the model
        assert json.loads(json.dumps(report)).keys() == report.keys()


#: Each way of deciding, and of remembering: these go on for longer.
LONG = [
    *("ef21+topk:0.2", "powersgd:2", "dgc:0.1:warmup_steps=6", GRAVAC),
    *(dp for dp in METHODS if dp.startswith("accordion")),
]


@pytest.fixture(scope="module")
def after_many(ranks):
    """On two replicas of two stages."""
    return ranks(outcomes, 4, [(dp, None) for dp in LONG], 24, {})


@pytest.mark.slow
def test_replicas_are_equal_after_many_steps(after_many):
    check_replicas(after_many, [(dp, None) for dp in LONG])


@pytest.mark.slow
def test_replicas_are_equal_and_learn_with_every_method(ranks):
    cases = [(dp, None) for dp in METHODS if dp not in LONG]
    check_replicas(ranks(outcomes, 4, cases, 12, {}), cases)


@pytest.mark.slow
def test_two_stages_train_as_one_does(ranks, after_many):
    """Bit for bit; also where one controller decides by the gradients of all stages."""
    cases = [(dp, None) for dp in LONG]
    results = ranks(outcomes, 2, cases, 24, {})
    check_replicas(results, cases)
    for one, two, dp in zip(results[0], after_many[0], LONG, strict=True):
        for name, value in two[2].items():
            assert same_bits(value, one[2][name]), (dp, name)
        for ours, theirs in zip(two[4], one[4], strict=True):
            for figure in ("branch", "cf", "skipped"):
                assert ours.get(figure) == theirs.get(figure), dp


@pytest.mark.slow
def test_one_controller_decides_for_the_whole_pipeline(ranks):
    """Ranks of different stages, whose own gains differ, take the same branch in every step."""
    results = ranks(outcomes, 4, [(GRAVAC, None)], 24, {})
    check_replicas(results, [(GRAVAC, None)])
    branches = [[entry["branch"] for entry in rank[0][4]] for rank in results]
    factors = [[entry["cf"] for entry in rank[0][4]] for rank in results]
    assert branches[0][0] == "dense" and {"minimum", "candidate"} & set(branches[0])
    assert len(set(factors[0])) > 2
    assert all(other == branches[0] for other in branches)
    assert all(other == factors[0] for other in factors)
    figures = results[0][0][3]["replicas"]
    assert figures["cf"] == factors[0][-1] and 0 < figures["gain"] <= 1


HEAVY = [GRAVAC.replace("window", "exact=true:window"), "dgc:0.2", "ef21+randomk:0.3"]


@pytest.mark.parametrize("cases", by_halves(zip(itertools.cycle(HEAVY), SCHEDULES[1:])))
def test_every_schedule(ranks, cases):
    """With the methods in turn."""
    results = ranks(outcomes, 4, cases, 5, {})
    check_replicas(results, cases)
    for case, (_, _, whole, _, _) in zip(cases, results[0], strict=True):
        torch.manual_seed(0)
        assert not same_bits(whole["0.0.weight"], deep().state_dict()["0.0.weight"]), case


def ddp_outcomes(methods, steps):
    found = []
    for dp in methods:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(deep(), bucket_cap_mb=0.002)
        handle = mpcomp.compress_gradients(ddp, dp, network=NETWORK)
        pipe = pipe_of(dp, chunks=1)
        losses = train(pipe, steps)
        optimizer = sgd(ddp.parameters())
        for step in range(steps):
            x, y = share_of(pipe, step % 4)
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, state_of(pipe), ddp.module.state_dict()))
        assert handle.report()["wire_bytes"] == pipe.exchange.report()["wire_bytes"], dp
        assert_same_tensors(handle.state_dict()["tensors"], memories_of(pipe))
    return found


@pytest.mark.slow
def test_a_pipeline_of_one_stage_is_a_model_in_ddp(ranks):
    for of_rank in ranks(ddp_outcomes, 2, METHODS, 6):
        for _, ours, theirs in of_rank:
            assert_same_tensors(ours, theirs)


def dense_outcomes(schedules):
    return [
        [state_of(pipe) for pipe in pipes if train(pipe, 4) is not None]
        for pipes in ([pipe_of("none", s), pipe_of(None, s)] for s in schedules)
    ]


def test_without_compression_it_is_the_mean(ranks):
    for ours, theirs in ranks(dense_outcomes, 4, (None, "ZBVZeroBubble"))[0]:
        for name, value in theirs.items():
            bound = 1e-6 * float(value.abs().max())
            torch.testing.assert_close(ours[name], value, rtol=0, atol=bound)


# -- what a training loop does besides ------------------------------------------------------------


def each_seeded():
    """Replicas that were seeded differently begin with the weights of the first."""
    pipe = pipe_of("ef+topk:0.1", seed=dist.get_rank())
    train(pipe, 2)
    return state_of(pipe)


def test_replicas_begin_with_the_weights_of_the_first(ranks):
    results = ranks(each_seeded, 4)
    for state in results[1:]:
        assert_same_tensors(state, results[0])


def accumulated(dp):
    """Three calls, of which the last is exchanged; and one on the rows of all three."""
    pipe, whole = pipe_of(dp), pipe_of(dp)
    for step in range(3):
        quiet = pipe.no_sync() if step < 2 else contextlib.nullcontext()
        with quiet:
            pipe.forward_backward(*share_of(pipe, step))
        if step < 2:
            assert pipe.exchange.step == 0 and not memories_of(pipe)
            first = [p.grad.clone() for p in pipe.parameters()]
    for step in range(3):
        with whole.no_sync():
            whole.forward_backward(*share_of(pipe, step))
    with pipe.no_sync():  # nothing is waited for, whatever the ranks do
        assert pipe.exchange.totals.steps == 1
    norm = mpcomp.clip_grad_norm_(pipe, 0.01)
    mean = {}
    for name, parameter in whole.named_parameters():
        mean[name] = parameter.grad / 2
        dist.all_reduce(mean[name], group=whole.mesh.replica_group)
    grads = {name: p.grad.clone() for name, p in pipe.named_parameters()}
    return grads, norm, mean, first, pipe.report(show=False)["replicas"]["steps"]


def test_what_was_added_up_is_exchanged_once(ranks):
    results = ranks(accumulated, 4, "none")
    for rank, (grads, norm, mean, first, steps) in enumerate(results):
        assert steps == 1 and same_bits(norm, results[0][1])
        scale = 0.01 / (float(norm) + 1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, mean[name] * scale, rtol=1e-5, atol=1e-8)
        assert not same_bits(first[0], results[rank ^ 2][3][0])
    for rank, (grads, norm, mean, _, _) in enumerate(results := ranks(accumulated, 4, "topk:0.1")):
        assert_same_tensors(grads, results[rank ^ 2][0])
        assert same_bits(norm, results[0][1])
        assert any(not torch.equal(g == 0, mean[name] == 0) for name, g in grads.items())


def warming():
    """Dense at first, with nothing left over; then compressed; then dense for a step."""
    pipe, dense = pipe_of("ef+topk:0.1", warmup_steps=3), pipe_of("none")
    optimizer, other = sgd(pipe.parameters()), sgd(dense.parameters())
    found = []
    for step in range(6):
        with pipe.compressed(dp=step != 5):
            train(pipe, 1, optimizer, first=step)
        train(dense, 1, other, first=step)
        rests = [v for k, v in memories_of(pipe).items() if k.endswith("residual")]
        found.append((sum(float(rest.abs().sum()) for rest in rests), len(rests)))
        if step < 3:
            assert_same_tensors(state_of(pipe), state_of(dense))
    entries = pipe.exchange.history
    return found, [entry["wire_bytes"] / entry["dense_bytes"] for entry in entries]


def test_warmup_and_dense_steps_leave_nothing_over(ranks):
    for found, ratios in ranks(warming, 4):
        assert [rest == 0 for rest, _ in found] == [True, True, True, False, False, True]
        assert all(count for _, count in found)
        assert ratios[:3] == [1.0] * 3 and ratios[5] == 1.0
        assert ratios[3] < 0.8 and ratios[4] < 0.8


def gravac_while_dense():
    """Steps that were sent dense on demand say nothing of a compression factor."""
    pipe = pipe_of(GRAVAC)
    train(pipe, 3)
    with pipe.compressed(dp=False):
        train(pipe, 3, first=3)
    entries = list(pipe.exchange.history)
    before = [entry["branch"] for entry in entries]
    train(pipe, 3, first=6)
    return before, pipe.exchange.controller.search.state_dict()


def test_gravac_takes_a_dense_step_for_what_it_is(ranks):
    for branches, state in ranks(gravac_while_dense, 4):
        assert set(branches[1:3]) != {"dense"} and branches[3:] == ["dense"] * 3, branches
        assert state["steps"] == 9


def overflowing(dp):
    """A gradient of one stage of one replica is infinite in step 2; and without a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    pipe = pipe_of(dp, "ZBVZeroBubble", scaler=scaler)
    optimizer = sgd(pipe.parameters())
    skipped, scales, kept = [], [], []
    for step in range(4):
        before = memories_of(pipe)
        handle = None
        if step == 2 and dist.get_rank() == 3:
            handle = next(iter(pipe.parameters())).register_hook(lambda g: g * torch.inf)
        pipe.forward_backward(*share_of(pipe, step))
        if handle is not None:
            handle.remove()
        scaler.unscale_(optimizer)
        mpcomp.clip_grad_norm_(pipe, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(pipe.step_skipped)
        scales.append(scaler.get_scale())
        after = memories_of(pipe)
        kept.append(all(k in before and same_bits(before[k], v) for k, v in after.items()))
    return skipped, scales, kept, state_of(pipe), pipe.exchange.step


@pytest.mark.parametrize(
    "dp", slow_after(2, ["ef+topk:0.1", GRAVAC, "dgc:0.1", "ef21+randomk:0.3"])
)
def test_an_overflow_anywhere_is_skipped_everywhere(ranks, dp):
    results = ranks(overflowing, 4, dp)
    for skipped, scales, kept, state, step in results:
        assert skipped == [False, False, True, False] and scales == [64.0, 64.0, 32.0, 32.0]
        assert kept == [False, False, True, False] and step == 4
        assert all(value.isfinite().all() for value in state.values())
        assert_same_tensors(state, results[0][3])


def unlucky(methods):
    """Inf, then NaN, in the gradients of one replica, in a matrix and in a vector."""
    for dp in methods:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        pipe = pipe_of(dp, scaler=scaler)
        optimizer = sgd(pipe.parameters())
        for step, value in enumerate((1.0, torch.inf, torch.nan, 1.0, 1.0)):
            handles = []
            if dist.get_rank() == 1 and value != 1:
                for parameter in list(pipe.parameters())[2:4]:
                    handles.append(parameter.register_hook(lambda g, v=value: g * v))
            before = memories_of(pipe)
            pipe.forward_backward(*share_of(pipe, step))
            for handle in handles:
                handle.remove()
            assert pipe.step_skipped == (value != 1), dp
            if value != 1:
                assert_same_tensors(memories_of(pipe), before)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 16.0
        assert all(bool(value.isfinite().all()) for value in memories_of(pipe).values()), dp
        assert all(bool(value.isfinite().all()) for value in pipe.state_dict().values()), dp


#: One of each class.
ONE_A_CLASS = [
    *("ef+topk:0.1", "ef21+topk:0.2", "powersgd:2", "dgc:0.1:warmup_steps=6", "redsync:0.1"),
    *("onebitsgd", GRAVAC, "accordion:low=topk/0.5:high=topk/0.1:interval=4", "topk:0.3"),
]
OTHERS = [dp for dp in METHODS if dp not in ONE_A_CLASS]


@pytest.mark.parametrize("methods", [ONE_A_CLASS, slow(OTHERS)], ids=["classes", "others"])
def test_no_method_stumbles_over_inf_and_nan(ranks, methods):
    ranks(unlucky, 2, methods)


def in_part(cases):
    """A stage that is frozen has nothing to exchange; a model in bf16 has half the bytes."""
    found = []
    for dp, what in cases:

        def model(what=what):
            made = deep()
            if what == "bf16":
                return made.bfloat16()
            return made.requires_grad_(False).append(nn.Linear(5, 5))

        pipe = pipe_of(dp, model=model, split=["3"])
        optimizer = sgd(pipe.parameters())
        for step in range(4):
            x, y = share_of(pipe, step)
            pipe.forward_backward(x.bfloat16() if what == "bf16" else x, y)
            optimizer.step()
            optimizer.zero_grad()
        found.append((state_of(pipe), pipe.report(show=False)["replicas"]["dense_bytes"]))
    return found


@pytest.mark.slow
def test_frozen_stages_and_bf16(ranks):
    methods = [GRAVAC, DGC(0.2, clip=0.1), "accordion:low=topk/0.5:high=topk/0.1:interval=2"]
    cases = [(dp, what) for dp in [*methods, "powersgd:2"] for what in ("bf16", "frozen")]
    cases.remove(("powersgd:2", "frozen"))  # no matrix is left that it could take
    results = ranks(in_part, 4, cases)
    count = sum(p.numel() for p in deep().parameters())
    for i, (dp, what) in enumerate(cases):
        assert results[0][i][1] == 2 * 4 * (2 * count if what == "bf16" else 4 * 30), dp
        for of_rank in results:
            assert_same_tensors(of_rank[i][0], results[0][i][0])


def scaled(dp, scale):
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    pipe = pipe_of(dp, scaler=scaler)
    optimizer = sgd(pipe.parameters())
    for step in range(5):
        pipe.forward_backward(*share_of(pipe, step))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update(16.0 if step == 2 else None)  # another scale from then on
        optimizer.zero_grad()
    return state_of(pipe), memories_of(pipe)


@pytest.mark.parametrize("dp", slow_after(1, ["ef+topk:0.1", "dgc:0.1", "ef21+topk:0.2"]))
def test_what_is_remembered_is_free_of_the_loss_scale(ranks, dp):
    plain, with_scaler = ranks(scaled, 2, dp, None), ranks(scaled, 2, dp, 1024.0)
    for ours, theirs in zip(plain, with_scaler, strict=True):
        assert ours[1]
        assert_same_tensors(ours[1], theirs[1])


def not_a_number():
    """Without a scaler: an error on all ranks, and the pipeline goes on after it."""
    pipe = pipe_of("ef+topk:0.1")
    optimizer = sgd(pipe.parameters())
    train(pipe, 2, optimizer)
    before = memories_of(pipe)
    handle = None
    if dist.get_rank() == 2:
        handle = list(pipe.parameters())[-1].register_hook(lambda g: g * torch.nan)
    message = ""
    try:
        pipe.forward_backward(*share_of(pipe, 2))
    except FloatingPointError as error:
        message = str(error)
    if handle is not None:
        handle.remove()
    optimizer.zero_grad()
    assert_same_tensors(memories_of(pipe), before)
    train(pipe, 2, optimizer, first=2)
    return message, state_of(pipe)


def test_a_gradient_that_is_no_number_is_an_error_on_all_ranks(ranks):
    results = ranks(not_a_number, 4)
    for message, state in results:
        assert message.startswith("NaN or Inf in a gradient of a replica, step 2"), message
        assert_same_tensors(state, results[0][1])


def clipped(clip):
    pipe = pipe_of(DGC(0.2, clip=clip), schedule=None)
    losses = train(pipe, 6)
    return losses, state_of(pipe)


@pytest.mark.slow
def test_dgc_clips_by_the_norm_of_all_stages(ranks):
    two, one = ranks(clipped, 4, 0.05)[0], ranks(clipped, 2, 0.05)[0]
    free = ranks(clipped, 2, None)[0]
    for name, value in two[1].items():
        torch.testing.assert_close(value, one[1][name], rtol=1e-5, atol=1e-7)
    assert any(not torch.allclose(one[1][name], value) for name, value in free[1].items())


def followed():
    """State in units of the learning rate needs to know it; on all ranks, and nothing has ended."""
    pipe = pipe_of(mpcomp.ErrorFeedback(mpcomp.TopK(0.1), lr_scaled=True))
    optimizer = sgd(pipe.parameters())
    message = ""
    try:
        train(pipe, 1, optimizer)
    except ValueError as error:
        message = str(error)
    pipe.follow(optimizer)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / 2**step
        train(pipe, 1, optimizer, first=step)
    return message, state_of(pipe), memories_of(pipe)


def test_methods_follow_the_learning_rate(ranks):
    results = ranks(followed, 4)
    for message, state, memories in results:
        assert "tell it the optimizer with follow(optimizer)" in message
        assert_same_tensors(state, results[0][1])
        assert memories


class Tied(nn.Sequential):
    """The first and the last block share a matrix."""

    def __init__(self):
        super().__init__(
            nn.Linear(13, 13),
            nn.Sequential(nn.Linear(13, 40), nn.ReLU()),
            nn.Sequential(nn.Linear(40, 13), nn.Tanh()),
            nn.Linear(13, 13),
        )
        self[3].weight = self[0].weight


def tied(cases):
    found = []
    for dp, network in cases:
        pipe = pipe_of(dp, model=Tied, split=["1"], network=network, ties="apart")
        assert len(pipe.ties) == 1
        losses = train(pipe, 10)
        own = {name: value.clone() for name, value in pipe.state_dict().items()}
        whole = pipe.merge()
        assert whole[3].weight is whole[0].weight
        found.append((losses, own))
    return found


@pytest.mark.slow
def test_copies_of_a_tied_weight_stay_equal(ranks):
    """Also where chance decides, and where a stage's other gradients would take another path."""
    wide = ReplicaNetwork(smallest=32, latency_ms=0.0)
    mixed = ReplicaNetwork(smallest=32, latency_ms=0.05, bandwidth_mbps=100.0)
    cases = [
        *((dp, NETWORK) for dp in ("ef+randomk:0.2", "dgc:0.1", "powersgd:2", "qsgd:4", GRAVAC)),
        *(("ef+quant:8:rounding=stochastic", network) for network in (wide, mixed)),
        (DGC(0.2, clip=0.1), NETWORK),
    ]
    results = ranks(tied, 4, cases)
    for i, (dp, _) in enumerate(cases):
        weights = [value for r in results for n, value in r[i][1].items() if n in NAMES_OF_TIED]
        assert len(weights) == 4, dp
        assert all(same_bits(value, weights[0]) for value in weights), dp
        losses = results[0][i][0]
        assert losses[-1] < losses[0], dp


NAMES_OF_TIED = ("0.weight", "3.weight")

# -- what cannot be -------------------------------------------------------------------------------


BAD_CHOICES = [
    ([{"dp": "ef+topk:0.1"}, {"dp": "ef+topk:0.2"}], "dp_comp"),
    ([{"dp": "topk:0.1"}] * 3 + [{"dp": None}], "dp_comp"),
    ([{"dp": "topk:0.1", "network": ReplicaNetwork(per_machine=2)}] * 3 + [{"dp": "topk:0.1"}],
     "network"),
    ([{"dp": "topk:0.1", "replicas": 1}], "with replicas=1: there is nobody"),
    ([{"dp": "topk:0.1", "network": ReplicaNetwork(per_machine=4)}],
     "per_machine=4 with 2 replicas"),
    ([{"dp": PowerSGD(25)}], "rank=25 is above that of every matrix here (the largest is 17)"),
    ([{"dp": RedSync(0.1, same_sign=True, plain="none.weight")}], "plain='none.weight'"),
]  # fmt: skip


def made(choices):
    """The error of each, one after another."""
    found = []
    for options_of_ranks, _ in choices:
        options = options_of_ranks[dist.get_rank() % len(options_of_ranks)]
        with pytest.raises(ValueError) as caught:
            pipe_of(**options)
        found.append(str(caught.value))
    return found


def test_bad_choices_are_errors_on_all_ranks(ranks):
    for said in ranks(made, 4, BAD_CHOICES):
        for text, (_, message) in zip(said, BAD_CHOICES, strict=True):
            assert message in text


def of_one_stage():
    """What suits the model as a whole need not suit each stage."""
    for dp in (PowerSGD(17), RedSync(0.2, same_sign=True, plain="7.weight")):
        train(pipe_of(dp), 2)


def test_a_method_must_suit_the_model_not_each_stage(ranks):
    ranks(of_one_stage, 4)


def in_fp64():
    pipe_of("topk:0.1", model=lambda: nn.Sequential(*deep()[:-1], deep()[-1].double()))


def test_fp64_is_refused_by_all_ranks(ranks):
    for kind, said in ranks(in_fp64, 4, may_fail=True):
        assert kind == "TypeError" and "is fp64" in said, said


# -- faults ---------------------------------------------------------------------------------------


def killed(dp, network, fault):
    pipe = pipe_of(dp, timeout=PATIENT_S, network=network)
    steps = [lambda i=i: pipe.forward_backward(*share_of(pipe, i)) for i in range(3)]
    steps[0]()
    if dist.get_rank() == 3:
        pipe.exchange.controller.begin = fault
    return ends(pipe, steps[1:])


def fail(*_):
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    "network",
    slow_after(1, [NETWORK, ReplicaNetwork(smallest=32, per_machine=2)]),
    ids=["flat", "two levels"],
)
def test_a_rank_that_dies_in_the_exchange_is_named(ranks, network):
    results = ranks(killed, 4, "ef+topk:0.1", network, functools.partial(dying), may_fail=True)
    for end in results[:3]:
        assert end.error == "PeerError" and end.seconds < AT_ONCE_S, end
        assert end.message.startswith("rank 3 (stage 1 of replica 1)"), end.message


def dying(*_):
    die()


def test_what_fails_in_the_exchange_is_told_to_all(ranks):
    """As its own failure, not as that of a connection."""
    results = ranks(killed, 4, "ef+topk:0.1", NETWORK, fail)
    assert results[3].error == "RuntimeError" and results[3].message == "boom"
    for end in results[:3]:
        assert end.error == "PeerError" and end.seconds < AT_ONCE_S, end
        assert "rank 3 (stage 1 of replica 1) failed at" in end.message, end.message
        assert "boom" in end.message


# -- report ---------------------------------------------------------------------------------------


def reported():
    pipe = pipe_of(GRAVAC)
    before = pipe.report(show=False)["replicas"]
    pipe.report()
    train(pipe, 6)
    report = pipe.report()
    own = pipe.exchange.report()
    plain = pipe_of(None).report(show=False)["replicas"]
    return before, report["replicas"], own, plain


@pytest.mark.slow
def test_the_report_adds_up_all_ranks(ranks):
    results = ranks(reported, 4)
    before, figures, _, plain = results[0]
    assert plain is None and before["steps"] == 0 and before["ratio"] is None
    for name in ("wire_bytes", "dense_bytes", "floats", "traffic_bytes"):
        assert figures[name] == pytest.approx(sum(own[name] for _, _, own, _ in results))
    parameters = sum(p.numel() for p in deep().parameters())
    assert figures["dense_bytes"] == 6 * 2 * 4 * parameters
    assert figures["traffic_bytes_per_replica"] == figures["traffic_bytes"] / 2
    assert 0 < figures["density"] <= 1 and figures["wait_s"] > 0
    assert math.isclose(figures["gain"], results[3][1]["gain"])
    assert figures["replicas"] == 2 and figures["steps"] == 6


def test_a_pipeline_of_one_stage_prints_its_replicas(ranks):
    assert all(ranks(printed, 2))


def printed():
    import io

    pipe = pipe_of("ef+topk:0.1")
    train(pipe, 2)
    with contextlib.redirect_stdout(out := io.StringIO()):
        pipe.report()
    said = out.getvalue()
    if dist.get_rank() == 0:
        assert "ef+topk:0.1" in said and "gather" in said and "traffic MB a replica" in said
        assert "cosine" not in said  # there is no cut
    return True
