"""The seam for another network: NCCL's rules on CPUs, and a transport that is one class."""

import time
from pathlib import Path

import pytest
import torch
from everyday import slow
from ranks import preload
from runs import SCHEDULES, Run, assert_same, descending, train, train_all
from strict import strictly

import mpcomp.api.launch as launch
from mpcomp.comm.channels import Channel
from mpcomp.comm.transport import Transport

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
    ]  # fmt: skip


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


def one_of_unequal_length(runs):
    """The strict transport's error for a link that calls its varying messages fixed ones."""
    from mpcomp.links.link import Link

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "varies", False)
        return train_strictly(runs)


def test_the_strict_transport_sees_what_would_hang(ranks):
    run = Run(act="step:0.2:centre=true", grad="quant:8", steps=1, chunks=2, rows=(16,))
    results = ranks(one_of_unequal_length, 2, [run], may_fail=True)
    assert any("(microbatch, bytes)" in str(result) for result in results)


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
