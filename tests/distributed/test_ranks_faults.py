"""Ranks that die, stall, fail or differ: every other one ends in time, and names the right rank."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import slow, slow_after
from methods import same_bits
from models import assert_same_state, links_state, rows
from runs import deep
from torch._subclasses.fake_tensor import FakeTensor

import mpcomp
from mpcomp import PeerError
from mpcomp.api import launch
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.links.boundary import Crossing
from recipes.bench.hosts import free_port

#: Of pipelines in which a rank waits in vain: a test lasts as long. What is timed are deadlines,
#: and nothing else, since machines that run tests are busy.
TIMEOUT_S = 6.0
#: Of pipelines in which nobody waits in vain, ...
PATIENT_S = 90.0
#: ... so that what happened by then happened at once, and not when the time was up.
AT_ONCE_S = 45.0


def pipe_of(num_stages, chunks=4, **kwargs):
    torch.manual_seed(0)
    options = {
        "split": [str(8 * (i + 1) // num_stages - 1) for i in range(num_stages - 1)],
        "act_comp": "ef21+topk:0.3",
        "grad_comp": "ef+topk:0.3",
        "loss_fn": F.cross_entropy,
        "timeout": PATIENT_S,
    }
    return mpcomp.pipeline(deep(), chunks, **{**options, **kwargs})


def step(pipe, number, count=10):
    x, y = rows(count, number)
    return pipe.forward_backward(x, y, sample_ids=torch.arange(count))


@dataclass
class End:
    """How a rank ended."""

    error: str
    message: str
    seconds: float
    again: str = ""  # the error of a further call, and of an evaluation


def ends(pipe, calls):
    """Makes the calls, up to the first error."""
    begin = time.monotonic()
    try:
        for call in calls:
            begin = time.monotonic()
            call()
    except Exception as error:
        end = End(type(error).__name__, str(error), time.monotonic() - begin)
    else:
        return End("", "", time.monotonic() - begin)
    if end.error in ("PeerError", "DifferentCalls") or end.message == "boom":
        for call in (lambda: step(pipe, 0), lambda: pipe.evaluate([rows(4)]), pipe.merge):
            begin = time.monotonic()
            with contextlib.suppress(PeerError):
                call()
                end.again += "no error, "
            if time.monotonic() - begin > 0.9 * TIMEOUT_S:
                end.again += "late, "
    return end


# -- a fault in the middle of a step --------------------------------------------------------------


def on_microbatch(pipe, stage, number, way, fault):
    """Calls ``fault`` when ``stage`` is about to run its ``number``-th microbatch so far."""
    [module] = [module for module in pipe.stages if module.index == stage]
    calls = []

    def count():
        calls.append(None)
        if len(calls) == number + 1:
            fault()

    def before(_module, args):
        if not isinstance(args[0], FakeTensor) and way == "forward":
            count()

    def after(_module, _args, output):
        if not isinstance(output, FakeTensor) and way == "backward":
            output.register_hook(lambda grad: count() or grad)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(3)


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def doze():
    time.sleep(600.0)


def boom():
    raise ValueError("boom")


#: In the second step: the first is over on all ranks.
def with_fault(num_stages, schedule, stage, microbatch, way, fault, kwargs):
    chunks = max(4, num_stages)
    pipe = pipe_of(num_stages, chunks, schedule=schedule, **kwargs)
    if stage in [module.index for module in pipe.stages]:
        on_microbatch(pipe, stage, chunks + microbatch, way, fault)
    return ends(pipe, [lambda i=i: step(pipe, i) for i in range(3)])


FAULTS = [
    # ranks, stages, schedule, stage, its rank, microbatch, way
    (2, 2, None, 0, 0, 1, "backward"),
    (3, 3, "GPipe", 1, 1, 2, "forward"),
    (4, 4, None, 0, 0, 3, "forward"),
    (4, 4, None, 2, 2, 1, "backward"),
    (4, 4, "1F1B", 3, 3, 2, "forward"),
    (2, 4, "ZBVZeroBubble", 2, 1, 1, "backward"),
    (2, 4, "Interleaved1F1B", 3, 1, 3, "forward"),
]


def survivors(ranks, case, fault, **kwargs):
    num_ranks, num_stages, schedule, stage, victim, microbatch, way = case
    args = (num_stages, schedule, stage, microbatch, way, fault, kwargs)
    lost = [victim] if fault in (freeze, doze) else []
    results = ranks(with_fault, num_ranks, *args, may_fail=True, without=lost)
    return (
        victim,
        {rank: end for rank, end in enumerate(results) if rank != victim},
        results[victim],
    )


@pytest.mark.parametrize(
    "case, fault",
    [
        (FAULTS[1], die),
        *(slow(FAULTS[i], die) for i in (2, 4, 5)),
        (FAULTS[0], leave),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_killed_rank_is_named_by_all_others_at_once(ranks, case, fault):
    victim, others, _ = survivors(ranks, case, fault)
    for rank, end in others.items():
        assert end.error == "PeerError", (rank, end)
        assert end.message.startswith(f"rank {victim} (stage "), (rank, end)
        assert "is gone" in end.message and "in time" not in end.message, (rank, end)
        assert f"Noticed here, on rank {rank} (" in end.message or f": rank {rank} (" in end.message
        assert end.seconds < AT_ONCE_S, (rank, end)
        assert end.again == "", (rank, end)


def dies_as_a_send_is_taken_up():
    """The first of two ranks dies right after it has asked for a gradient that waits to be sent.

    The other one is stopped meanwhile, so that gloo's thread finds the request there and, as it is
    about to write, the connection gone. It then forgets this send.
    """
    store = dist.distributed_c10d._get_default_store()
    model = torch.nn.Sequential(torch.nn.Linear(1, 1 << 20), torch.nn.Linear(1 << 20, 1))
    pipe = mpcomp.pipeline(model, 1, split=["0"], loss_fn=F.mse_loss, timeout=PATIENT_S)
    post, send = Crossing.post, Crossing.send

    def post_and_die(crossing, *args):
        if crossing.link.direction == "act":
            return post(crossing, *args)
        pid = int(store.get("sent"))
        os.kill(pid, signal.SIGSTOP)
        post(crossing, *args)
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {pid}"])
        die()

    def send_and_tell(crossing, *args):
        send(crossing, *args)
        if crossing.link.direction == "grad":
            store.set("sent", str(os.getpid()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Crossing, "post", post_and_die)
        patch.setattr(Crossing, "send", send_and_tell)
        begin = time.monotonic()
        with pytest.raises(PeerError, match=r"rank 0 .* is gone"):
            pipe.forward_backward(torch.ones(4, 1), torch.ones(4, 1))  # more than sockets hold
        return time.monotonic() - begin


def test_a_rank_that_dies_as_gloo_takes_up_a_send_is_noticed_at_once(ranks):
    _, seconds = ranks(dies_as_a_send_is_taken_up, 2, may_fail=True)
    assert isinstance(seconds, float) and seconds < AT_ONCE_S, seconds


@pytest.mark.parametrize("case, fault", [slow(FAULTS[3], freeze), (FAULTS[5], doze)])
def test_a_stalled_rank_is_named_by_all_others_within_the_timeout(ranks, case, fault):
    victim, others, _ = survivors(ranks, case, fault, timeout=TIMEOUT_S)
    for rank, end in others.items():
        assert end.error == "PeerError", (rank, end)
        assert end.message.startswith(f"rank {victim} (stage "), (rank, end)
        assert "did not answer in time" in end.message, (rank, end)
        assert end.seconds < TIMEOUT_S + AT_ONCE_S and end.again == "", (rank, end)


@pytest.mark.parametrize("case", slow_after(2, [FAULTS[i] for i in (0, 4, 1, 3, 6)]), ids=str)
def test_a_stage_that_raises_is_named_with_microbatch_and_reason(ranks, case):
    _, _, _, stage, _, microbatch, way = case
    victim, others, own = survivors(ranks, case, boom)
    assert (own.error, own.message, own.again) == ("ValueError", "boom", "")
    where = f"failed at stage {stage}, microbatch {microbatch}, {way}: ValueError: boom."
    for rank, end in others.items():
        assert end.error == "PeerError" and end.again == "", (rank, end)
        assert end.message.startswith(f"rank {victim} (stage "), (rank, end)
        assert where in end.message and f"Noticed here, on rank {rank} (" in end.message, (
            rank,
            end,
        )
        assert end.seconds < AT_ONCE_S, (rank, end)


def failing_elsewhere(what):
    """An error on the last rank alone, in what the user gave."""

    def fail(*_):
        raise ZeroDivisionError(what)

    pipe = pipe_of(2, loss_fn=fail if what == "loss" else F.cross_entropy)
    if what == "metric":
        return ends(pipe, [lambda: pipe.evaluate([rows(6)], fail)])
    return ends(pipe, [lambda: step(pipe, 0)])


@pytest.mark.parametrize("what", ["loss", "metric"])
def test_a_loss_or_metric_that_raises_is_named(ranks, what):
    first, last = ranks(failing_elsewhere, 2, what)
    assert (last.error, last.message) == ("ZeroDivisionError", what)
    assert first.error == "PeerError" and first.seconds < AT_ONCE_S, first
    assert first.message.startswith("rank 1 (stage 1) failed at "), first
    assert f"ZeroDivisionError: {what}." in first.message


def slow_neighbour_of_a_stalled_rank():
    """Rank 0 waits for rank 1, which is slow at first and then waits for rank 2 in vain."""
    pipe = pipe_of(3, schedule="GPipe", timeout=TIMEOUT_S)
    if dist.get_rank() == 1:
        on_microbatch(pipe, 1, 5, "forward", lambda: time.sleep(0.3 * TIMEOUT_S))
    if dist.get_rank() == 2:
        on_microbatch(pipe, 2, 4, "forward", doze)
    return ends(pipe, [lambda i=i: step(pipe, i) for i in range(2)])


@pytest.mark.slow
def test_a_slow_rank_is_not_taken_for_the_one_that_it_waits_for(ranks):
    """Rank 0's time is up before rank 1's, by more than what it then looks for records."""
    for end in ranks(slow_neighbour_of_a_stalled_rank, 3, without=[2])[:2]:
        assert end.error == "PeerError" and end.seconds < TIMEOUT_S + AT_ONCE_S, end
        assert end.message.startswith("rank 2 (stage 2) did not answer in time"), end


def slow_then_killed(victim):
    """A wait of more than half of the timeout ends well; later another rank dies."""
    pipe = pipe_of(3, timeout=TIMEOUT_S)
    rank = dist.get_rank()
    if rank == 1:
        on_microbatch(pipe, 1, 5, "forward", lambda: time.sleep(0.65 * TIMEOUT_S))
    if rank == victim:
        on_microbatch(pipe, victim, 17, "forward", die)
    return ends(pipe, [lambda i=i: step(pipe, i) for i in range(6)])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2])
def test_a_rank_that_once_waited_long_is_not_taken_for_waiting_still(ranks, victim):
    results = ranks(slow_then_killed, 3, victim, may_fail=True)
    for rank in {0, 1, 2} - {victim}:
        end = results[rank]
        assert end.error == "PeerError", end
        assert end.message.startswith(f"rank {victim} (stage {victim})"), (rank, end)


def without_the_store(port, victim, fault):
    rank = int(os.environ["TEST_RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=60),
    )
    pipe = pipe_of(3, timeout=TIMEOUT_S)
    if rank == victim:
        on_microbatch(pipe, victim, 5, "forward", fault)
    return ends(pipe, [lambda i=i: step(pipe, i) for i in range(3)])


@pytest.mark.parametrize("victim, fault", [(0, die), slow(0, freeze), slow(2, die)])
def test_the_host_of_the_store_may_be_the_one_that_fails(ranks, victim, fault):
    """A rendezvous over TCP, whose store lives in rank 0."""
    port = free_port()
    lost = [victim] if fault is freeze else []
    args = (port, victim, fault)
    results = ranks(without_the_store, 3, *args, may_fail=True, init=False, without=lost)
    for rank in {0, 1, 2} - {victim}:
        end = results[rank]
        assert end.error == "PeerError" and end.seconds < TIMEOUT_S + AT_ONCE_S, (rank, end)
        if victim != 0:
            assert end.message.startswith(f"rank {victim} (stage {victim})"), (rank, end)
        else:
            assert "rank 0 (stage 0)" in end.message or "rendezvous" in end.message, (rank, end)


# -- before the first step ------------------------------------------------------------------------


def missing():
    if dist.get_rank() == 1:
        time.sleep(600.0)
    begin = time.monotonic()
    try:
        pipe_of(3, timeout=TIMEOUT_S)
    except Exception as error:
        return End(type(error).__name__, str(error), time.monotonic() - begin)


def test_a_rank_that_never_comes(ranks):
    for rank, end in enumerate(ranks(missing, 3, without=[1])):
        if rank != 1:
            assert end.error == "PeerError" and end.seconds < TIMEOUT_S + AT_ONCE_S, end
            assert end.message.startswith("rank 1 did not come to the handshake within 6 s"), end


def killed_while_connecting():
    if dist.get_rank() == 1:
        ProcessMesh.pair = lambda *_: os._exit(1)  # after `connect`
    begin = time.monotonic()
    try:
        pipe_of(3, timeout=TIMEOUT_S)
    except Exception as error:
        return End(type(error).__name__, str(error), time.monotonic() - begin)


def test_a_rank_that_dies_while_ranks_connect(ranks):
    for rank, end in enumerate(ranks(killed_while_connecting, 3, may_fail=True)):
        if rank != 1:
            assert end.error == "PeerError" and end.seconds < TIMEOUT_S + AT_ONCE_S, end


DIFFERENT: dict[str, dict[str, Any]] = {
    "methods": {"act_comp": "ef21+topk:0.2"},
    "seed": {"seed": 1},
    "chunks": {"chunks": 5},
    "stages": {"split": ["2"]},
    "schedule": {"schedule": "GPipe"},
    "recompute": {"recompute": True},
    "warmup_steps": {"warmup_steps": 1},
    "in_flight": {"in_flight": 2},
    "loss": {"loss_fn": F.mse_loss},
    "loss scaler": {"scaler": True},
    "timeout": {"timeout": 5.0},
    "kinds of coded integers": {"without": "lanes"},  # a rank of an older mpcomp
}


def configured(options, only):
    """One pipeline after another, each with one rank's choice different, and then a good one."""
    found = []
    for option in options.values():
        own = dict(option) if dist.get_rank() == only else {}
        if own.get("scaler"):
            own["scaler"] = torch.amp.GradScaler("cpu")
        lacks, kinds = own.pop("without", None), launch.KINDS
        launch.KINDS = tuple(kind for kind in kinds if kind != lacks)
        begin = time.monotonic()
        try:
            pipe_of(2, **own)
        except Exception as error:
            found.append(End(type(error).__name__, str(error), time.monotonic() - begin))
        else:
            found.append(End("", "", 0.0))
        finally:
            launch.KINDS = kinds
    return found, float(step(pipe_of(2), 0))


@pytest.mark.parametrize("only", slow_after(1, [0, 1]))
def test_a_rank_with_another_choice_is_named_on_every_rank(ranks, only):
    """Nothing is connected yet, so the next pipeline works."""
    results = ranks(configured, 2, DIFFERENT, only)
    assert results[0][1] == results[1][1]
    for found, _ in results:
        for name, end in zip(DIFFERENT, found, strict=True):
            assert end.error == "ValueError" and end.seconds < AT_ONCE_S, (name, end)
            assert end.message.startswith(
                f"ranks were given different pipelines: rank 1 has {name}="
            )
    for one, two in zip(results[0][0], results[1][0], strict=True):
        assert one.message == two.message


# -- data that differ, and other calls ------------------------------------------------------------


def other_data(num_stages, kwargs):
    """Trains six steps; before some of them the last rank is given something else."""
    pipe = pipe_of(num_stages, **kwargs)
    odd = dist.get_rank() == dist.get_world_size() - 1
    x, y = rows(10, 50)
    ids = torch.arange(10)
    calls = {
        "x": lambda: pipe.forward_backward(x + 1e-2 * odd, y, sample_ids=ids),
        "y": lambda: pipe.forward_backward(x, (y + odd) % 5, sample_ids=ids),
        "ids": lambda: pipe.forward_backward(x, y, sample_ids=ids + odd),
        "rows": lambda: pipe.forward_backward(x[odd:], y[odd:], sample_ids=ids[odd:]),
        "evaluated": lambda: pipe.evaluate([(x + odd, y)]),
        "call": lambda: (
            pipe.evaluate([(x, y)]) if odd else pipe.forward_backward(x, y, sample_ids=ids)
        ),
        "inferred": lambda: inferred(pipe, x + odd),
        "off": lambda: off(pipe, odd, x, y, ids),
        "autocast": lambda: cast(pipe, odd, x, y, ids),
    }
    losses, found = [], {}
    for number, (name, call) in enumerate(calls.items()):
        losses.append(step(pipe, number))
        before = links_state(pipe)
        try:
            call()
        except Exception as error:
            found[name] = End(type(error).__name__, str(error), 0.0)
        assert_same_state(links_state(pipe), before)
    return torch.stack(losses), found, pipe.num_steps


def inferred(pipe, x):
    with torch.no_grad():
        pipe(x)


def off(pipe, odd, x, y, ids):
    with pipe.compressed(act=not odd):
        pipe.forward_backward(x, y, sample_ids=ids)


def cast(pipe, odd, x, y, ids):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=odd):
        pipe.forward_backward(x, y, sample_ids=ids)


def undisturbed(num_stages, kwargs):
    pipe = pipe_of(num_stages, engine="local", **kwargs)
    return torch.stack([step(pipe, number) for number in range(9)])


@pytest.mark.parametrize("num_ranks", slow_after(1, [2, 4]))
def test_a_rank_with_other_data_is_named_and_the_pipeline_goes_on(ranks, num_ranks):
    """Found before anything is sent; the next step is as if nothing had been."""
    kwargs = {"act_comp": "aqsgd+quant:4"}
    expected = undisturbed(num_ranks, kwargs)
    last = num_ranks - 1
    for losses, found, num_steps in ranks(other_data, num_ranks, num_ranks, kwargs):
        assert same_bits(losses, expected) and num_steps == 9
        for name, end in found.items():
            assert end.error == "ValueError", (name, end)
            if name in ("call", "off", "autocast"):
                assert f"rank {last} and rank 0 do not take the same step" in end.message
            else:
                assert end.message.startswith(f"rank {last} and rank 0 were given different data")
        assert len(found) == 9


def another_call(what):
    """The first rank alone makes a call that all must make."""
    pipe = pipe_of(4, timeout=TIMEOUT_S)
    step(pipe, 0)
    alone = {
        "merge": pipe.merge,
        "loader": lambda: pipe.evaluate([rows(6)] * (2 if dist.get_rank() == 0 else 1)),
    }[what]
    calls = [alone] if dist.get_rank() == 0 or what == "loader" else []
    return ends(pipe, [*calls, lambda: step(pipe, 1)])


@pytest.mark.parametrize("what", slow_after(1, ["merge", "loader"]))
def test_a_call_that_one_rank_makes_alone_ends_in_time(ranks, what):
    """Their collectives do not fit each other, so this is found by waiting."""
    for end in ranks(another_call, 4, what):
        assert end.error == "DifferentCalls" and end.seconds < TIMEOUT_S + AT_ONCE_S, end
        assert end.message.startswith("ranks waited for different things, rank 0 for the "), end
        assert "rank 3 for the start of step" in end.message or what == "loader", end
        assert end.message.endswith("every rank must make the same calls, in the same order"), end


# -- NaN ------------------------------------------------------------------------------------------


def poisoned(stage, way, evaluate):
    """A step, or an evaluation, with a NaN that one stage makes; then three good steps."""
    pipe = pipe_of(4)
    losses = [step(pipe, 0)]
    before = links_state(pipe)

    def poison(_module, _args, output):
        if isinstance(output, FakeTensor):
            return None
        if way == "backward":
            if output.requires_grad:
                output.register_hook(lambda grad: torch.full_like(grad, torch.nan))
            return None
        return output * torch.nan

    modules = [module for module in pipe.stages if module.index == stage]
    handles = [module.register_forward_hook(poison) for module in modules]
    error = None
    try:
        pipe.evaluate([rows(10, 1)]) if evaluate else step(pipe, 1)
    except Exception as raised:
        error = type(raised).__name__, str(raised)
    for handle in handles:
        handle.remove()
    assert_same_state(links_state(pipe), before)
    pipe.zero_grad()
    losses += [step(pipe, number) for number in (2, 3, 4)]
    return error, torch.stack(losses), pipe.num_steps


@pytest.mark.parametrize(
    "stage, way, evaluate, link",
    [
        slow(0, "forward", False, "boundary 0 act"),
        (2, "forward", False, "boundary 2 act"),
        slow(1, "forward", True, "boundary 1 act"),
        (2, "backward", False, "boundary 1 grad"),
    ],
)
def test_nan_is_an_error_on_every_rank_and_training_goes_on(ranks, stage, way, evaluate, link):
    expected = undisturbed_after_nan()
    for error, losses, num_steps in ranks(poisoned, 4, stage, way, evaluate):
        assert error is not None and error[0] == "FloatingPointError" and link in error[1], error
        assert same_bits(losses, expected) and num_steps == 4


def undisturbed_after_nan():
    pipe = pipe_of(4, engine="local")
    return torch.stack([step(pipe, number) for number in (0, 2, 3, 4)])
