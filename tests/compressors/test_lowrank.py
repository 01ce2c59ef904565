"""LowRank: projections, exact at full rank, without NaN and within narrow dtypes."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from methods import FLOATS, drawn, epsilon, round_trip, same_bits
from test_compressor_laws import SHAPES, contents

from mpcomp import EF21, LowRank, TensorMeta
from mpcomp.compressors.base import or_dense
from mpcomp.compressors.lowrank import matrix_shape, orthonormal_


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x.double() - y.double()).norm() / x.double().norm()).item()


@pytest.mark.parametrize("shape", [(30, 12), (12, 30), (1, 9), (9, 1), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_full_rank_is_exact_up_to_rounding(shape, dtype):
    """PowerSGD's pitfall: r ≥ min(n, m) must lose nothing."""
    x = torch.randn(shape).to(dtype)
    assert relative(x, round_trip(LowRank(100), x)) < 4 * epsilon(dtype)


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_a_matrix_of_low_rank_is_exact(iterations):
    x = torch.randn(60, 3) @ torch.randn(3, 40)
    assert relative(x, round_trip(LowRank(3, iterations), x)) < 1e-5
    assert relative(x, round_trip(LowRank(10, iterations), x)) < 1e-5  # dependent columns of M Q


def test_iterations_come_near_the_best_approximation():
    """Eckart-Young: of singular values 1, 1/2, 1/3, ..., all but the first four are lost."""
    u, v = (torch.linalg.qr(torch.randn(50, 50)).Q for _ in range(2))
    sizes = 1 / torch.arange(1.0, 51)
    x = u @ torch.diag(sizes) @ v.T
    best = (sizes[4:].norm() / sizes.norm()).item()
    errors = [relative(x, round_trip(LowRank(4, n), x)) for n in (0, 1, 2, 8)]
    assert all(one >= best * (1 - 1e-5) for one in errors)
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1.01 * best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_projection_and_so_a_contraction(dtype):
    """‖x − C(x)‖² = ‖x‖² − ‖C(x)‖², and C(C(x)) = C(x)."""
    x = torch.randn(40, 30).to(dtype)
    y = round_trip(LowRank(5), x)
    total, kept, lost = (t.double().square().sum() for t in (x, y, x.double() - y.double()))
    assert lost + kept == pytest.approx(total.item(), rel=20 * epsilon(dtype))
    assert relative(y, round_trip(LowRank(5), y)) < 20 * epsilon(dtype)


def test_wire_is_two_factors_in_the_dtype_of_the_tensor():
    meta = TensorMeta((4, 16, 64), torch.bfloat16)
    assert LowRank(3).layout(meta) == (
        TensorMeta((64, 3), torch.bfloat16),
        TensorMeta((64, 3), torch.bfloat16),
    )
    assert LowRank(3).wire_bytes(meta) == 2 * 3 * (64 + 64)
    assert LowRank(30).wire_bytes(TensorMeta((5, 100))) == 4 * 5 * (5 + 100)


def test_the_matrix_is_the_innermost_dimension_in_memory_by_the_others():
    assert matrix_shape(TensorMeta((8, 128, 64))) == (1024, 64)
    assert matrix_shape(TensorMeta((8, 3, 32, 16))) == (768, 16)
    assert matrix_shape(TensorMeta((8, 3, 32, 16), channels_last=True)) == (4096, 3)
    assert matrix_shape(TensorMeta((10, 7))) == (10, 7)
    assert matrix_shape(TensorMeta((7,))) == (1, 7) and matrix_shape(TensorMeta(())) == (1, 1)
    assert matrix_shape(TensorMeta((3, 0))) == (0, 0)


def test_what_would_not_shrink_goes_dense():
    with pytest.warns(UserWarning, match="lowrank:4 would not shrink"):
        assert str(or_dense(LowRank(4), TensorMeta((100,)))) == "none"
    assert or_dense(LowRank(4), TensorMeta((100, 100))) == LowRank(4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rank", [4, 100])
def test_higher_ranks_survive_hard_tensors(rank, dtype):
    """Law 3 beyond the ranks of the examples."""
    for shape in SHAPES:
        for what, x in contents(dtype, shape).items():
            y = round_trip(LowRank(rank), x)
            assert y.isfinite().all() and y.dtype == dtype, (shape, what)
            if not x.any():
                assert not y.any(), (shape, what)


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e20, 1e38])
def test_factors_are_balanced_so_that_no_scale_is_lost(size):
    x = torch.randn(20, 10).clamp(-3, 3) * size
    assert relative(x, round_trip(LowRank(10), x)) < 1e-5
    p, q = LowRank(4).compress(x, drawn())
    assert 0.1 < p.abs().max() / q.abs().max() < 10
    half = (torch.rand(300, 200) * 6e4).half()
    assert relative(half, round_trip(LowRank(200), half)) < 0.005


def in_order(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """P Q^T element by element: each product and each sum of numbers rounded to fp32."""
    total = np.empty((len(p), len(q)), np.float32)
    for i in range(len(p)):
        for j in range(len(q)):
            value = np.float32(p[i, 0] * q[j, 0])
            for k in range(1, p.shape[1]):
                value = np.float32(value + np.float32(p[i, k] * q[j, k]))
            total[i, j] = value
    return total


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_is_a_sum_in_a_defined_order(rank, dtype):
    """Bit for bit, for any number of threads: ends on unlike processors remember alike."""
    meta = TensorMeta((48, 29), dtype)
    factors = (torch.randn(48, rank).to(dtype), (torch.randn(29, rank) / 64).to(dtype))
    p, q = (factor.float().numpy() for factor in factors)
    expected = torch.from_numpy(in_order(p, q)).to(dtype)
    assert same_bits(LowRank(rank).decompress(factors, meta), expected)
    threads = torch.get_num_threads()
    try:
        large = (torch.randn(700, rank), torch.randn(300, rank))
        results = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(LowRank(rank).decompress(large, TensorMeta((700, 300))))
    finally:
        torch.set_num_threads(threads)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.slow
def test_processors_decode_alike():
    """The kernels of torch and MKL for every x86 processor, and those for this one."""
    code = (
        "import hashlib, torch; from mpcomp import LowRank, TensorMeta;"
        "x = (torch.arange(960) * 7919 % 1009).float() / 1009 - 0.5;"  # randn differs as well
        "p, q = x[:560].reshape(70, 8), x[560:].reshape(50, 8) * 1e-3;"
        "y = LowRank(8).decompress((p, q), TensorMeta((70, 50)));"
        "print(hashlib.sha256(y.numpy().tobytes()).hexdigest())"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **kernels},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for kernels in ({"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, {})
    ]
    assert len(said[0]) == 65 and said[0] == said[1]


def test_autocast_does_not_reach_the_products():
    x = torch.randn(30, 20)
    expected = round_trip(LowRank(4), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(round_trip(LowRank(4), x), expected)


def test_the_start_is_drawn_from_the_generator():
    x = torch.randn(30, 20)
    assert same_bits(round_trip(LowRank(2), x, 1), round_trip(LowRank(2), x, 1))
    assert not same_bits(round_trip(LowRank(2), x, 1), round_trip(LowRank(2), x, 2))
    with pytest.raises(AssertionError, match="drawn from a generator"):
        LowRank(2).compress(x)


def test_feedback_finds_what_one_message_leaves():
    """EF21's estimate of a fixed matrix: each step takes another four directions."""
    x = torch.randn(40, 24)
    estimate, errors = torch.zeros_like(x), []
    for step in range(12):
        estimate = estimate + round_trip(EF21(LowRank(4)).inner, x - estimate, step)
        errors.append(relative(x, estimate))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-4


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_orthonormal_columns_of_the_same_span(columns):
    matrix = torch.randn(50, columns)
    before = matrix.clone()
    assert orthonormal_(matrix) is matrix  # in place
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(columns), rtol=0, atol=1e-5)
    torch.testing.assert_close(matrix @ (matrix.T @ before), before, rtol=0, atol=1e-4)


def test_orthonormal_has_no_nan_for_zero_or_dependent_columns():
    zero, equal, tiny = torch.zeros(9, 3), torch.ones(9, 3), torch.full((9, 2), 1e-40)
    middle = torch.randn(9, 3)
    middle[:, 1] = 0
    for matrix in (zero, equal, tiny, middle, torch.full((9, 2), 1e38)):
        eye = torch.eye(matrix.shape[1])
        torch.testing.assert_close(
            orthonormal_(matrix).T @ matrix, eye, rtol=0, atol=1e-5, equal_nan=False
        )


def test_orthonormal_gives_equal_bits_wherever_a_matrix_lies():
    matrix = torch.randn(37, 4)
    strided = torch.randn(41, 8)[3:40, 1::2].copy_(matrix)
    shifted = torch.randn(37 * 4 + 1)[1:].reshape(37, 4).copy_(matrix)
    expected = orthonormal_(matrix.clone())
    assert same_bits(orthonormal_(strided), expected) and same_bits(orthonormal_(shifted), expected)


def test_bad_settings():
    for rank in (0, -1, 1.5, "4"):
        with pytest.raises(ValueError, match=f"rank={rank}.*lowrank:4"):
            LowRank(rank)
    for iterations in (-1, 0.5):
        with pytest.raises(ValueError, match=f"iterations={iterations}.*0 or more"):
            LowRank(2, iterations)
