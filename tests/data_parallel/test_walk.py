"""The walk of one gradient through the exchange: files, changes of file and classes that it enters.

The ceilings are what was measured when they were last lowered: at first 34 files, 13 of them in
data_parallel, 199 changes and 30 classes. Who adds a file to the way raises one, and says why.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from replica_runs import alone
from torch import nn

import mpcomp
from mpcomp import ReplicaNetwork
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.core.context import Step
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.replica_sync import CompressedAverage, trained_in

ROOT = Path(mpcomp.__file__).parent


@dataclass
class Walk:
    """The functions of mpcomp that a call enters, in order.

    Attributes:
        files: of each of them, under mpcomp.
        classes: whose methods they are.
    """

    files: list[str] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)

    def through(self, function: Callable[[], object]) -> None:
        """Calls a function, and walks along."""

        def noting(frame, event, _):
            path = Path(frame.f_code.co_filename)
            if event != "call" or not path.is_relative_to(ROOT):
                return
            self.files.append(str(path.relative_to(ROOT)))
            if frame.f_code.co_varnames[:1] == ("self",):
                self.classes.add(type(frame.f_locals["self"]).__name__)

        before = sys.getprofile()
        sys.setprofile(noting)
        try:
            function()
        finally:
            sys.setprofile(before)

    @property
    def changes(self) -> int:
        """How often the next function is in another file."""
        return sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))


def walk_of_a_gradient() -> Walk:
    """The second step of one matrix by ef+topk, gathered, in a group of one rank."""
    torch.manual_seed(0)
    model, walk, rest = nn.Linear(16, 8, bias=False), Walk(), torch.zeros(8, 16)
    with alone():
        mesh = ProcessMesh(1, 30.0, torch.device("cpu"))
        exchange = Exchange(
            trained_in([model]),
            replica_method_of("ef+topk:0.1"),
            dist.group.WORLD,
            network=ReplicaNetwork("gather", smallest=64),
            waiting=lambda: mesh.waiting("gradients of other replicas"),
        )
        sync = CompressedAverage([model], mesh, exchange)

        def go(step: Step) -> None:
            sync.reduce(step)
            sync.finish_step(finite=True)

        for index in range(2):
            model(torch.randn(4, 16)).square().sum().backward()
            target = rest + model.weight.grad
            if index == 0:
                go(Step(index, True))
            else:
                walk.through(partial(go, Step(index, True)))
            rest = target - model.weight.grad
            assert model.weight.grad.count_nonzero() == 13
            assert torch.equal(model.weight.grad[model.weight.grad != 0], target[rest == 0])
            model.zero_grad()
        sync.close()
    return walk


def test_a_gradient():
    walk = walk_of_a_gradient()
    files = set(walk.files)
    own = {name for name in files if name.startswith("data_parallel/")}
    assert len(files) <= 20, sorted(files)
    assert len(own) <= 6, sorted(own)
    assert walk.changes <= 166
    assert len(walk.classes) <= 27, sorted(walk.classes)
