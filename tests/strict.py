"""A transport by the rules of NCCL, on CPUs: what breaks them fails here, where NCCL would hang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import mpcomp.api.launch as launch
from mpcomp.comm.mesh import ProcessMesh
from mpcomp.comm.nccl import NCCL, NCCLChannel

NOTE_BYTES = 16


class StrictChannel(NCCLChannel):
    """NCCL's channel over gloo: before each message goes its number and its length."""

    def start_send(self, message: Tensor, microbatch: int) -> tuple[Tensor, list[Any]]:
        note = torch.tensor([microbatch, message.numel()]).view(torch.uint8)
        return super().start_send(torch.cat([note, message]), microbatch)

    def start_receive(self, room: Tensor, microbatch: int) -> list[Any]:
        arriving = torch.empty(NOTE_BYTES + room.numel(), dtype=torch.uint8)
        works = super().start_receive(arriving, microbatch)
        return [Checked(works, arriving, room, (microbatch, room.numel()), self.name)]


class Checked:
    """A receive that ends with an error where what arrives is not what is waited for."""

    def __init__(
        self, works: list[Any], arriving: Tensor, room: Tensor, due: tuple[int, int], name: str
    ) -> None:
        self.works, self.arriving, self.room, self.due, self.name = works, arriving, room, due, name

    def wait(self, timeout: timedelta) -> None:
        for work in self.works:
            work.wait(timeout)
        said = tuple(self.arriving[:NOTE_BYTES].view(torch.int64).tolist())
        assert said == self.due, f"{self.name}: (microbatch, bytes) {said}, awaited {self.due}"
        self.room.copy_(self.arriving[NOTE_BYTES:])


class Strict(NCCL):
    """As `NCCL`, of gloo's groups."""

    channel = StrictChannel


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Pipelines that are made within it have the strict transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "transport_for", strict_transport)
        yield


def strict_transport(mesh: ProcessMesh, connections: int | str) -> Strict:
    return Strict(mesh)
