"""Counts of what a message asks of an accelerator, counted where there is none.

Both ends of a cut are in this process and code one microbatch of a warm step, as stages do. A
message goes through the host's memory as gloo takes it (`recipes.bench.fake_accelerator`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from mpcomp.comm import gloo
from mpcomp.core.step import Step
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.links.boundary import ConnectedBoundary
from mpcomp.links.build import boundaries_of
from mpcomp.links.link import Link
from recipes.bench.fake_accelerator import Counts, FakeAccelerator

__all__ = ["cross", "rows_of"]

#: Steps before the one that is looked at: methods learn in the first ones, and make buffers.
WARMUPS: Final = 2
#: A context of a name, within which something is counted.
Around = Callable[[str], AbstractContextManager[Any]]


def rows_of(method: str, x: Tensor, accelerator: FakeAccelerator) -> Iterator[dict[str, Any]]:
    """Counts of the second microbatch of a warm step, of an activation and of a gradient.

    Args:
        method: both ways.
        x: that crosses, on that accelerator.
        accelerator: which is asked.
    """
    (boundary,) = boundaries_of(method, method, ("cut",), seed=0, replica=0, warmup_steps=0)
    rows = len(x)
    ids = tuple(tuple((row,) for row in range(start, start + rows)) for start in (0, rows))
    with patch.object(gloo, "dist", _Loop()):
        cut = ConnectedBoundary(boundary, *(_channel(link, x.device) for link in boundary.links))
        for index in range(WARMUPS):
            step = Step(index=index, train=True, sample_ids=ids)
            for microbatch in (0, 1):
                cross(cut, x, step, microbatch)
            boundary.finish_step(finite=True)
        step = Step(index=WARMUPS, train=True, sample_ids=ids)
        cross(cut, x, step, 0)
        counted: dict[str, Counts] = {}

        @contextmanager
        def around(name: str) -> Iterator[None]:
            counted[name] = accelerator.counts = Counts()
            yield
            accelerator.counts = Counts()

        cross(cut, x, step, 1, around)
        boundary.finish_step(finite=True)
    for message in ("activation", "gradient"):
        ends = {end: counted[f"{end} {message}"] for end in ("encode", "decode")}
        yield {"method": method, "message": message, **ends}


def cross(
    cut: ConnectedBoundary,
    x: Tensor,
    step: Step,
    microbatch: int,
    around: Around = lambda _: nullcontext(),
) -> tuple[Tensor, Tensor]:
    """Takes an activation over a cut and a gradient back, each end in a context of its name."""
    meta = TensorMeta.of(x)
    for way in (cut.act, cut.grad):
        way.channel.release()
    with around("encode activation"):
        cut.act.send(x, meta, step, microbatch)
    with around("decode activation"):
        cut.act.post(meta, step, microbatch)
        y, _ = cut.act.receive(meta, step, microbatch)
    with around("encode gradient"):
        cut.grad.send(x, meta, step, microbatch)
    with around("decode gradient"):
        cut.grad.post(meta, step, microbatch)
        gradient = cut.grad.receive_any(meta, step, microbatch)
    assert gradient is not None
    return y, gradient


def _channel(link: Link, device: torch.device) -> gloo.GlooChannel:
    """Both ends of a channel of gloo, in this process."""
    waits = SimpleNamespace(leaving=lambda *_: nullcontext(), on=lambda *_: nullcontext())
    mesh: Any = SimpleNamespace(device=device, wait_s=60.0, waits=waits, where="")
    group: Any = {}
    return gloo.GlooChannel(group, 0, link.name, mesh, varies=link.varies)


class _Loop:
    """A stand-in for torch.distributed: it keeps what is sent, by tag, until it is received."""

    def isend(self, x: Tensor, *, dst: int, group: dict[int, Tensor], tag: int) -> _Work:
        assert x.device.type == "cpu", "gloo reads host memory"
        group[tag] = x
        return _Work(lambda: None)

    def irecv(self, room: Tensor, *, src: int, group: dict[int, Tensor], tag: int) -> _Work:
        def arrive() -> None:
            sent = group.pop(tag)
            room[: len(sent)] = sent

        return _Work(arrive)


class _Work(NamedTuple):
    """Work that is waited for."""

    done: Callable[[], None]

    def wait(self, timeout: timedelta) -> None:
        """Ends it."""
        self.done()
