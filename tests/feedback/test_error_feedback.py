"""ErrorFeedback and EFMixed: nothing is lost, and the formulas."""

import pytest
import torch
from ends import Wire, context
from methods import round_trip, same_bits
from models import store_of

from mpcomp import (
    Cast,
    EFMixed,
    ErrorFeedback,
    FixedPoint,
    Quantize,
    RandomBlock,
    RandomK,
    Sign,
    TensorMeta,
    TopK,
)
from mpcomp.core.randomness import generator_for

SHAPE = (3, 80)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
METHODS = [
    ErrorFeedback(TopK(0.1)),
    ErrorFeedback(TopK(0.1, values=Quantize(4))),
    ErrorFeedback(RandomK(0.2)),
    ErrorFeedback(RandomBlock(0.2)),
    ErrorFeedback(Quantize(4)),
    ErrorFeedback(Quantize(2, mode="maxabs", rounding="stochastic")),
    ErrorFeedback(Sign(16)),
    ErrorFeedback(FixedPoint(4)),
    ErrorFeedback(Cast("fp8_e4m3")),
    EFMixed(TopK(0.2)),
    EFMixed(TopK(0.2), second="remainder"),
    EFMixed(RandomK(0.2)),
]


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_no_mass_is_lost(method, dtype):
    """Σ sent + residual = Σ x, within fp32's rounding, whatever the dtype of the tensors."""
    wire = Wire(method, TensorMeta(SHAPE, dtype))
    sent = torch.zeros(SHAPE, dtype=torch.float64)
    given = torch.zeros(SHAPE, dtype=torch.float64)
    for step in range(30):
        x = torch.randn(SHAPE).to(dtype)
        sent += wire.step(x, context(step))
        given += x
    residual = wire.residual(3).double()
    assert residual.abs().max() > 1e-3 or isinstance(method.inner, Cast)  # it did compress
    # fp32 rounds each of 30 sums: far below bf16's 2^-8 of a single value.
    assert (sent + residual - given).abs().max() < 1e-5 * (1 + residual.abs().max())


@pytest.mark.parametrize(
    "method",
    [ErrorFeedback(TopK(0.1), decay=0.5), EFMixed(TopK(0.2), decay=0.5)],
    ids=str,
)
def test_what_waits_counts_less_with_a_decay(method):
    wire = Wire(method, TensorMeta(SHAPE))
    wire.step(torch.randn(SHAPE), context(0))
    waiting = wire.residual(3)
    arrived = wire.step(torch.zeros(SHAPE), context(1))
    assert waiting.any() and arrived.any()
    torch.testing.assert_close(arrived + wire.residual(3), 0.5 * waiting, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_what_arrives_follows_a_fixed_input(dtype):
    """Σ sent → t · x: the residual stays bounded, so the mean of what arrives tends to x."""
    x = torch.randn(SHAPE).to(dtype)
    wire = Wire(ErrorFeedback(TopK(0.1)), TensorMeta(SHAPE, dtype))
    means = []
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for step in range(200):
        total += wire.step(x, context(step))
        means.append((total / (step + 1) - x).norm() / x.norm())
    assert means[0] > 0.5 and means[-1] < 0.06
    assert means[-1] < means[99] < means[19]


@pytest.mark.parametrize("method", METHODS[:5], ids=str)
def test_formula_of_error_feedback(method):
    """m = C(x + e), e ← x + e − m, row by row, bit for bit."""
    wire = Wire(method, TensorMeta(SHAPE))
    residual = torch.zeros(SHAPE)
    for step in range(6):
        x = torch.randn(SHAPE)
        payload = method.inner.compress(x + residual, generator_for("test", step, 0, "0"))
        draws = generator_for("test", step, 0, "0")
        expected = method.inner.decompress(payload, TensorMeta(SHAPE), draws)
        residual = x + residual - expected
        assert same_bits(wire.step(x, context(step)), expected)
        assert same_bits(wire.residual(3), residual)


@pytest.mark.parametrize("second", ["residual", "remainder"])
def test_formula_of_efmixed(second):
    """m = C_k/2(x) + C_k/2(e), or C_k/2(x) + C_k/2(x − C_k/2(x) + e); e ← e + x − m."""
    wire = Wire(EFMixed(TopK(0.2), second=second), TensorMeta(SHAPE))
    half = TopK(0.1)
    residual = torch.zeros(SHAPE)
    twice = 0
    for step in range(8):
        x = torch.randn(SHAPE)
        first = round_trip(half, x)
        rest = residual if second == "residual" else residual + (x - first)
        other = round_trip(half, rest)
        expected = first + other
        residual = x + residual - expected
        assert same_bits(wire.step(x, context(step)), expected)
        assert same_bits(wire.residual(3), residual)
        twice += int(((first != 0) & (other != 0)).sum())
    assert second == "remainder" or twice  # elements that both halves chose are their sum


def test_efmixed_spends_the_budget_of_the_whole():
    meta = TensorMeta((4, 1000))
    sender, _ = Wire(EFMixed(TopK(0.2)), meta).plans(meta, context(0))
    values = sum(part.numel for part in sender.layout if part.dtype == torch.float32)
    assert values == 800


def test_plain_compression_does_lose_mass():
    """The test above can tell: without feedback a fixed input's small elements never arrive."""
    x = torch.randn(SHAPE)
    assert (round_trip(TopK(0.1), x) - x).norm() > 0.5 * x.norm()


@pytest.mark.parametrize("storage, rounding", [("fp16", 2**-10), ("bf16", 2**-7), (8, 2**-7)])
def test_stored_in_less_the_residual_is_rounded_once_a_step(storage, rounding):
    wire = Wire(ErrorFeedback(TopK(0.1), storage=storage), TensorMeta(SHAPE))
    exact = Wire(ErrorFeedback(TopK(0.1)), TensorMeta(SHAPE))
    x = torch.randn(SHAPE)
    assert same_bits(wire.step(x, context(0)), exact.step(x, context(0)))
    kept, full = wire.residual(3), exact.residual(3)
    assert not torch.equal(kept, full)
    assert (kept - full).abs().max() <= rounding * full.abs().max()


def test_residual_follows_a_change_of_the_learning_rate():
    """lr_scaled keeps η e: after η ← η/2 the old residual weighs twice in units of the gradient."""
    inner = TopK(0.1)
    wire = Wire(ErrorFeedback(inner, lr_scaled=True), TensorMeta(SHAPE))
    xs = torch.randn(3, *SHAPE)
    rates = [0.5, 0.25, 1.0]
    residual = torch.zeros(SHAPE)  # in units of the gradient at the present rate
    before = rates[0]
    for step, (x, lr) in enumerate(zip(xs, rates, strict=True)):
        residual = residual * (before / lr)
        expected = round_trip(inner, x + residual)
        residual, before = x + residual - expected, lr
        assert same_bits(wire.step(x, context(step, unit=1 / lr)), expected)
        assert same_bits(wire.residual(3), residual * lr)


def test_what_would_not_shrink_goes_dense_and_leaves_no_residual():
    with pytest.warns(UserWarning, match="would not shrink"):
        wire = Wire(ErrorFeedback(TopK(0.99)), TensorMeta(SHAPE))
        x = torch.randn(SHAPE)
        assert same_bits(wire.step(x, context(0)), x)
    assert not wire.residual(3).any()


def test_the_receiver_keeps_nothing():
    wire = Wire(ErrorFeedback(TopK(0.1)), TensorMeta(SHAPE))
    wire.step(torch.randn(SHAPE), context(0))
    assert store_of(wire.receiver) is None and len(store_of(wire.sender)) == 3


def test_positions_of_a_message_are_those_of_its_compressor():
    """For SameIndices. Two selections at once (EFMixed) have no one mask."""
    x = torch.randn(SHAPE)
    meta = TensorMeta(SHAPE)
    sender, receiver = Wire(ErrorFeedback(TopK(0.1)), meta).plans(meta, context(0))
    payload = sender.encode(x)
    expected = TopK(0.1).indices(TopK(0.1).compress(x), meta)
    assert torch.equal(sender.positions(payload), expected)
    assert torch.equal(receiver.positions(payload), expected)
    for method in (EFMixed(TopK(0.2)), ErrorFeedback(Quantize(4))):
        sender, receiver = Wire(method, meta).plans(meta, context(0))
        assert receiver.positions(sender.encode(x)) is None


def test_efmixed_needs_a_selection_and_a_known_second_half():
    with pytest.raises(ValueError, match="halves the number of elements.*topk, randomk"):
        EFMixed(Quantize(4))
    with pytest.raises(ValueError, match="second='rest'.*residual, remainder"):
        EFMixed(TopK(0.1), second="rest")
