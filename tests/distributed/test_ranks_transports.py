"""The seam for another network: NCCL's rules on CPUs, and a transport that is one class."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from everyday import slow
from models import rows
from ranks import preload
from runs import KINDS, SCHEDULES, Kind, Run, assert_same, descending, train, train_all
from strict import Operations, Strict, strictly
from torch import nn

import mpcomp.api.launch as launch
from mpcomp.comm.channels import Channel
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.comm.nccl import NCCLChannel
from mpcomp.comm.transport import Transport
from mpcomp.links.link import Link

preload("strict")

#: Fixed lengths; lengths that vary; a basis that comes with some of the messages; memories.
METHODS = (
    (None, None),
    ("topk:0.5", "same"),
    ("ef21+topk:0.5", "quant:8"),
    ("step:0.2:centre=true", "step:1:rounding=dither"),
    ("klt+step:0.05", "klt+quant:8"),
    ("aqsgd+quant:4", "aqsgd+step:0.1"),
)


def runs_of(schedule):
    return [
        Run(schedule=schedule, stages=2 if schedule in (None, "1F1B", "GPipe") else 4, act=act,
            grad=grad, steps=4, chunks=4, rows=(64,), ids=64)
        for act, grad in METHODS
    ] + ([TIED] if schedule is None else [])  # fmt: skip


def tied_vectors():
    """Two stages share a vector, whose gradient has no rows to leave out, so NCCL takes it."""
    layers = [nn.Linear(13, 16), nn.LayerNorm(16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 5)]
    layers[3].weight = layers[1].weight
    return nn.Sequential(*layers)


class Stopped(nn.Module):
    """A layer whose input gets no gradient."""

    def forward(self, x):
        return x.detach()


def stopped():
    return nn.Sequential(nn.Linear(13, 16), nn.Tanh(), Stopped(), nn.Linear(16, 5))


KINDS["tied vectors"] = Kind(tied_vectors, rows, split=("2",))
KINDS["stopped chain"] = Kind(stopped, rows, split=("1",))
TIED = Run("tied vectors", pipeline={"ties": "apart"})


def train_strictly(runs):
    with strictly():
        return train_all(runs)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "schedule", [None, *(slow(each) for each in SCHEDULES if each is not None)]
)
def test_nothing_breaks_the_rules_of_nccl(ranks, schedule):
    """Lengths are equal or go by gloo, nothing is posted ahead, and order is that of waiting."""
    runs = runs_of(schedule)
    alone = descending if schedule == "LoopedBFS" else train
    for run, *ours in zip(runs, *ranks(train_strictly, 2, runs), strict=True):
        assert_same(run, ours, alone(run))


# Each takes out a cure, so that a run breaks a rule.


def what_varies_goes_over_nccl(patch):
    patch.setattr(Link, "varies", False)


def a_notice_is_short(patch):
    patch.setattr(NCCLChannel, "equal_lengths", False)


def receives_are_begun_ahead(patch):
    patch.setattr(NCCLChannel, "posts_ahead", True)


def ranks_do_not_meet_when_they_connect(patch):
    patch.setattr(Operations, "all_reduce", lambda *_, **__: None)


def operations_begin_alone(patch):
    patch.setattr(NCCLChannel, "_begin", lambda self, kind, x: [kind(x, self.peer, self.group)])


LENGTHS, AHEAD, MEETING = "(microbatch, bytes)", "was begun ahead", "each waits for the other"

#: Without a cure: the run, and words of the rule that it breaks.
WITHOUT = {
    what_varies_goes_over_nccl: (Run(act="step:0.2:centre=true", chunks=2, rows=(16,)), LENGTHS),
    a_notice_is_short: (Run("stopped chain"), LENGTHS),
    receives_are_begun_ahead: (Run(), AHEAD),
    ranks_do_not_meet_when_they_connect: (TIED, MEETING),
    operations_begin_alone: (TIED, MEETING),
}


def train_without(cure, run):
    with pytest.MonkeyPatch.context() as patch, strictly():
        cure(patch)
        return train(run, alone=False)


@pytest.mark.parametrize("cure", WITHOUT, ids=lambda cure: cure.__name__)
def test_the_strict_transport_tells_which_rule_is_broken(ranks, cure):
    run, words = WITHOUT[cure]
    results = ranks(train_without, 2, cure, replace(run, steps=1), may_fail=True)
    assert any(words in str(result) for result in results), results


def wait_in_another_order():
    """The second rank waits for the second message first."""
    mesh = ProcessMesh(1, 60.0, torch.device("cpu"))
    mesh.connect(["rank 0", "rank 1"])
    with strictly():
        channel = Strict(mesh).open(0, 1, "link", varies=False)
        for microbatch in range(2):
            if mesh.place == 0:
                channel.send(microbatch, torch.ones(24, dtype=torch.uint8))
            else:
                channel.post(microbatch, 24)
        if mesh.place == 1:
            channel.receive(1)
        dist.barrier()  # the first rank stays until the second one has found it


def test_the_strict_transport_knows_no_tags(ranks):
    _, error = ranks(wait_in_another_order, 2, may_fail=True)
    assert error == ("AssertionError", "link: (microbatch, bytes) (0, 24), awaited (1, 24)")


class Files(Transport):
    """Messages through files in a folder that both ranks have: all that a transport needs."""

    folder: Path

    def open(self, a, b, name, *, varies=True, at=None):
        if self.mesh.place not in (a, b):
            return None
        made = FileChannel()
        made.at = self.folder / f"{name} {self.mesh.replica}".replace(" ", "-")
        made.device = self.mesh.device
        return made


class FileChannel(Channel):
    on_wire = True

    def __init__(self):
        self.taken, self.sent = {}, {}

    def path(self, counts, microbatch):
        counts[microbatch] = counts.get(microbatch, 0) + 1  # of this microbatch's messages
        return Path(f"{self.at}-{microbatch}-{counts[microbatch]}")

    def post(self, microbatch, num_bytes, room=0):
        pass

    def send(self, microbatch, message):
        path = self.path(self.sent, microbatch)
        written = path.with_name(path.name + ".part")
        written.write_bytes(message.numpy().tobytes())
        written.replace(path)

    def send_nothing(self, microbatch, num_bytes):
        self.send(microbatch, torch.empty(0, dtype=torch.uint8))

    def receive_any(self, microbatch):
        path, begin = self.path(self.taken, microbatch), time.perf_counter()
        while not path.exists():
            assert time.perf_counter() - begin < 60, path
            time.sleep(1e-4)
        self.waited_s += time.perf_counter() - begin
        message = torch.frombuffer(bytearray(path.read_bytes() or b"\0"), dtype=torch.uint8)
        return message if path.stat().st_size else None

    def receive(self, microbatch):
        message = self.receive_any(microbatch)
        assert message is not None
        return message

    def release(self):
        pass

    def close(self):
        pass


def train_by_files(runs, folder):
    outcomes = []
    for i, run in enumerate(runs):
        Files.folder = Path(folder) / str(i)
        Files.folder.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "transport_for", lambda mesh, connections: Files(mesh))
            outcomes += train_all([run])
    return outcomes


@pytest.mark.timeout(120)
def test_another_transport_is_one_class(ranks, tmp_path):
    """The laws hold over it: losses, weights and bytes are those of one process."""
    runs = [*runs_of(None), Run("convnet", act="topk:0.5", grad="same", steps=3, chunks=2)]
    for run, *ours in zip(runs, *ranks(train_by_files, 2, runs, str(tmp_path)), strict=True):
        assert_same(run, ours, train(run))
