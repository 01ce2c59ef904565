"""OneBitColumns: two means a column, as in 1-bit SGD."""

import pytest
import torch
from methods import FLOATS, epsilon, round_trip

from mpcomp import OneBitColumns, TensorMeta


def expected(matrix: torch.Tensor) -> torch.Tensor:
    """By loops."""
    out = torch.empty_like(matrix, dtype=torch.float64)
    for column in range(matrix.shape[1]):
        numbers = matrix[:, column].double()
        for side in (numbers >= 0, numbers < 0):
            out[side, column] = numbers[side].sum() / max(1, int(side.sum()))
    return out


def test_formula_by_hand():
    x = torch.tensor([[1.0, -1.0, 0.0], [3.0, -3.0, -4.0], [-5.0, -2.0, 2.0]])
    assert round_trip(OneBitColumns(), x).tolist() == [[2, -2, 1], [2, -2, -4], [-5, -2, 1]]
    means, bits = OneBitColumns().compress(x)
    assert means.tolist() == [[2, 0, 1], [-5, -2, -4]]  # of no elements: 0
    assert bits.tolist() == [0b00001101, 0b1]  # 1 0 1, 1 0 0, 0 0 1, lowest bit first


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 9), (50, 7), (33, 1), (8, 64)], ids=str)
def test_every_column_has_its_two_means(dtype, shape):
    x = (torch.randn(shape) * torch.logspace(-2, 2, shape[1])).to(dtype)
    got = round_trip(OneBitColumns(), x).double()
    torch.testing.assert_close(got, expected(x), rtol=4 * epsilon(dtype), atol=1e-7)


def test_one_bit_an_element_and_two_floats_a_column():
    assert OneBitColumns().wire_bytes(TensorMeta((512, 100))) == 512 * 100 // 8 + 2 * 4 * 100
    assert OneBitColumns().wire_bytes(TensorMeta((3, 3))) == 2 + 2 * 4 * 3
    assert OneBitColumns().wire_bytes(TensorMeta((9,))) == 2 + 2 * 4 * 9
    assert OneBitColumns().wire_bytes(TensorMeta((4, 5, 6))) == 15 + 2 * 4 * 6


def test_columns_are_the_innermost_dimension_in_memory():
    x = torch.randn(4, 3, 5, 6)
    by_row = round_trip(OneBitColumns(), x)
    torch.testing.assert_close(by_row, expected(x.reshape(60, 6)).float().reshape(x.shape))
    image = x.contiguous(memory_format=torch.channels_last)
    pixels = expected(x.permute(0, 2, 3, 1).reshape(-1, 3)).float().reshape(4, 5, 6, 3)
    torch.testing.assert_close(round_trip(OneBitColumns(), image), pixels.permute(0, 3, 1, 2))


def test_a_contraction():
    for x in (torch.randn(40, 9), torch.rand(40, 9), torch.randn(40, 9).round()):
        y = round_trip(OneBitColumns(), x)
        assert (x - y).norm() < x.norm()
        torch.testing.assert_close((x - y).sum(dim=0), torch.zeros(9), rtol=0, atol=1e-4)


def test_sums_do_not_overflow():
    x = torch.full((300, 2), 3.3e38)
    torch.testing.assert_close(round_trip(OneBitColumns(), x), x)
