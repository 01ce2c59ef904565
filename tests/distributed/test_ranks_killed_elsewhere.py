"""Replicas that die while others exchange something with them outside of a step's messages.

What torch's own collectives say of it names no rank, and is no error of the script.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import slow
from models import rows
from runs import deep
from torch._subclasses.fake_tensor import FakeTensor

import mpcomp
from mpcomp import PeerError, ReplicaNetwork
from mpcomp.data_parallel import connect
from mpcomp.data_parallel import network as groups

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

#: Nobody waits so long.
TIMEOUT_S = 90.0


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def pipe_of(**kwargs):
    torch.manual_seed(0)
    options = {"loss_fn": F.cross_entropy, "timeout": TIMEOUT_S, "split": 1, "replicas": 2}
    return mpcomp.pipeline(deep(), 2, **{**options, **kwargs})


class Training:
    """A pipeline that has made a step on all ranks."""

    def __init__(self, **kwargs):
        self.pipe = pipe_of(**kwargs)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters())
        self.pipe.follow(self.optimizer)
        self.backward()
        self.update()

    def backward(self):
        self.pipe.forward_backward(*rows(4, 0))

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def in_the_exchange_of_local_sgd(last, folder):
    training = Training(dp_comp="diloco:2")
    training.backward()
    if last:
        die()
    training.update()


def in_a_forward(last, folder, **kwargs):
    training = Training(shard=True, **kwargs)
    if last:  # when the stage has been gathered, and its blocks have not
        [stage] = training.pipe.stages
        stage.register_forward_pre_hook(
            lambda _, args: None if isinstance(args[0], FakeTensor) else die()
        )
    training.backward()


def in_a_forward_of_few_bits(last, folder):
    in_a_forward(last, folder, param_comp="quant:8")


def in_an_evaluation(last, folder):
    training = Training(shard=True)
    if last:
        [stage] = training.pipe.stages
        stage.register_forward_pre_hook(
            lambda _, args: None if isinstance(args[0], FakeTensor) else die()
        )
    training.pipe.evaluate([rows(4, 0)])


def of_pieces(last, act):
    training = Training(shard=True)
    training.backward()
    if last:
        training.pipe.mesh.whole = die
    act(training)


def in_the_norm(last, folder):
    of_pieces(last, lambda training: mpcomp.clip_grad_norm_(training.pipe, 1.0))


def in_a_state(last, folder):
    of_pieces(last, lambda training: training.pipe.state_dict())


def in_merging(last, folder):
    of_pieces(last, lambda training: training.pipe.merge())


def in_a_save(last, folder):
    def save(training):
        training.pipe.save(Path(folder) / "checkpoint", optimizer=training.optimizer)

    of_pieces(last, save)


def in_connecting_replicas(last, folder):
    if last:
        connect.GradientAverage = die
    pipe_of()


def in_giving_weights(last, folder):
    if last:
        connect._sync_module_states = die
    pipe_of(dp_comp="topk:0.1")


def in_connecting_machines(last, folder):
    if last:
        groups._split_group = die
    network = ReplicaNetwork(smallest=16, per_machine=2)
    # What connects waits in torch's store for the others' addresses, and learns of no death.
    pipe_of(dp_comp="topk:0.1", replicas=4, network=network, timeout=6.0)


def first_error(place, folder):
    """The error of a rank that lives on."""
    try:
        place(dist.get_rank() == dist.get_world_size() - 1, folder)
    except PeerError as error:
        return str(error)
    return "no error"


PLACES = [
    in_the_exchange_of_local_sgd,
    in_a_forward,
    in_the_norm,
    in_a_save,
    in_connecting_replicas,
    *map(
        slow,
        [
            in_a_forward_of_few_bits,
            in_an_evaluation,
            in_a_state,
            in_merging,
            in_giving_weights,
            in_connecting_machines,
        ],
    ),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_replica_that_dies_is_named_by_the_others(ranks, tmp_path, place):
    size, how = 2, "is gone"
    if place is in_connecting_machines:
        size, how = 4, "did not answer in time"
    *others, died = ranks(first_error, size, place, str(tmp_path), may_fail=True)
    assert died == ("died", str(-signal.SIGKILL)), died
    for rank, said in enumerate(others):
        assert isinstance(said, str), (rank, said)
        assert said.startswith(f"rank {size - 1} (stage 0 of replica {size - 1}) {how}"), said
