"""ConEF as a value and at a cut: its formula, and that what it keeps stays bounded."""

import math
import warnings

import pytest
import torch
from ends import Wire, context, plan_of
from everyday import slow
from methods import EXAMPLES, same_bits
from models import store_of

import mpcomp
from mpcomp import (
    ECSQ,
    EF21,
    QSGD,
    Compressor,
    ConEF,
    ErrorFeedback,
    LowRank,
    Quantize,
    RandomBlock,
    RandomK,
    TensorMeta,
    TopK,
    parse,
)
from mpcomp.core.randomness import generator_for
from mpcomp.feedback.memory import Side
from mpcomp.feedback.sketch import CountSketch, VectorSketch, num_cells
from mpcomp.links.endpoints.memory import end_of

SHAPE = (3, 80)
CPU = torch.device("cpu")
INNER = [TopK(0.1), RandomBlock(0.1), RandomK(0.2), TopK(0.1, values=Quantize(4)), Quantize(4)]


def arrived(inner: Compressor, x: torch.Tensor, step: int) -> torch.Tensor:
    """What arrives of ``x`` in a step of `ends.visit`."""
    payload = inner.compress(x, generator_for("test", step, 0, "0"))
    return inner.decompress(payload, TensorMeta.of(x), generator_for("test", step, 0, "0"))


# -- the value ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        *EXAMPLES[ConEF],
        ConEF(TopK(0.1), error=QSGD(8)),
        ConEF(TopK(0.1), error=QSGD(8, group=64), improved="v1", lr_scaled=True),
        ConEF(RandomBlock(0.1), 0.4, improved="v2"),
    ],
    ids=str,
)
def test_its_spec_says_all_of_it(method):
    assert parse(str(method)) == method
    assert hash(parse(str(method))) == hash(method)


def test_specs():
    assert parse("conef+topk:0.1") == ConEF(TopK(0.1))
    assert parse("conef:0.4+randomblock:0.1") == ConEF(RandomBlock(0.1), fraction=0.4)
    assert parse("conef:0.2:0.9+topk:0.1+quant:8") == ConEF(TopK(0.1, values=Quantize(8)))
    assert parse("conef:error=qsgd/8:improved=v1+topk:0.1") == ConEF(
        TopK(0.1), error=QSGD(8), improved="v1"
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"fraction": 0.0}, r"fraction=0.0: a sketch has cells.*more than 0\s+and at most 1"),
        ({"fraction": -0.1}, "fraction=-0.1"),
        ({"fraction": 1.1}, "fraction=1.1"),
        ({"fraction": math.nan}, "fraction=nan"),
        ({"beta": 1.0}, r"beta=1.0: expected a number in \[0, 1\); 0 is error feedback"),
        ({"beta": -0.1}, "beta=-0.1: expected"),
        ({"beta": math.nan}, "beta=nan: expected"),
        ({"improved": "v3"}, "improved='v3': expected v1 or v2"),
        ({"improved": "v1"}, r"improved='v1' with a count sketch diverges.*QSGD\(8\).*'v2'"),
        ({"hash": "md5"}, "hash='md5': expected balanced or murmur"),
        ({"storage": "fp64"}, "storage='fp64'.*fp32, fp16, bf16.*1 to 8 bits"),
        ({"error": ECSQ(0.5, rounding="dither")}, "error=step:0.5.*its length cannot vary"),
        ({"eval": "dense"}, "eval='dense'.*compressed, first, raw"),
        ({"beta": 0.0}, r"beta=0.0, fraction=0.2.*\(1 - beta\) \* 5 < 2.*fraction=1 or more"),
        ({"fraction": 0.05}, r"fraction=0.05: a cell that holds 20 elements.*beta above 0.9"),
        ({"fraction": 0.5, "beta": 0.0}, "a cell that holds 2 elements"),
    ],
    ids=str,
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ConEF(TopK(0.1), **settings)


def test_bad_compressors():
    with pytest.raises(TypeError, match=r"error='qsgd:8': expected an unbiased compressor"):
        ConEF(TopK(0.1), error="qsgd:8")
    with pytest.raises(TypeError, match="error=.*expected an unbiased compressor"):
        ConEF(TopK(0.1), error=EF21(TopK(0.1)))
    with pytest.raises(TypeError, match="one feedback method a link"):
        ConEF(ErrorFeedback(TopK(0.1)))
    for inner in (RandomK(0.1, unbiased=True), RandomBlock(0.1, unbiased=True)):
        with pytest.raises(ValueError, match="unbiased=True inside feedback diverges"):
            ConEF(inner)


def test_a_small_sketch_is_warned_of():
    """Below 1 - beta the authors found no setting stable; from it on nothing is said."""
    with pytest.warns(UserWarning, match=r"beta=0.9, fraction=0.08.*1 - beta = 0.1 of the tensor"):
        ConEF(TopK(0.1), 0.08)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for beta, fraction in [(0.1, 0.9), (0.5, 0.6), (0.6, 0.4), (0.8, 0.2), (0.9, 0.1)]:
            if (1 - beta) * math.ceil(1 / fraction) < 2:
                ConEF(TopK(0.1), fraction, beta)
        ConEF(TopK(0.1), 0.01, error=QSGD(8))  # of which there is no use


@pytest.mark.filterwarnings("ignore:ConEF with")
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 0.55, 0.7, 0.8, 0.87, 0.9, 0.95, 0.98])
def test_the_advice_about_a_fraction_is_accepted_and_tight(beta):
    with pytest.raises(ValueError, match="diverges") as refused:
        ConEF(TopK(0.1), 0.004, beta)
    advice = float(str(refused.value).partition("use fraction=")[2].partition(" ")[0])
    ConEF(TopK(0.1), advice, beta)
    with pytest.raises(ValueError, match="diverges"):
        ConEF(TopK(0.1), advice * 0.98, beta)


def test_at_a_cut_there_is_one_sketch():
    """What iConEF and other compressors keep is between replicas alone."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for method in (
        ConEF(TopK(0.1), error=QSGD(8)),
        ConEF(TopK(0.1), improved="v2"),
        "conef:error=qsgd/8:improved=v1+topk:0.1",
    ):
        for cut in ("act_comp", "grad_comp"):
            with pytest.raises(ValueError, match=r"error and improved are for.*dp_comp.*leave"):
                mpcomp.pipeline(model, chunks=2, split=2, **{cut: method})


# -- the formula ----------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("inner", INNER, ids=str)
def test_a_full_sketch_is_partial_error_feedback(inner, beta):
    """m = C(x + (1 - beta) e), e <- beta e + p - m: step by step, and the error too."""
    wire = Wire(ConEF(inner, 1.0, beta), TensorMeta(SHAPE))
    sketch = CountSketch(80, 1.0)
    error = torch.zeros(SHAPE)
    for step in range(30):
        x = torch.randn(SHAPE)
        wanted = x + (1 - beta) * error
        expected = arrived(inner, wanted, step)
        error = beta * error + wanted - expected
        torch.testing.assert_close(wire.step(x, context(step)), expected, rtol=1e-5, atol=1e-5)
        held = sketch.estimate(wire.residual(3))
        torch.testing.assert_close(held, error, rtol=1e-5, atol=1e-4)
    assert error.norm() > 1


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_without_beta_it_is_error_feedback(inner):
    ours = Wire(ConEF(inner, 1.0, 0.0), TensorMeta(SHAPE))
    plain = Wire(ErrorFeedback(inner), TensorMeta(SHAPE))
    for step in range(30):
        x = torch.randn(SHAPE)
        torch.testing.assert_close(
            ours.step(x, context(step)), plain.step(x, context(step)), rtol=1e-5, atol=1e-5
        )
    assert plain.residual(3).norm() > 1


@pytest.mark.parametrize("hash", ["balanced", "murmur"])
@pytest.mark.parametrize("inner", INNER, ids=str)
def test_a_sketch_is_told_of_what_is_not_sent_now(inner, hash):
    """S <- S + sketch(x - m): so it holds the sketch of all that was not sent so far."""
    method = ConEF(inner, 0.4, beta=0.9, hash=hash)
    wire = Wire(method, TensorMeta(SHAPE))
    sketch = VectorSketch(80, 0.4, hash=hash)
    held = torch.zeros(3, sketch.cells)
    missing = torch.zeros(SHAPE)
    for step in range(20):
        x = torch.randn(SHAPE)
        expected = arrived(inner, x + (1 - 0.9) * sketch.estimate(held), step)
        held = held + sketch.sketch(x - expected)
        missing += x - expected
        assert same_bits(wire.step(x, context(step)), expected)
        assert same_bits(wire.residual(3), held)
    torch.testing.assert_close(held, sketch.sketch(missing), rtol=1e-5, atol=1e-4)


def test_dense_error_is_zero_where_all_is_sent():
    with pytest.warns(UserWarning, match="would not shrink"):
        wire = Wire(ConEF(TopK(0.99)), TensorMeta(SHAPE))
        for step in range(3):
            x = torch.randn(SHAPE)
            assert same_bits(wire.step(x, context(step)), x)
    assert not wire.residual(3).any()


def test_cells_of_a_narrow_dtype_are_what_was_sent_in_it():
    """In half precision what rounding cuts off is in the sketch, as in error feedback."""
    meta = TensorMeta(SHAPE, torch.bfloat16)
    wire = Wire(ConEF(TopK(0.1), 1.0, 0.5), meta)
    sketch = CountSketch(80, 1.0)
    missing = torch.zeros(SHAPE)
    for step in range(20):
        x = torch.randn(SHAPE).bfloat16()
        missing += x.float() - wire.step(x, context(step)).float()
    held = sketch.estimate(wire.residual(3))
    torch.testing.assert_close(held, missing, rtol=1e-5, atol=1e-4)


# -- stability ------------------------------------------------------------------------------------

ROW = 40


def sent_part(inner: Compressor, wanted: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    payload = inner.compress(wanted, generator)
    return inner.decompress(payload, TensorMeta.of(wanted), torch.Generator().manual_seed(step))


@pytest.mark.parametrize(
    "fraction, inner, steps",
    [
        *((fraction, RandomBlock(0.1), 900) for fraction in (0.1, 0.2, 0.4)),
        (0.1, TopK(0.1), 900),
        *(slow(fraction, TopK(0.1), 900) for fraction in (0.2, 0.4)),
        slow(0.1, RandomBlock(0.1), 3_000),
        slow(0.1, TopK(0.1), 10_000),
    ],
    ids=str,
)
def test_what_is_kept_stays_bounded(fraction, inner, steps):
    method, meta = ConEF(inner, fraction), TensorMeta((1, ROW))
    end = end_of(method, Side.SENDER, meta, CPU)
    drawn = torch.Generator().manual_seed(7)
    norms = []
    for step in range(steps):
        plan_of(method, end, meta, context(step)).encode(torch.randn(1, ROW, generator=drawn))
        end.commit()
        if step % 100 == 99:
            norms.append(float(store_of(end).read([(0, 0)]).norm()))
    third = len(norms) // 3
    early, late = max(norms[:third]), max(norms[third:])
    assert min(norms) > 1  # something is left out all the time
    assert late < 2 * early < 2000


@pytest.mark.parametrize("inner", [RandomBlock(0.1), TopK(0.1)], ids=str)
@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.4])
def test_what_is_decoded_and_sketched_again_blows_up(fraction, inner):
    """S <- C(beta e + p - m) as it is written: each cell is multiplied by its load each step."""
    sketch = CountSketch(ROW, fraction)
    held = torch.zeros(1, sketch.width)
    drawn = torch.Generator().manual_seed(7)
    norms = []
    for step in range(60):
        error = sketch.estimate(held)
        wanted = torch.randn(1, ROW, generator=drawn) + 0.1 * error
        held = sketch.sketch(0.9 * error + wanted - sent_part(inner, wanted, step))
        norms.append(float(held.norm()))
    assert norms[0] < 10 and not norms[-1] < 1e6  # NaN, even


@pytest.mark.parametrize("beta, load, bounded", [(0.9, 10, True), (0.5, 3, True), (0.5, 5, False)])
def test_a_row_of_which_all_is_sent(beta, load, bounded):
    """Multiplies its cells by 1 - (1 - beta) load: what the check of settings rests on."""
    sketch = CountSketch(load * 8, 1 / load)
    assert sketch.load == load
    held = torch.randn(1, 8)
    first = held.clone()
    for _ in range(20):
        x = torch.randn(1, load * 8)
        sent = x + (1 - beta) * sketch.estimate(held)
        held = held + sketch.sketch(x - sent)
    factor = abs(1 - (1 - beta) * load) ** 20
    torch.testing.assert_close(held.abs(), first.abs() * factor, rtol=0.01, atol=1e-3)
    assert (held.norm() < first.norm()) == bounded


# -- padded positions, dense sends, rows, steps ---------------------------------------------------


def masked(step: int, valid: torch.Tensor) -> mpcomp.core.context.MessageContext:
    plain = context(step)
    return mpcomp.core.context.MessageContext(step, 0, plain.draw, None, 1.0, valid)


def test_padded_positions_add_nothing_and_get_nothing():
    """A cell belongs to positions of all kinds, so only its estimate and its changes are masked."""
    inner, shape = TopK(0.2), (3, 8, 10)
    meta = TensorMeta(shape)
    method = ConEF(inner, 0.4)
    end = end_of(method, Side.SENDER, meta, CPU)
    sketch = VectorSketch(80, 0.4)
    held = torch.zeros(3, sketch.cells)
    for step in range(12):
        valid = torch.rand(3, 8) < 0.6
        counts = valid[:, :, None].expand(shape).reshape(3, 80)
        x = torch.randn(shape) * valid[:, :, None]
        wanted = x.reshape(3, 80) + (1 - 0.9) * (sketch.estimate(held) * counts)
        assert not wanted[~counts].any()
        at = masked(step, valid)
        expected = arrived(inner, wanted.reshape(shape), step)
        plan = plan_of(method, end, meta, at)
        y = plan.arrived(plan.encode(x))
        assert torch.equal(y, expected) and not y[~valid].any()
        held = held + sketch.sketch((x - expected).reshape(3, 80) * counts)
        end.commit()
        torch.testing.assert_close(store_of(end).read([(0, r) for r in range(3)]), held)
    # A row of which nothing counts keeps its cells.
    before = store_of(end).read([(0, 1)])
    valid = torch.ones(3, 8, dtype=torch.bool)
    valid[1] = False
    x = torch.randn(shape) * valid[:, :, None]
    plan_of(method, end, meta, masked(20, valid)).encode(x)
    end.commit()
    assert same_bits(store_of(end).read([(0, 1)]), before)
    assert not torch.equal(store_of(end).read([(0, 0)]), held[:1])


def test_a_dense_send_clears_the_sketch():
    """All of x went over, so nothing of it is owed; of a row not seen yet there is nothing kept."""
    wire = Wire(ConEF(TopK(0.1)), TensorMeta(SHAPE))
    wire.send_dense(torch.randn(SHAPE), context(0))
    wire.commit()
    assert len(store_of(wire.sender)) == 0
    for step in (1, 2):
        wire.step(torch.randn(SHAPE), context(step))
    full = wire.residual(3)
    wire.send_dense(torch.randn(2, 80), context(3))  # a shorter batch
    wire.sender.discard()
    assert same_bits(wire.residual(3), full)
    wire.send_dense(torch.randn(2, 80), context(3))
    wire.commit()
    assert not wire.residual(2).any() and same_bits(wire.residual(3)[2], full[2])
    x = torch.randn(SHAPE)
    assert same_bits(wire.step(x, context(4))[:2], arrived(TopK(0.1), x[:2], 4))


@pytest.mark.parametrize("inner", [TopK(0.1), Quantize(4, scale="sample")], ids=str)
def test_rows_have_cells_of_their_own(inner):
    """What becomes of a row depends on no other, nor on how many there are."""
    xs = torch.randn(5, *SHAPE)
    together = Wire(ConEF(inner, 0.4), TensorMeta(SHAPE))
    alone = Wire(ConEF(inner, 0.4), TensorMeta((1, 80)))
    for step, x in enumerate(xs):
        rows = 1 if step == 3 else 3
        y = together.step(x[:rows], context(step))
        assert same_bits(y[:1], alone.step(x[:1], context(step)))
    assert same_bits(together.residual(1), alone.residual(1))


def test_skipped_steps_leave_no_trace():
    xs = torch.randn(4, *SHAPE)
    straight, skipping = (Wire(ConEF(RandomBlock(0.1), 0.4), TensorMeta(SHAPE)) for _ in range(2))
    for step in (0, 1, 3):
        expected = straight.step(xs[step], context(step))
    for step in (0, 1):
        skipping.step(xs[step], context(step))
    skipping.send(xs[2] * math.inf, context(2))
    skipping.sender.discard()
    assert same_bits(skipping.step(xs[3], context(3)), expected)
    assert same_bits(skipping.residual(3), straight.residual(3))


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16", 8, 4])
def test_saved_and_loaded_it_goes_on_bit_for_bit(storage):
    method = ConEF(TopK(0.1), 0.4, storage=storage)
    xs = torch.randn(6, *SHAPE)
    whole, half = (Wire(method, TensorMeta(SHAPE)) for _ in range(2))
    for step in range(3):
        whole.step(xs[step], context(step))
    saved = {k: v.clone() for k, v in store_of(whole.sender).state_dict().items()}
    store_of(half.sender).load_state_dict(saved)
    for step in range(3, 6):
        assert same_bits(whole.step(xs[step], context(step)), half.step(xs[step], context(step)))
    assert same_bits(whole.residual(3), half.residual(3)) and whole.residual(3).any()


def test_a_sketch_follows_a_change_of_the_learning_rate():
    """lr_scaled keeps eta e: after the rate is halved the old error weighs twice."""
    wire = Wire(ConEF(TopK(0.1), 1.0, 0.0, lr_scaled=True), TensorMeta(SHAPE))
    plain = Wire(ErrorFeedback(TopK(0.1), lr_scaled=True), TensorMeta(SHAPE))
    for step, lr in enumerate((0.5, 0.25, 1.0)):
        x = torch.randn(SHAPE)
        at = context(step, unit=1 / lr)
        torch.testing.assert_close(wire.step(x, at), plain.step(x, at), rtol=1e-5, atol=1e-5)


def test_positions_are_those_of_its_compressor():
    x, meta = torch.randn(SHAPE), TensorMeta(SHAPE)
    wire = Wire(ConEF(TopK(0.1)), meta)
    sender, receiver = wire.plans(meta, context(0))
    payload = sender.encode(x)
    expected = TopK(0.1).indices(TopK(0.1).compress(x), meta)
    assert torch.equal(sender.positions(payload), expected)
    assert torch.equal(receiver.positions(payload), expected)
    for inner in (Quantize(4), LowRank(1)):
        other = Wire(ConEF(inner, 0.4), TensorMeta((3, 40, 40)))
        sender, receiver = other.plans(TensorMeta((3, 40, 40)), context(0))
        payload = sender.encode(torch.randn(3, 40, 40))
        assert sender.positions(payload) is receiver.positions(payload) is None


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.4, 1.0])
@pytest.mark.parametrize("storage, cell_bytes", [("fp32", 4), ("bf16", 2)])
def test_memory_is_the_fraction(fraction, storage, cell_bytes):
    wire = Wire(ConEF(TopK(0.1), fraction, storage=storage), TensorMeta(SHAPE))
    wire.step(torch.randn(SHAPE), context(0))
    assert store_of(wire.sender).num_bytes == 3 * num_cells(80, fraction) * cell_bytes
    assert store_of(wire.receiver) is None


def test_state_bytes_says_so_before_the_run():
    model = torch.nn.Sequential(torch.nn.Linear(8, 60), torch.nn.Linear(60, 4))
    sizes = {}
    for method in (ErrorFeedback(TopK(0.1)), ConEF(TopK(0.1), 0.2)):
        pipe = mpcomp.pipeline(
            model, chunks=2, split=2, act_comp=method, loss_fn=torch.nn.functional.cross_entropy
        )
        said = pipe.state_bytes(torch.zeros(6, 8))
        (entry,) = said["per_link"]
        assert entry["role"] == "sender" and entry["rows"] == 6
        pipe.forward_backward(torch.randn(6, 8), torch.zeros(6, dtype=torch.int64))
        held = sum(
            link.endpoint.ends["sender"].num_bytes
            for link in pipe.links
            if "sender" in link.endpoint.ends
        )
        assert held == said["total"]
        sizes[type(method)] = said["total"]
    assert sizes == {ErrorFeedback: 6 * 60 * 4, ConEF: 6 * 12 * 4}


@pytest.mark.parametrize("error", ["topk/0.1", "quant/8", "sign"])
def test_a_biased_error_compressor_is_refused(error):
    with pytest.raises(ValueError, match=f"error={error.replace('/', ':')}: what it loses"):
        parse(f"conef:error={error}+topk:0.1")
