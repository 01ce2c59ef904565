"""The walk of a message through the library: files entered, and changes of file, are counted.

A reader who follows one message walks the same way. Ceilings are what it takes today: they may
fall, and a change that lets them rise says why.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import mpcomp
from mpcomp import TensorMeta
from mpcomp.comm.channels import LocalChannel
from mpcomp.core.context import Step
from mpcomp.links.boundary import ConnectedBoundary
from mpcomp.links.build import boundaries_of

PACKAGE = str(Path(mpcomp.__file__).parent)
CPU = torch.device("cpu")
SHAPE = (4, 16, 8)


class Walk(NamedTuple):
    """What one message takes.

    Attributes:
        files: of the library that are entered.
        changes: of the file, from one call to the next.
        calls: of the library's functions.
    """

    files: int
    changes: int
    calls: int


def walk_of(run: Callable[[], Any]) -> Walk:
    """The walk of a call; comprehensions are parts of the function that they stand in."""
    way: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            way.append(code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(len(set(way)), sum(a != b for a, b in pairwise(way)), len(way))


def walks(act: str, grad: str = "none") -> dict[str, Walk]:
    """The walks of an activation over a cut within a process, in the second step."""
    (boundary,) = boundaries_of(act, grad, ("0",), seed=0, replica=0, warmup_steps=0)
    cut = ConnectedBoundary(boundary, LocalChannel(CPU), LocalChannel(CPU))
    meta = TensorMeta(SHAPE)
    found: dict[str, Walk] = {}
    for index in range(2):
        step, microbatch = (
            Step(index, True, num_microbatches=3),
            2,
        )  # another's fidelity is measured
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(index))

        def send() -> None:
            cut.act.send(x, meta, step, microbatch)  # noqa: B023

        def receive() -> None:
            cut.act.post(meta, step, microbatch)  # noqa: B023
            cut.act.receive(meta, step, microbatch)  # noqa: B023

        found = {"send": walk_of(send), "receive": walk_of(receive)}
        boundary.finish_step(finite=True)
    return found


CEILINGS = {
    ("topk:0.1", "send"): Walk(11, 46, 76),
    ("topk:0.1", "receive"): Walk(10, 43, 71),
    ("ef21+topk:0.1", "send"): Walk(16, 84, 142),
    ("ef21+topk:0.1", "receive"): Walk(15, 69, 127),
}


@pytest.mark.parametrize(("method", "way"), CEILINGS)
def test_a_message_takes_no_longer_a_walk(method, way):
    found, ceiling = walks(method)[way], CEILINGS[method, way]
    assert all(a <= b for a, b in zip(found, ceiling, strict=True)), found


def test_calls_and_files_are_counted():
    """Those of the library alone, each time that one is entered."""
    meta = TensorMeta((2, 3))
    walk = walk_of(lambda: [meta.with_rows(rows) for rows in (1, 2)])
    assert walk.calls >= 2 and walk.files == 1 and walk.changes == 0
    assert walk_of(lambda: torch.zeros(3).sum()) == Walk(0, 0, 0)
