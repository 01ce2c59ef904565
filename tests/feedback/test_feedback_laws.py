"""Laws 2 to 6 over every feedback method: layouts, order of visits, discards, loss scales."""

import math

import pytest
import torch
from ends import Wire, context
from methods import EXAMPLES, FEEDBACK, same_bits
from models import store_of

from mpcomp import (
    AQSGD,
    EF21,
    ConEF,
    EFMixed,
    ErrorFeedback,
    Identity,
    Quantize,
    RandomK,
    TensorMeta,
    TopK,
    parse,
)

EVERY = pytest.mark.parametrize("method", FEEDBACK, ids=str)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTH = 60


def ids_for(method, rows, first=0):
    """What a visit must carry for the method to find its slots."""
    return tuple((first + row,) for row in range(rows)) if method.by_sample else None


def stored(wire: Wire) -> list[dict[str, torch.Tensor]]:
    """Copies of what both ends keep."""
    ends = (wire.sender, wire.receiver)
    return [{k: v.clone() for k, v in end.state_dict().items()} for end in ends]


def assert_same_stores(a, b):
    for one, two in zip(a, b, strict=True):
        assert one.keys() == two.keys() and all(same_bits(one[k], two[k]) for k in one)


@pytest.mark.each_once
@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, WIDTH), (2, 5, 12), (2, 4, 3, 5)], ids=str)
def test_messages_are_as_laid_out_and_come_out_like_the_input(method, dtype, shape):
    """Law 2 and 3, first and later visits, channels-last too (the checks are in `Wire.send`)."""
    for channels_last in (False, True) if len(shape) == 4 else (False,):
        x = torch.randn(shape).to(dtype)
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        wire = Wire(method, TensorMeta.of(x))
        for step in range(3):
            y = wire.step(x * (1 + step), context(step, ids=ids_for(method, shape[0])))
            assert y.isfinite().all()


@EVERY
def test_what_fp16_can_hold_stays_finite(method):
    """Law 3: estimates and sums of parts that lead beyond 65504 arrive as 65504."""
    wire = Wire(method, TensorMeta((2, WIDTH), torch.float16))
    for step in range(5):
        x = ((torch.rand(2, WIDTH) * 2 - 1) * torch.finfo(torch.float16).max).half()
        assert wire.step(x, context(step, ids=ids_for(method, 2))).isfinite().all()


@EVERY
def test_a_seed_gives_the_same_bits_and_no_other_generator_moves(method, global_rng_untouched):
    """Law 4: two wires with equal visits send the same."""
    xs = torch.randn(3, 2, WIDTH)
    wires = [Wire(method, TensorMeta((2, WIDTH))) for _ in range(2)]
    with global_rng_untouched():
        for step, x in enumerate(xs):
            at = context(step, ids=ids_for(method, 2))
            assert same_bits(*(wire.step(x, at) for wire in wires))
    assert_same_stores(stored(wires[0]), stored(wires[1]))


@EVERY
def test_state_is_read_as_it_was_before_the_step(method):
    """Engines visit microbatches in different orders: messages and state do not depend on it."""
    xs = torch.randn(3, 4, 2, WIDTH)  # steps, microbatches, rows
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        wire = Wire(method, TensorMeta((2, WIDTH)))
        arrived = {}
        for step in range(3):
            for m in order:
                at = context(step, m, ids_for(method, 2, first=2 * m))
                arrived[step, m] = wire.send(xs[step, m], at)
            wire.commit()
        results.append((arrived, stored(wire)))
    (one, state), (two, other) = results
    assert all(same_bits(one[key], two[key]) for key in one)
    assert_same_stores(state, other)


@EVERY
def test_discarded_steps_leave_no_trace(method):
    """Law 6: after a discard the next message is the one there would have been."""
    xs = torch.randn(4, 2, WIDTH)
    at = [context(step, ids=ids_for(method, 2)) for step in range(4)]
    straight, skipping = (Wire(method, TensorMeta((2, WIDTH))) for _ in range(2))
    for step in (0, 1, 3):
        expected = straight.step(xs[step], at[step])
    skipping.step(xs[0], at[0])
    skipping.step(xs[1], at[1])
    before = stored(skipping)
    skipping.send(xs[2], at[2])
    skipping.sender.discard()
    skipping.receiver.discard()
    skipping.commit()  # there is nothing left to store
    assert_same_stores(before, stored(skipping))
    assert same_bits(skipping.step(xs[3], at[3]), expected)


@EVERY
def test_a_dense_send_sets_estimates_to_it_and_residuals_to_zero(method):
    """Uncompressed warm-up, and compression switched off in between."""
    x = torch.randn(2, WIDTH)
    wire = Wire(method, TensorMeta((2, WIDTH)))
    ids = ids_for(method, 2)
    for step in range(2):
        wire.step(torch.randn(2, WIDTH), context(step, ids=ids))
    wire.send_dense(x, context(2, ids=ids))
    wire.commit()
    keys = ids or [(0, 0), (0, 1)]
    kept = store_of(wire.sender).read(keys)
    if wire.sender.estimate is None:
        assert not any(field.store.read(keys).any() for field in wire.sender.fields.values())
    else:
        wire.assert_ends_agree()
        rounding = {"fp32": 0, "fp16": 2**-10, "bf16": 2**-7, 8: 0.02, 4: 0.3}[method.storage]
        assert (kept - x).abs().max() <= rounding * x.abs().max()
        # x is what the ends hold, so what is left to send is its rounding alone.
        again = wire.send(x, context(3, ids=ids))
        assert (again - x).norm() <= 2 * rounding * x.norm() * math.sqrt(WIDTH)


def test_a_dense_send_is_copied():
    """A stage may write to the tensor that went over; the ends must not see that."""
    for method in (EF21(TopK(0.1)), AQSGD(TopK(0.1))):
        wire = Wire(method, TensorMeta((2, WIDTH)))
        x = torch.randn(2, WIDTH)
        kept = x.clone()
        ids = ids_for(method, 2)
        wire.send_dense(x, context(0, ids=ids))
        x.zero_()
        wire.sender.commit()
        assert torch.equal(store_of(wire.sender).read(ids or [(0, 0), (0, 1)]), kept)


@EVERY
def test_writing_to_what_arrived_does_not_reach_the_state(method):
    """Stages may work in place on their input."""
    xs = torch.randn(4, 2, WIDTH)
    careful, rough = (Wire(method, TensorMeta((2, WIDTH))) for _ in range(2))
    for step, x in enumerate(xs):
        at = context(step, ids=ids_for(method, 2))
        expected = careful.step(x, at)
        y = rough.send(x, at)
        assert same_bits(y, expected)
        y.fill_(1e9)
        rough.commit()
    assert_same_stores(stored(careful), stored(rough))


SCALABLE = [
    ErrorFeedback(TopK(0.1)),
    ErrorFeedback(Quantize(4, rounding="stochastic")),
    ErrorFeedback(RandomK(0.2)),
    EFMixed(TopK(0.2)),
    *EXAMPLES[ConEF][:2],
    *EXAMPLES[EF21],
    *EXAMPLES[AQSGD],
]


@pytest.mark.each_once
@pytest.mark.parametrize("method", SCALABLE, ids=str)
@pytest.mark.parametrize("scales", [[2.0**16] * 4, [2.0**16, 2.0**15, 2.0**3, 0.5]], ids=str)
def test_state_is_free_of_the_loss_scale(method, scales):
    """With scales that are powers of two, state is bitwise that of unscaled training."""
    xs = torch.randn(4, 2, WIDTH)
    plain, scaled = (Wire(method, TensorMeta((2, WIDTH))) for _ in range(2))
    for step, (x, scale) in enumerate(zip(xs, scales, strict=True)):
        ids = ids_for(method, 2)
        expected = plain.step(x, context(step, ids=ids))
        got = scaled.step(x * scale, context(step, ids=ids, unit=scale))
        assert same_bits(got / scale, expected)
    assert_same_stores(stored(plain), stored(scaled))


@pytest.mark.parametrize("method", [m for m in FEEDBACK if not m.by_sample], ids=str)
def test_shorter_batches_use_the_leading_rows_and_leave_the_rest(method):
    """A last, shorter batch neither resets nor mixes up the slots, which are places here."""
    xs = torch.randn(4, 3, WIDTH)
    wire = Wire(method, TensorMeta((3, WIDTH)))
    for step in range(2):
        wire.step(xs[step], context(step))
    before = wire.residual(3)
    wire.step(xs[2, :1], context(2))
    after = wire.residual(3)
    assert torch.equal(after[1:], before[1:]) and not torch.equal(after[0], before[0])


@pytest.mark.parametrize("cls", [ErrorFeedback, ConEF, EF21, AQSGD])
def test_bad_settings(cls):
    with pytest.raises(TypeError, match=r"inner='topk:0.1'.*one feedback method a link"):
        cls("topk:0.1")
    with pytest.raises(TypeError, match="one feedback method a link"):
        cls(EF21(TopK(0.1)))
    with pytest.raises(ValueError, match=r"unbiased=True inside feedback diverges.*leave it out"):
        cls(RandomK(0.1, unbiased=True))
    with pytest.raises(ValueError, match="eval='dense'.*compressed, first, raw"):
        cls(TopK(0.1), eval="dense")
    with pytest.raises(ValueError, match="eval of .*'dense' is none of compressed, first, raw"):
        parse(f"{cls.spec}:eval=dense+topk:0.1")
    for storage in ("fp64", 0, 9):
        with pytest.raises(ValueError, match=f"storage={storage!r}.*fp32, fp16, bf16.*1 to 8 bits"):
            cls(TopK(0.1), storage=storage)


@pytest.mark.parametrize("cls", [ErrorFeedback, EF21, AQSGD])
def test_what_evaluation_sends(cls):
    inner, first = TopK(0.1), Quantize(8)
    assert cls(inner).evaluation == inner
    assert cls(inner, eval="raw").evaluation == Identity()
    method = parse(f"{cls.spec}:eval=quant/4/scale=token+topk:0.1")
    assert method.evaluation == Quantize(4, scale="token")
    assert parse(str(method)) == method
    if cls is not ErrorFeedback:
        assert cls(inner, first=first, eval="first").evaluation == first
        assert cls(inner, eval="first").evaluation == Identity()
