"""Checkpoints of what replicas remember: law 7, other replicas, other ranks, and what cannot be."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from everyday import slow
from methods import same_bits
from test_ranks_dp import (
    GRAVAC,
    NETWORK,
    ONE_A_CLASS,
    STATEFUL,
    assert_same_tensors,
    memories_of,
    pipe_of,
    sgd,
    share_of,
    state_of,
    train,
)

from mpcomp import ReplicaNetwork

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

TWO_PHASE = ReplicaNetwork(smallest=32, path="two-phase")


def figures_of(pipe):
    """What is counted and decided, without what a clock says."""
    exchange = pipe.exchange
    totals = {k: v for k, v in vars(exchange.totals).items() if not k.endswith("_s")}
    return totals, exchange.step, exchange.controller.state_dict()


def goes_on(cases, root):
    for number, (dp, network) in enumerate(cases):
        folder = Path(root) / f"{number}"
        straight = pipe_of(dp, network=network)
        optimizer = sgd(straight.parameters())
        train(straight, 6, optimizer)
        straight.save(folder, optimizer=optimizer)
        expected = train(straight, 4, optimizer, first=6)

        resumed = pipe_of(dp, network=network, seed=1)
        other = sgd(resumed.parameters())
        train(resumed, 1, other)  # which must leave nothing
        resumed.load(folder, optimizer=other)
        resumed.zero_grad()
        assert same_bits(train(resumed, 4, other, first=6), expected), dp
        assert_same_tensors(resumed.state_dict(), straight.state_dict())
        assert_same_tensors(memories_of(resumed), memories_of(straight))
        assert figures_of(resumed) == figures_of(straight), dp
        assert memories_of(straight), dp
        assert straight.report(show=False)["replicas"]["ratio"] < 1


#: One of each class that remembers something.
FIRST = [
    *((dp, NETWORK) for dp in STATEFUL if dp in ONE_A_CLASS),
    ("ef21+topk:0.2", TWO_PHASE),
]
#: The others, in two stages, where each rank has its part.
OTHERS = [
    *((dp, NETWORK) for dp in STATEFUL if (dp, NETWORK) not in FIRST),
    *((dp, NETWORK) for dp in ("powersgd:2", GRAVAC)),  # of all stages together
    *((dp, TWO_PHASE) for dp in ("ef:storage=4+topk:0.2", "dgc:0.2")),
]


@pytest.mark.parametrize(
    "num_ranks, cases",
    [(2, FIRST[::2]), slow(2, FIRST[1::2]), slow(4, OTHERS)],
    ids=["half", "rest", "others"],
)
def test_going_on_is_as_if_never_stopped(ranks, num_ranks, cases, tmp_path):
    """Every stateful method: the sixth step is in the middle of an interval and of a window."""
    ranks(goes_on, num_ranks, cases, str(tmp_path))


def back_to_the_start(root):
    """State that came after a save is forgotten when that save is loaded."""
    pipe = pipe_of(GRAVAC)
    optimizer = sgd(pipe.parameters())
    pipe.save(root, optimizer=optimizer)
    losses = train(pipe, 4, optimizer)
    pipe.load(root, optimizer=optimizer)
    assert not memories_of(pipe) and pipe.exchange.step == 0
    pipe.zero_grad()
    assert same_bits(train(pipe, 4, optimizer), losses)


def test_what_came_later_is_forgotten(ranks, tmp_path):
    ranks(back_to_the_start, 2, str(tmp_path / "start"))


# -- other ranks ----------------------------------------------------------------------------------


def moved(cases, root):
    """From 4 replicas of one rank, or 2 of two, to the other; gives what both remember."""
    found = []
    for number, (dp, network, before, after) in enumerate(cases):
        folder = Path(root) / f"{number}"
        pipe = pipe_of(dp, network=network, replicas=before)
        optimizer = sgd(pipe.parameters())
        train(pipe, 5, optimizer)
        pipe.save(folder, optimizer=optimizer)
        first = memories_of(pipe), figures_of(pipe), state_of(pipe)
        other = pipe_of(dp, network=network, replicas=after, seed=1)
        optimizer = sgd(other.parameters())
        other.load(folder, optimizer=optimizer)
        second = memories_of(other), figures_of(other), state_of(other)
        assert other.report(show=False)["replicas"]["wire_bytes"] > 0
        train(other, 3, optimizer, first=5)
        found.append((first, second, state_of(other)))
    return found


def in_all(results, i, which, num_replicas):
    """Of each replica, what all of its ranks remember."""
    ranks_each = 4 // num_replicas
    replicas = []
    for first in range(0, 4, ranks_each):
        of_replica = {}
        for rank in range(first, first + ranks_each):
            of_replica.update(results[rank][i][which][0])
        replicas.append(of_replica)
    return replicas


def mean_of(replicas, field):
    """The mean over replicas, by parameter, of all that ends in ``field``."""
    names = {key for replica in replicas for key in replica if key.endswith(f"/{field}")}
    assert names
    return {
        name: torch.stack([replica[name] for replica in replicas]).mean(dim=0)
        for name in names
        if name.startswith("own/")
    }


def owed(replicas, field):
    """What replicas remember of the means that they formed, put together by parameter."""
    names = {key for replica in replicas for key in replica if key.startswith("phase/")}
    return {
        name.replace("phase/", "own/"): torch.cat([replica[name] for replica in replicas])
        for name in names
        if name.endswith(f"/{field}")
    }


MOVES = [
    ("ef+topk:0.2", NETWORK, 4, 2),
    ("ef+topk:0.2", NETWORK, 2, 4),
    ("ef+topk:0.2", TWO_PHASE, 4, 2),
    ("ef21+topk:0.2", NETWORK, 4, 2),
    ("ef21+topk:0.2", TWO_PHASE, 4, 2),
    ("dgc:0.2", TWO_PHASE, 4, 2),
    ("powersgd:2", NETWORK, 4, 2),
    (GRAVAC, NETWORK, 2, 4),
    ("accordion:low=topk/0.5:high=topk/0.1:interval=4", NETWORK, 4, 2),
]


@pytest.mark.slow
def test_another_number_of_replicas_has_the_same_mean(ranks, tmp_path):
    results = ranks(moved, 4, MOVES, str(tmp_path))
    for i, (dp, network, before, after) in enumerate(MOVES):
        old, new = in_all(results, i, 0, before), in_all(results, i, 1, after)
        assert len(old) == before and len(new) == after
        assert not any(key.startswith("phase/") for replica in new for key in replica)
        for replica in new[1:]:  # of EF21 as of all others: each has the mean
            assert_same_tensors(replica, new[0])
        fields = {"ef21": ["own", "mean"], "dgc:": ["velocity", "sum"]}.get(dp[:4], ["residual"])
        for field in fields:
            mean, expected = mean_of(new, field), mean_of(old, field)
            if network is TWO_PHASE and field in ("residual", "sum"):
                pieces = owed(old, field)
                assert pieces and all(bool(piece.any()) for piece in pieces.values())
                expected = {name: v + pieces.get(name, 0) for name, v in expected.items()}
            if network is TWO_PHASE and field == "own":  # less what was owed
                pieces = owed(old, "residual")
                expected = {
                    name: v - pieces[f"{name.removesuffix('own')}residual"]
                    for name, v in expected.items()
                }
            assert mean.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(mean[name], value, rtol=1e-5, atol=1e-6)
        for rank in range(4):
            (_, figures, weights), (_, after_load, loaded), last = results[rank][i]
            assert_same_tensors(loaded, weights)
            assert after_load[1] == figures[1]  # steps
            assert_same_tensors(last, results[0][i][2])
            assert all(value.isfinite().all() for value in last.values())
        wire = [sum(results[r][i][which][1][0]["wire_bytes"] for r in range(4)) for which in (0, 1)]
        assert wire[0] == wire[1] > 0
        if dp == GRAVAC:
            assert results[0][i][0][1][2] == results[3][i][1][1][2]


def other_stages(root):
    """Two replicas of two ranks: one stage each, then two of another schedule."""
    cases = ["dgc:0.2", "powersgd:2", "accordion:low=topk/0.5:high=topk/0.1:interval=4"]
    for dp in cases:
        folder = Path(root) / dp.replace("/", "_")
        one = pipe_of(dp, network=NETWORK, split=["2"])
        train(one, 6)
        one.save(folder)
        two = pipe_of(dp, network=NETWORK, split=["4"], seed=1)
        two.load(folder)
        three = pipe_of(dp, "ZBVZeroBubble", network=NETWORK, seed=2)
        three.load(folder)
        for pipe in (one, two, three):
            train(pipe, 6, first=6)
        whole = state_of(one)
        assert_same_tensors(state_of(two), whole)
        for name, value in state_of(three).items():  # whose backward adds up otherwise
            torch.testing.assert_close(value, whole[name], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_other_stages_on_a_rank_find_theirs_by_name(ranks, tmp_path):
    ranks(other_stages, 4, str(tmp_path))


# -- what cannot be -------------------------------------------------------------------------------


def refused(root):
    """On all ranks, and nothing has been changed."""
    pipe = pipe_of("ef+topk:0.2")
    train(pipe, 2)
    pipe.save(root)
    said = []
    for dp, network in [
        ("ef+topk:0.1", NETWORK),
        ("dgc:0.2", NETWORK),
        (None, None),
        ("ef+topk:0.2", ReplicaNetwork(smallest=300)),
    ]:
        other = pipe_of(dp, network=network, seed=1)
        before = state_of(other)
        try:
            other.load(root)
        except ValueError as error:
            said.append(str(error))
        assert_same_tensors(state_of(other), before)
        other.forward_backward(*share_of(other, 0))
    return said


def test_state_that_has_no_place_is_an_error(ranks, tmp_path):
    for said in ranks(refused, 2, str(tmp_path / "saved")):
        assert len(said) == 4
        assert "holds state of dp_comp=ef+topk:0.2, this pipeline has ef+topk:0.1" in said[0]
        assert "this pipeline has dgc:0.2" in said[1]
        assert "this pipeline has none: use the same method" in said[2]
        assert "for which there is no place here" in said[3]


def fresh(root):
    """From a run without compression, or with a method that remembers nothing."""
    for number, dp in enumerate((None, "topk:0.2")):
        folder = Path(root) / f"{number}"
        pipe = pipe_of(dp)
        train(pipe, 3)
        pipe.save(folder)
        other = pipe_of("ef+topk:0.1", seed=1)
        train(other, 2)
        other.load(folder)
        assert other.num_steps == 3 and other.exchange.step == 0
        assert not memories_of(other) and other.exchange.totals.wire_bytes == 0
        assert_same_tensors(state_of(other), state_of(pipe))
        train(other, 2)
    back = pipe_of(None, seed=1)
    back.load(folder)
    assert_same_tensors(state_of(back), state_of(pipe))


def test_replicas_begin_where_nothing_was_remembered(ranks, tmp_path):
    ranks(fresh, 2, str(tmp_path))


def own_disks(root):
    """Each rank has its own part alone: enough for the same replicas, not for others."""
    folder = Path(root) / f"disk{dist.get_rank()}" / "saved"
    pipe = pipe_of("ef+topk:0.2", replicas=4)
    train(pipe, 2)
    pipe.save(folder)
    pipe.load(folder)
    other = pipe_of("ef+topk:0.2", replicas=4, network=ReplicaNetwork(smallest=32, per_machine=2))
    try:
        other.load(folder)
    except ValueError as error:
        return str(error)
    finally:
        shutil.rmtree(folder)


def test_parts_of_other_replicas_that_are_missing_are_named(ranks, tmp_path):
    for message in ranks(own_disks, 4, str(tmp_path)):
        assert "lacks rank-0000" in message and "Copy them into this folder" in message
