"""PowerSGD: what one step says, and where the steps of a warm-started power iteration lead."""

import pytest
import torch
from replica_runs import alone, exchange_of, exchanged
from torch import Tensor

from mpcomp.data_parallel.methods import powersgd

ROWS, COLUMNS = 40, 30


@pytest.fixture(autouse=True)
def _alone():
    with alone():
        yield


def matrix_with(singular_values: list[float]) -> Tensor:
    """[40, 30], with these singular values and no other."""
    left = torch.linalg.qr(torch.randn(ROWS, len(singular_values), dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(COLUMNS, len(singular_values), dtype=torch.float64)).Q
    return (left @ torch.diag(torch.tensor(singular_values).double()) @ right.T).float()


def results(spec: str, gradients: list[Tensor]) -> list[Tensor]:
    """The result of each step, which went as factors."""
    exchange = exchange_of(spec, {"matrix": torch.zeros(ROWS, COLUMNS)})
    found = []
    for gradient in gradients:
        found.append(exchanged(exchange, {"matrix": gradient})["matrix"])
        assert exchange.report()["paths"] == {"factors": 1}
    return found


def away(a: Tensor, b: Tensor) -> float:
    """The distance relative to the norm."""
    return float((a - b).norm() / b.norm())


def test_a_gradient_of_that_rank_arrives_whole():
    """P P^T M is M only where the columns of P are orthonormal; in the first step and later."""
    given = [matrix_with([3.0, 1.0]) for _ in range(3)]
    for said, gradient in zip(results("powersgd:2:min_saving=1", given), given, strict=True):
        assert away(said, gradient) < 1e-4


def test_steps_of_one_matrix_lead_to_its_best_approximation():
    """Q goes on from step to step: the error falls by (s_3 / s_2)^2 in each, here by a half.

    A single iteration from whatever Q stays far away.
    """
    singular_values = [4.0, 2.0, 2.0 / 2**0.5, 1.0, 0.5, 0.25]
    matrix = matrix_with(singular_values)
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    best = ((u[:, :2] * s[:2]) @ v[:2]).float()
    said = results("powersgd:2:feedback=False", [matrix] * 20)
    assert away(said[0], best) > 0.05
    assert away(said[-1], best) < 1e-4


def test_the_first_right_factor_is_standard_normal():
    """Of 1,000 columns, by its moments; a zero gradient leaves it to be drawn again."""
    like = {"matrix": torch.zeros(20, 1000)}
    exchange = exchange_of("powersgd:4", like)
    seen = []
    gradient = torch.zeros(20, 1000)
    gradient[0] = 1.0
    start = powersgd._start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(powersgd, "_start", lambda *a: seen.append(start(*a)) or seen[-1])
        exchanged(exchange, like)
        exchanged(exchange, {"matrix": gradient})
        exchanged(exchange, {"matrix": gradient})
    first, again, kept = seen
    for q in (first, again):
        assert q.shape == (1000, 4) and abs(float(q.mean())) < 0.08
        assert float(q.square().mean()) == pytest.approx(1, abs=0.1)
        assert float(q.abs().amax()) > 2.5  # no uniform number
    assert not first.equal(again) and not again.equal(kept)
