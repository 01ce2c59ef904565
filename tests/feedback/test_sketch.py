"""Count sketches: each element in one cell with one sign, whichever way they are computed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import same_bits

from mpcomp.feedback.sketch import HASHES, LONGEST_ROW, CountSketch, VectorSketch, num_cells

SIZES = [(1, 1.0), (1, 0.1), (7, 0.1), (60, 0.2), (61, 0.4), (64, 0.5), (100, 0.34), (100, 1.0)]
EVERY = pytest.mark.parametrize(
    "sketch",
    [CountSketch(columns, fraction, hash) for columns, fraction in SIZES for hash in HASHES],
    ids=[f"{hash}-{columns}-{fraction}" for columns, fraction in SIZES for hash in HASHES],
)
BALANCED = [CountSketch(columns, fraction) for columns, fraction in SIZES]


def matrix_of(sketch: CountSketch) -> torch.Tensor:
    """Row i [width] is what element i adds: its sign in its cell."""
    return sketch.sketch(torch.eye(sketch.columns))


# -- the definition -------------------------------------------------------------------------------


@EVERY
def test_each_element_is_in_one_cell_with_a_sign(sketch):
    matrix = matrix_of(sketch)
    assert matrix.shape == (sketch.columns, sketch.width)
    assert torch.equal(matrix.count_nonzero(1), torch.ones(sketch.columns, dtype=torch.int64))
    assert torch.equal(matrix.abs().sum(1), torch.ones(sketch.columns))
    assert int(matrix.count_nonzero(0).max()) == sketch.load


@EVERY
def test_a_sketch_is_a_signed_sum_and_an_estimate_a_signed_cell(sketch):
    matrix = matrix_of(sketch)
    x = torch.randn(3, sketch.columns)
    torch.testing.assert_close(sketch.sketch(x), x @ matrix, rtol=1e-5, atol=1e-5)
    held = torch.randn(3, sketch.width)
    cells, signs = matrix.abs().argmax(1), matrix.sum(1)
    assert torch.equal(sketch.estimate(held), held[:, cells] * signs)


@EVERY
def test_it_is_linear_and_an_estimate_is_its_adjoint(sketch):
    x, y = torch.randn(2, 3, sketch.columns)
    both = sketch.sketch(2 * x - y)
    torch.testing.assert_close(both, 2 * sketch.sketch(x) - sketch.sketch(y), rtol=1e-5, atol=1e-4)
    held = torch.randn(3, sketch.width)
    forth = (sketch.sketch(x).double() * held).sum()
    back = (x.double() * sketch.estimate(held)).sum()
    torch.testing.assert_close(forth, back, rtol=1e-5, atol=1e-4)


@EVERY
def test_an_element_comes_back_whole_with_all_others_of_its_cell(sketch):
    """So the estimate is unbiased over signs, and each cell of C C is its load times that of C."""
    matrix = matrix_of(sketch)
    back = sketch.estimate(matrix)  # [i, j]: what element i adds to the estimate of j
    assert torch.equal(back.diagonal(), torch.ones(sketch.columns))
    together = (matrix.abs() @ matrix.abs().T).bool()
    assert torch.equal(back.abs(), together.float())
    held = torch.randn(1, sketch.width)
    loads = matrix.abs().sum(0)
    again = sketch.sketch(sketch.estimate(held))
    torch.testing.assert_close(again, held * loads, rtol=1e-5, atol=1e-5)


def test_signs_are_even_and_estimates_unbiased_over_them():
    """Signs are fixed, so the mean is over inputs: of |x| the others of a cell cancel out."""
    for hash in HASHES:
        sketch = CountSketch(20_000, 0.2, hash)
        signs = matrix_free_signs(sketch)
        assert abs(float(signs.mean())) < 4 / math.sqrt(20_000)
        x = torch.rand(1, 20_000) + 0.5
        error = sketch.estimate(sketch.sketch(x)) - x
        assert abs(float(error.mean())) < 0.15
        # Var = sum of x^2 over the others of its cell: load - 1 of them, 4 or 5 on average.
        assert 3.5 < float(error.square().mean() / x.square().mean()) < 5.5


def matrix_free_signs(sketch: CountSketch) -> torch.Tensor:
    """s [columns]: what the estimate says of a sketch of ones."""
    return sketch.estimate(torch.ones(1, sketch.width))[0]


@EVERY
def test_rows_are_sketched_alike_and_apart(sketch):
    x = torch.randn(5, sketch.columns)
    whole = sketch.sketch(x)
    assert same_bits(whole, torch.cat([sketch.sketch(row[None]) for row in x]))
    assert same_bits(
        sketch.estimate(whole), torch.cat([sketch.estimate(row[None]) for row in whole])
    )


@pytest.mark.parametrize("hash", HASHES)
def test_a_sketch_is_never_drawn_anew(hash):
    x = torch.randn(2, 90)
    one, other = CountSketch(90, 0.3, hash), VectorSketch(90, 0.3, hash=hash)
    assert same_bits(one.sketch(x), other.sketch(x))


@EVERY
def test_what_is_given_stays_as_it_is(sketch, global_rng_untouched):
    x, held = torch.randn(2, sketch.columns), torch.randn(2, sketch.width)
    copies = x.clone(), held.clone()
    with global_rng_untouched():
        sketch.sketch(x)
        sketch.estimate(held)
    assert same_bits(x, copies[0]) and same_bits(held, copies[1])


# -- the balanced hash ----------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 2, 60, 1000])
def test_a_cell_for_each_element_is_exact(columns):
    sketch = CountSketch(columns, 1.0)
    x = torch.randn(4, columns)
    assert sketch.width == columns and sketch.load == 1
    assert same_bits(sketch.estimate(sketch.sketch(x)), x)
    if columns > 2:  # the authors' hash collides even then
        assert CountSketch(columns, 1.0, "murmur").load > 1


@given(st.integers(1, 70_000), st.floats(1e-3, 1))
def test_no_cell_holds_more_than_its_share(columns, fraction):
    width = num_cells(columns, fraction)
    assert 1 <= width <= columns
    assert width >= fraction * columns - 1e-6
    assert width < fraction * columns + 1 or width == 1
    assert CountSketch(columns, fraction).load == math.ceil(columns / width)
    assert CountSketch(columns, fraction).load <= math.ceil(1 / fraction - 1e-9)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3, 0.6, 0.7])
def test_cells_of_round_numbers_are_round(fraction):
    """0.1 * 30 is a little more than 3 in floating point, and no fourth cell."""
    for columns in range(10, 400, 10):
        assert num_cells(columns, fraction) == round(fraction * columns)


@pytest.mark.parametrize("sketch", BALANCED, ids=lambda s: f"{s.columns}-{s.width}")
def test_neighbours_are_spread(sketch):
    """Blocks are sent together, so the elements of a block have to lie in different cells."""
    matrix = matrix_of(sketch).abs()
    for start in range(0, sketch.columns, sketch.width):
        assert int(matrix[start : start + sketch.width].sum(0).max()) == 1
    sums = torch.cat([matrix.new_zeros(1, sketch.width), matrix.cumsum(0)])
    for length in {1, sketch.width // 2 + 1, sketch.width, sketch.columns}:
        windows = sums[length:] - sums[:-length]
        assert int(windows.max()) <= min(sketch.load, math.ceil(length / sketch.width) + 1)


def test_layers_are_turned_by_different_amounts():
    matrix = matrix_of(CountSketch(1000, 0.1))
    firsts = {int(matrix[start].abs().argmax()) for start in range(0, 1000, 100)}
    assert len(firsts) > 5


# -- the hash of the authors' code ----------------------------------------------------------------


def mixed(i: int, a: int, b: int) -> int:
    """As the CUDA kernel has it: signed 32 bits, arithmetic shifts."""

    def wrapped(h: int) -> int:
        return (h + (1 << 31)) % (1 << 32) - (1 << 31)

    h = wrapped(a * i + b)
    h ^= h >> 16
    h = wrapped(h * 0x85EBCA6B)
    h ^= h >> 13
    h = wrapped(h * 0xC2B2AE35)
    return h ^ (h >> 16)


@pytest.mark.parametrize("columns, fraction", [(1, 1.0), (50, 0.02), (4608, 0.2), (20_000, 0.1)])
def test_murmur_is_that_of_the_authors(columns, fraction):
    sketch = CountSketch(columns, fraction, "murmur")
    cells = [mixed(i, 994443, 609478) for i in range(columns)]
    signs = [mixed(i, 994445, 609481) for i in range(columns)]
    assert min(cells) >= 0 and min(signs) >= 0  # the last shift clears the sign
    expected = torch.tensor([2 * (h % sketch.width % 2) - 1.0 for h in signs])
    assert torch.equal(matrix_free_signs(sketch), expected)
    places = sketch.estimate(torch.arange(sketch.width, dtype=torch.float32)[None])[0] * expected
    assert places.int().tolist() == [h % sketch.width for h in cells]
    assert sketch.load == torch.tensor(cells).remainder(sketch.width).bincount().max()


def test_murmur_of_one_cell_has_one_sign():
    assert matrix_free_signs(CountSketch(30, 1 / 30, "murmur")).unique().tolist() == [-1.0]
    assert len(matrix_free_signs(CountSketch(30, 1 / 30)).unique()) == 2


def test_murmur_is_fuller_than_it_need_be():
    """Why it is not the default: (1 - beta) load decides whether an error stays bounded."""
    for fraction in (0.1, 0.2, 0.4):
        balanced, murmur = (CountSketch(4608, fraction, hash).load for hash in HASHES)
        assert 2 * balanced <= murmur


# -- vectors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hash", HASHES)
@pytest.mark.parametrize(
    "numel, columns", [(60, 12), (60, 7), (61, 20), (5, 9), (1, 1), (100, None), (1, None)]
)
def test_a_vector_is_cut_into_rows(numel, columns, hash):
    """The last row may be shorter, as if zeros followed; each row has cells of its own."""
    sketch = VectorSketch(numel, 0.3, columns=columns, hash=hash)
    each = columns or numel
    row = CountSketch(each, 0.3, hash)
    num_rows = math.ceil(numel / each)
    assert sketch.cells == num_rows * row.width == num_rows * num_cells(each, 0.3)
    x = torch.randn(2, numel)
    held = sketch.sketch(x)
    back = sketch.estimate(held)
    assert held.shape == (2, sketch.cells) and back.shape == x.shape
    for r in range(num_rows):
        part = x[:, r * each : (r + 1) * each]
        padded = torch.cat([part, torch.zeros(2, each - part.shape[1])], 1)
        cells = held[:, r * row.width : (r + 1) * row.width]
        assert same_bits(cells, row.sketch(padded))
        assert same_bits(
            back[:, r * each : r * each + part.shape[1]], row.estimate(cells)[:, : part.shape[1]]
        )


@pytest.mark.parametrize("numel", [LONGEST_ROW, LONGEST_ROW + 1, 3 * LONGEST_ROW + 17, 200_001])
def test_long_vectors_are_cut_into_nearly_equal_rows(numel):
    sketch = VectorSketch(numel, 0.2)
    num_rows = math.ceil(numel / LONGEST_ROW)
    each = math.ceil(numel / num_rows)
    assert each <= LONGEST_ROW and num_rows * each - numel < num_rows
    assert sketch.cells == num_rows * num_cells(each, 0.2)
    assert sketch.cells <= 0.2 * numel + 2 * num_rows
    x = torch.randn(1, numel)
    back = sketch.estimate(sketch.sketch(x))
    assert back.shape == x.shape
    # An estimate has its element in it: <x, back> = |sketch(x)|^2 > 0.
    torch.testing.assert_close((x * back).sum(), sketch.sketch(x).square().sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("numel, columns", [(60, 7), (100_003, None), (30, 30)])
def test_a_vector_with_a_cell_for_each_element_is_exact(numel, columns):
    sketch = VectorSketch(numel, 1.0, columns=columns)
    x = torch.randn(2, numel)
    assert same_bits(sketch.estimate(sketch.sketch(x)), x)
    assert numel <= sketch.cells < numel + (columns or 2)
