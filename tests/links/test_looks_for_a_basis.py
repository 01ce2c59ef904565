"""When the sender of a learned basis looks for a better one: seldom, and in time."""

import math
from statistics import median
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from mpcomp import ECSQ, KLT
from mpcomp.compressors.klt import Basis
from mpcomp.links.endpoints.basis import _Sender

WIDTH, VECTORS = 48, 512


class Run(NamedTuple):
    """Looks and purchases of a sender.

    Attributes:
        looks: how many.
        rents: at each purchase, in prices.
        bought: steps of the purchases.
    """

    looks: int
    rents: list[float]
    bought: list[int]


class Drifting:
    """Microbatches whose directions turn by an angle a step."""

    def __init__(self, angle: float) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(3, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        self.directions = torch.linalg.qr(drawn[0]).Q
        self.turn = torch.linalg.matrix_exp(angle * (drawn[1] - drawn[1].T) / math.sqrt(2 * WIDTH))
        self.sizes = 0.9 ** torch.arange(WIDTH, dtype=torch.float64)
        self.generator = generator

    def next(self) -> torch.Tensor:
        self.directions = self.turn @ self.directions
        drawn = torch.randn(VECTORS, WIDTH, generator=self.generator, dtype=torch.float64)
        return ((drawn * self.sizes) @ self.directions.T).float()


def run(data: Drifting, steps: int, sender: _Sender | None = None) -> Run:
    """Looks and purchases in some steps of one microbatch, by a new sender or a given one."""
    sender = sender or _Sender(KLT(ECSQ(0.2)))
    rents, bought = [], []
    with mock.patch.object(Basis, "of", wraps=Basis.of) as looked:
        for step in range(steps):
            x, before, had = data.next(), sender.basis, sender.news
            sender.count(VECTORS, announces=True)
            sender.observe(x)
            sender.commit()
            if sender.news is not None and had is None:
                saved = sender._bytes(x, before) - sender._bytes(x, sender.news)
                rents.append(saved * sender._steps / sender.news.coded.numel())
                bought.append(step)
    return Run(looked.call_count, rents, bought)


@pytest.mark.parametrize("angle", [0.003, 0.01, 0.03])
def test_it_looks_a_few_times_for_each_basis_and_pays_little_too_much_rent(angle):
    looks, rents, bought = run(Drifting(angle), 120)
    assert len(bought) >= 10
    assert looks <= 3 * len(bought)
    assert median(rents) < 1.5 and max(rents[1:]) < 2.5  # the first look sends the first one


def test_where_directions_stay_it_soon_looks_no_more():
    looks, _, bought = run(Drifting(0.0), 200)
    assert len(bought) <= 2 and looks <= 12


def test_directions_that_turn_after_long_are_noticed():
    sender, data = _Sender(KLT(ECSQ(0.2))), Drifting(0.0)
    still = run(data, 30, sender)
    data.turn = Drifting(0.05).turn
    turning = run(data, 120, sender)
    assert still.bought[0] < 5 and len(turning.bought) > 10
