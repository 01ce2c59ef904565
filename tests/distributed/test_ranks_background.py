"""Coding in the background: the bits, errors and memories of coding in turn.

A run in threads is compared with one that codes in turn, in the same processes, and with one
process. What is timed are deadlines alone.
"""

import os
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from everyday import slow
from methods import same_bits
from models import assert_same_state, links_state
from runs import Run, assert_same, train, train_all
from test_ranks_faults import AT_ONCE_S, TIMEOUT_S, die, doze, ends, pipe_of, step, with_fault

from mpcomp.links.link import Link

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

PLAIN = Run(steps=3, rows=(10, 9), ids=12)
LAW = [
    replace(PLAIN, act="topk:0.3", grad="same"),
    # A skipped step leaves links as they were.
    replace(PLAIN, act="ef21+topk:0.3", grad="ef+topk:0.3", scale=64.0, overflow=(1, 0)),
    replace(PLAIN, act="aqsgd+quant:4", grad="quant:4:rounding=stochastic", evaluate=True),
    replace(PLAIN, act="klt:weighted=true+step:0.3", grad="klt+step:0.3"),
    replace(PLAIN, act="auto:scratch", grad="auto:scratch"),
]
#: Other methods, and what a loop and a pipeline may have besides.
MORE = [
    PLAIN,
    replace(PLAIN, act="auto:relu", grad="auto:relu", steps=6),
    replace(PLAIN, act="auto:memory", grad="auto:memory", steps=6),
    replace(LAW[1], model="deep convnet", pipeline={"recompute": True}, autocast=torch.bfloat16),
    replace(LAW[2], pipeline={"checks": "message", "in_flight": 1}, off=(1,)),
    replace(LAW[0], frozen=("0.",), thaw=2, chunks=5),
    replace(LAW[1], model="masked", stages=2, steps=6),
]


def coding_in(where):
    """Pipelines made from now on code in the background, or in turn; gives who has coded."""
    os.environ["MPCOMP_BACKGROUND"] = str(int(where == "background"))
    who = set()

    def noting(name):
        real = getattr(Link, name)

        def coded(link, *args):
            who.add((name, link.direction, threading.current_thread().name))
            return real(link, *args)

        setattr(Link, name, coded)

    noting("encode")
    noting("decode")
    return who


def trained_both_ways(runs):
    who = coding_in("background")
    beside = train_all(runs)
    threads, _ = set(who), who.clear()
    os.environ["MPCOMP_BACKGROUND"] = "0"
    return beside, train_all(runs), threads, set(who)


def check_law(ranks, num_ranks, runs):
    """Threads that have coded, by rank."""
    results = ranks(trained_both_ways, num_ranks, runs)
    for k, run in enumerate(runs):
        alone = train(run)
        for way in (0, 1):
            assert_same(run, [result[way][k] for result in results], alone)
        for beside, in_turn, *_ in results:
            assert beside[k].sent == in_turn[k].sent, run
            for name, error in beside[k].fidelity.items():
                assert error == in_turn[k].fidelity[name] or error != error, (run, name)
    assert all(name == "MainThread" for *_, in_turn in results for *_, name in in_turn)
    return [threads for _, _, threads, _ in results]


def test_bits_are_those_of_coding_in_turn(ranks):
    first, last = check_law(ranks, 2, LAW)
    # The first microbatch's message, which is encoded while ranks agree, is not asked for beside.
    act, grad = "mpcomp boundary 0 act", "mpcomp boundary 0 grad"
    assert {("encode", "act", act), ("decode", "grad", grad)} < first
    assert {("decode", "act", act), ("encode", "grad", grad)} < last


@pytest.mark.slow
def test_bits_of_more_methods(ranks):
    check_law(ranks, 2, MORE)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, runs", [(3, MORE), (4, LAW)])
def test_bits_of_more_ranks(ranks, num_ranks, runs):
    runs = [replace(run, stages=num_ranks, chunks=7, rows=(14, 15), ids=20) for run in runs]
    for threads in check_law(ranks, num_ranks, runs)[1:-1]:
        assert len({name for *_, name in threads}) == 5  # four ways, and evaluation


# -- it is beside ----------------------------------------------------------------------------------


def crosswise():
    """Each message is encoded once the stage runs on, and decoded before the stage asks for it."""
    coding_in("background")
    pipe = pipe_of(2, chunks=4, in_flight=4)
    rank = dist.get_rank()
    ran = [threading.Event() for _ in range(4)]
    decoded = [threading.Event() for _ in range(4)]
    numbers = iter(range(4))
    late = []

    def began(*_):
        number = next(numbers)
        ran[number].set()
        if rank == 1 and number < 3 and not decoded[number + 1].wait(AT_ONCE_S):
            late.append(("decode", number))

    def encode(link, x, step, microbatch, real=Link.encode):
        if rank == 0 and 0 < microbatch < 3 and not ran[microbatch + 1].wait(AT_ONCE_S):
            late.append(("encode", microbatch))
        return real(link, x, step, microbatch)

    def decode(link, message, meta, step, microbatch, *args, real=Link.decode):
        x = real(link, message, meta, step, microbatch, *args)
        if rank == 1:
            decoded[microbatch].set()
        return x

    step(pipe, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "encode", encode)
        patch.setattr(Link, "decode", decode)
        [module] = pipe.stages
        module.register_forward_pre_hook(began)
        step(pipe, 1)
    return late, [event.is_set() for event in ran]


def test_messages_are_coded_while_stages_run(ranks):
    for late, ran in ranks(crosswise, 2):
        assert late == [] and ran == [True] * 4


# -- errors ----------------------------------------------------------------------------------------

#: Function of a link, rank where it fails, direction, what it raises.
FAILURES = [
    ("encode", 0, "act", ValueError("boom")),
    ("encode", 1, "grad", RuntimeError("boom")),
    ("decode", 1, "act", ValueError("boom")),
    ("decode", 0, "grad", RuntimeError("boom")),
]


def failing(where):
    """How a step ends in which a message cannot be coded, of each failure, and what it leaves."""
    coding_in(where)
    found = []
    for function, rank, direction, error in FAILURES:
        pipe = pipe_of(2)
        step(pipe, 0)
        before, real = links_state(pipe), getattr(Link, function)

        place = {"encode": 2, "decode": 3}[function]  # of the microbatch

        def coded(link, *args, real=real, way=direction, error=error, place=place):
            if link.direction == way and args[place] == 2:
                raise error
            return real(link, *args)

        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == rank:
                patch.setattr(Link, function, coded)
            found.append(ends(pipe, [lambda pipe=pipe: step(pipe, 1)]))
        assert_same_state(links_state(pipe), before)
        assert all(link.plans.step is None and not link._coded for link in pipe.links)
        workers = [t for t in threading.enumerate() if t.name.startswith("mpcomp boundary")]
        assert bool(workers) == (where == "background")
    return found


def test_a_message_that_cannot_be_coded_is_the_error_that_it_is_in_turn(ranks):
    background, in_turn = (ranks(failing, 2, where) for where in ("background", "in turn"))
    for rank in range(2):
        for case, here, there in zip(FAILURES, background[rank], in_turn[rank], strict=True):
            # What is decoded ahead is noticed while another message is waited for.
            said = [end.message.partition(" Noticed here")[0] for end in (here, there)]
            assert (here.error, said[0], here.again) == (there.error, said[1], ""), case
            assert here.seconds < AT_ONCE_S, case
            if rank == case[1]:
                assert here.error == type(case[3]).__name__ and here.message.endswith("boom"), case
            else:
                what = "forward" if case[2] == "act" else "backward"
                assert here.error == "PeerError", case
                assert f"failed at stage {case[1]}, microbatch 2, {what}: " in here.message, case


def beside(function, *args):
    os.environ["MPCOMP_BACKGROUND"] = "1"
    return function(*args)


@pytest.mark.parametrize(
    "stage, way, fault",
    [(1, "forward", die), *(slow(*each, die) for each in ((0, "backward"), (1, "backward")))],
)
def test_a_peer_that_dies_is_named_at_once(ranks, stage, way, fault):
    args = (with_fault, 2, None, stage, 2, way, fault, {})
    end = ranks(beside, 2, *args, may_fail=True)[1 - stage]
    assert end.error == "PeerError" and end.seconds < AT_ONCE_S and end.again == "", end
    assert end.message.startswith(f"rank {stage} (stage {stage}) is gone"), end
    assert "in time" not in end.message, end


@pytest.mark.parametrize("stage, way", [(1, "backward"), slow(0, "forward")])
def test_a_peer_that_stalls_is_named_within_the_timeout(ranks, stage, way):
    args = (with_fault, 2, None, stage, 2, way, doze, {"timeout": TIMEOUT_S})
    end = ranks(beside, 2, *args, without=[stage])[1 - stage]
    assert end.error == "PeerError" and end.seconds < TIMEOUT_S + AT_ONCE_S and end.again == "", end
    assert end.message.startswith(f"rank {stage} (stage {stage}) did not answer in time"), end


# -- checkpoints -----------------------------------------------------------------------------------


def gone_on(folder, where_at_first, where_then):
    """Losses and links of four steps, between which a checkpoint is saved and loaded."""
    coding_in(where_at_first)
    options = {"act_comp": "aqsgd+quant:4", "grad_comp": "ef21+topk:0.3"}
    pipe = pipe_of(2, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number in range(4):
        if number == 2:
            pipe.save(folder, optimizer=optimizer)
            os.environ["MPCOMP_BACKGROUND"] = str(int(where_then == "background"))
            pipe = pipe_of(2, **options)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
            pipe.load(folder, optimizer=optimizer)
        losses.append(step(pipe, number))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), links_state(pipe)


def test_a_checkpoint_of_either_goes_on_as_the_other(ranks, tmp_path):
    ways = [("background", "in turn"), ("in turn", "background")]
    (first, second) = (
        ranks(gone_on, 2, str(tmp_path / way[0].replace(" ", "")), *way) for way in ways
    )
    for (losses, links), (others, their_links) in zip(first, second, strict=True):
        assert same_bits(losses, others)
        assert_same_state(links, their_links)
    assert len(set(first[0][0].tolist())) == 4
