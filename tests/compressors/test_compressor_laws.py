"""Laws 2, 3 and 4 over every compressor × dtype × shape × memory order × contents.

A test over ``compressor`` is a law; `laws.laws_over` runs it over compressors from elsewhere.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from everyday import slow_but_one_a_class
from hypothesis import given
from hypothesis import strategies as st
from kernels import run_anywhere
from methods import COMPRESSORS, FLOATS, drawn, round_trip, same_bits
from torch import Tensor

from mpcomp import Cast, FixedPoint, Quantize, Sign, TensorMeta, TopK
from mpcomp.compressors import Compressor

SHAPES = [(), (1,), (37,), (1, 1), (5, 23), (1, 64), (3, 7, 12), (3, 6, 5, 4), (2, 1, 3, 1, 5)]
EMPTY = [(0,), (0, 4), (3, 0), (0, 4, 2, 2), (2, 0, 3, 3)]


def contents(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors that are hard on one method or another."""
    # Compressors compute in fp32: of fp64 they take what fp32 can hold.
    finfo = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    x = torch.randn(shape, dtype=torch.float64)
    signs = torch.where(torch.rand(shape) < 0.5, -1.0, 1.0).double()
    found = {
        "normal": x,
        "relu": torch.relu(x - 1),
        "positive": x.abs() + 1,
        "constant": torch.full_like(x, 0.3),
        "zeros": torch.zeros_like(x),
        "minus zeros": -torch.zeros_like(x),
        "ties": torch.round(x),
        "largest": signs * finfo.max,
        "near largest": x.clamp(-1, 1) * finfo.max,
        "smallest": signs * finfo.smallest_normal,
        "denormal": x * finfo.tiny / 16,
        "one outlier": torch.where(torch.rand(shape) < 0.05, finfo.max / 2, x / 100),
    }
    return {name: value.to(dtype) for name, value in found.items()}


def memory_orders(x: Tensor) -> dict[str, Tensor]:
    """The same numbers lying in memory in other ways."""
    found = {"contiguous": x.contiguous()}
    if x.dim() == 4:
        found["channels last"] = x.contiguous(memory_format=torch.channels_last)
    if x.dim() >= 2:
        found["transposed"] = x.transpose(0, -1).contiguous().transpose(0, -1)
        found["strided"] = torch.stack([x, x], dim=-1)[..., 0]
        found["expanded"] = x[:1].expand(x.shape)
    return found


def assert_like(y: Tensor, x: Tensor) -> None:
    assert y.shape == x.shape and y.dtype == x.dtype and y.device == x.device
    if TensorMeta.of(x).channels_last:
        assert y.is_contiguous(memory_format=torch.channels_last)
    else:
        assert y.is_contiguous()


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
def test_payload_is_what_the_layout_says(compressor, dtype):
    """Law 2: shape and dtype of every wire tensor, and so the bytes, follow from meta alone."""
    for shape in SHAPES + EMPTY:
        for name, x in memory_orders(torch.randn(shape).to(dtype)).items():
            meta = TensorMeta.of(x)
            payload = compressor.compress(x, drawn())
            got = [(tuple(part.shape), part.dtype) for part in payload]
            said = [(m.shape, m.dtype) for m in compressor.layout(meta)]
            num_bytes = sum(part.nbytes for part in payload)
            if compressor.variable_length:  # but for the last one, which may be shorter
                (*got, last), (*said, longest) = got, said
                assert last[1] == longest[1] == torch.uint8 and len(last[0]) == 1
                assert last[0] <= longest[0]
                assert num_bytes <= compressor.wire_bytes(meta)
            else:
                assert num_bytes == compressor.wire_bytes(meta)
            assert got == said, (shape, name)
            assert_like(compressor.decompress(payload, meta, drawn()), x)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
def test_survives_hard_tensors(compressor, dtype, global_rng_untouched):
    """Law 3: what is finite stays finite, the input stays as it was; law 4: nobody's generator."""
    for shape in ((), (37,), (5, 23), (3, 6, 5, 4)):
        found = contents(dtype, shape)
        for order, x in memory_orders(found["normal"]).items():
            found[order] = x
        for what, x in found.items():
            before = x.clone()
            with global_rng_untouched():
                y = round_trip(compressor, x)
            assert_like(y, x)
            if compressor.contractive or not compressor.selects:  # else it multiplies on purpose
                assert y.isfinite().all(), (shape, what)
            assert same_bits(x, before), (shape, what)


@pytest.mark.each_once
@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
def test_survives_empty_tensors(compressor, shape):
    """Law 3: no elements in, no elements out."""
    y = round_trip(compressor, torch.empty(shape))
    assert y.shape == shape and y.dtype == torch.float32


@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
def test_zeros_arrive_as_zeros(compressor):
    """Law 3: an all-zero tensor has no scale to divide by."""
    for shape in SHAPES:
        assert torch.equal(round_trip(compressor, torch.zeros(shape)), torch.zeros(shape)), shape


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
def test_same_input_and_seed_give_the_same_bits(compressor, dtype):
    """Law 4, and decoding reads the payload without changing it."""
    x = torch.randn(4, 6, 5, 3).to(dtype)
    one, two = (compressor.compress(x, drawn(7)) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(one, two, strict=True))
    meta = TensorMeta.of(x)
    results = [compressor.decompress(one, meta, drawn(7)) for _ in range(2)]
    assert same_bits(*results)
    assert all(same_bits(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
def test_a_round_trip_is_what_its_payload_says(compressor, dtype):
    """Bit for bit, as both ends keep it; also of what is left of a tensor, whose zeros have signs.

    Given a description that the tensor alone does not show: that of one row, channels last.
    """
    for shape in ((), (5, 23), (3, 6, 5, 4), (1, 6, 5, 4)):
        for x in (torch.randn(shape), torch.full(shape, -0.0), -1e-3 * torch.rand(shape)):
            whole, x = torch.randn(shape).to(dtype), x.to(dtype)
            meta = TensorMeta.of(x)
            if len(shape) == 4:
                x, whole = (t.contiguous(memory_format=torch.channels_last) for t in (x, whole))
                meta = replace(meta, channels_last=True)
            payload, said = compressor.round_trip(x, whole, meta, partial(drawn, 7))
            expected = compressor.compress_against(x, whole, drawn(7))
            assert all(same_bits(a, b) for a, b in zip(payload, expected, strict=True))
            assert same_bits(said, compressor.decompress(payload, meta, drawn(7)))


@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
def test_paths_of_accelerators_give_the_same_bytes(compressor, monkeypatch):
    """Law 4 across devices: the paths without numpy, run here on the CPU."""
    tensors = [torch.relu(torch.randn(shape)) for shape in SHAPES]
    with_numpy = [compressor.compress(x, drawn()) for x in tensors]
    run_anywhere(monkeypatch)
    for x, expected in zip(tensors, with_numpy, strict=True):
        payload = compressor.compress(x, drawn())
        assert all(same_bits(a, b) for a, b in zip(payload, expected, strict=True)), x.shape
        decoded = compressor.decompress(payload, TensorMeta.of(x), drawn())
        monkeypatch.undo()
        assert same_bits(decoded, compressor.decompress(expected, TensorMeta.of(x), drawn()))
        run_anywhere(monkeypatch)


BY_VALUE_ALONE: list[Compressor] = [
    Cast("bf16"),
    TopK(0.1),
    TopK(0.1, scope="tensor"),
    TopK(0.2, values=Quantize(8)),
    Quantize(4),
    Quantize(4, scale="sample"),
    Quantize(4, scale="channel"),
    FixedPoint(4, scale="tensor"),
    Sign(),
    Sign("sample"),
    Sign("channel"),
]


@pytest.mark.parametrize("by_value", BY_VALUE_ALONE, ids=str)
def test_memory_order_does_not_change_the_result(by_value):
    """The same image as NCHW and as NHWC arrives as the same image."""
    x = torch.randn(3, 6, 5, 4)
    expected = round_trip(by_value, x)
    arrived = round_trip(by_value, x.contiguous(memory_format=torch.channels_last))
    # Sums of magnitudes (sign) are taken in memory order, and so round apart.
    torch.testing.assert_close(arrived, expected, rtol=1e-6, atol=0)


ADDABLE = [c for c in COMPRESSORS if c.summable]


@pytest.mark.parametrize("compressor", ADDABLE, ids=str)
def test_summable_payloads_add_up(compressor):
    """What claims to be summable may be all-reduced: decode(C(a) + C(b)) = decode C(a) + C(b)."""
    if not compressor.summable:
        return
    a, b = torch.randn(2, 4, 30)
    meta = TensorMeta.of(a)
    parts = zip(compressor.compress(a, drawn()), compressor.compress(b, drawn()), strict=True)
    summed = compressor.decompress(tuple(p + q for p, q in parts), meta, drawn())
    expected = round_trip(compressor, a) + round_trip(compressor, b)
    torch.testing.assert_close(summed, expected, rtol=2**-6, atol=2**-6)


def test_summable_is_claimed_where_it_holds():
    claims = {str(c) for c in ADDABLE}
    assert {"none", "bf16", "fp16", "randomk:0.1", "randomblock:0.1"} <= claims
    assert not claims & {"topk:0.1", "quant:4", "sign", "fp8_e4m3", "randomk:0.2+quant:8"}


_special = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 3.0e38, -3.0e38, 1e-45, -1e-45, 1.2e-38, 6e-8, 0.1]
)
_numbers = st.one_of(_special, st.floats(width=32, allow_nan=False, allow_infinity=False))


@given(values=st.lists(_numbers, min_size=1, max_size=40), rows=st.integers(1, 3), data=st.data())
def test_any_finite_values_stay_finite(values, rows, data):
    """Law 3 where values matter: all compressors and dtypes over hypothesis's numbers."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    x = finite(values, rows, dtype)
    for compressor in COMPRESSORS:
        assert_stays_finite(compressor, x)


@pytest.mark.parametrize("compressor", slow_but_one_a_class(COMPRESSORS), ids=str)
def test_finite_extremes_stay_finite(compressor):
    """The same for one compressor, over the numbers that hypothesis is given above."""
    values = [65504.0, -65504.0, 3.0e38, -3.0e38, 1e-45, -1e-45, 1.2e-38, 6e-8, 0.1, 0.0, -0.0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for start in range(len(values)):
            assert_stays_finite(compressor, finite(values[start:], 3, dtype))


def finite(values: list[float], rows: int, dtype: torch.dtype) -> Tensor:
    """Rows of the values, of their reverse and of their negatives."""
    limit = torch.finfo(dtype).max
    row = torch.tensor(values, dtype=torch.float64).clamp(-limit, limit).to(dtype)
    x = torch.stack([row, row.flip(0), -row][:rows])
    assert x.isfinite().all()
    return x


def assert_stays_finite(compressor: Compressor, x: Tensor) -> None:
    if compressor.contractive or not compressor.selects:  # else it multiplies on purpose
        y = round_trip(compressor, x)
        assert_like(y, x)
        assert y.isfinite().all(), compressor
