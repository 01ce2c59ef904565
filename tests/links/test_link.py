"""Links: lengths, policy, checks, state and errors of one direction of one cut."""

import copy
import dataclasses
import warnings

import pytest
import torch
from everyday import slow_but_one_a_class
from methods import COMPRESSORS, FEEDBACK, round_trip, same_bits, varies

from mpcomp import (
    AQSGD,
    ECSQ,
    EF21,
    Cast,
    ErrorFeedback,
    Feedback,
    Identity,
    Link,
    Quantize,
    RandomK,
    TensorMeta,
    TopK,
    pipeline,
)
from mpcomp.core.context import Step
from mpcomp.core.wire import COMPRESSED, DENSE, FORMAT, HEADER_BYTES, Header, no_tensor
from mpcomp.links.build import format_of
from mpcomp.links.state import restored

METHODS = [*COMPRESSORS, *FEEDBACK]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPE = (4, 120)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*would not shrink"),
    pytest.mark.filterwarnings("ignore:.*what was kept of all samples is dropped"),
]


def link_of(method, direction="act", **kwargs) -> Link:
    return Link(method, boundary=0, direction=direction, **kwargs)


def step_of(index=0, train=True, ids=True, **kwargs) -> Step:
    rows = tuple((i,) for i in range(4)) if ids else None
    return Step(index, train, sample_ids=(rows, tuple((10 + i,) for i in range(4))), **kwargs)


def carry(link: Link, x: torch.Tensor, step: Step, microbatch: int = 0) -> torch.Tensor:
    """There and, decoded, back again."""
    return link.decode(link.encode(x, step, microbatch), TensorMeta.of(x), step, microbatch)


def state_of(link: Link) -> dict:
    return copy.deepcopy(link.endpoint.state_dict())


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        equal = same_bits(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
        assert equal, key


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_length_is_known_beforehand_and_metered(method, dtype, global_rng_untouched):
    """Law 2: layout = message = meter; laws 3 and 4: like the input, which stays as it was."""
    link = link_of(method)
    total = 0
    with global_rng_untouched():
        for index in range(3):
            x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(index)).to(dtype)
            before = x.clone()
            step = step_of(index)
            if index:
                expected = link.message_bytes(TensorMeta.of(x), step, 0, x.device)
            message = link.encode(x, step, 0)
            assert message.dtype == torch.uint8 and message.dim() == 1
            assert index == 0 or message.numel() == expected or varies(method)
            assert index == 0 or message.numel() <= expected
            total += message.numel()
            y = link.decode(message, TensorMeta.of(x), step, 0)
            assert y.shape == x.shape and y.dtype == dtype and same_bits(x, before)
            link.commit()
    traffic = link.meter.train
    assert (traffic.messages, traffic.wire_bytes) == (3, total)
    assert traffic.dense_bytes == 3 * x.numel() * x.element_size()
    assert link.meter.eval.messages == 0


@pytest.mark.parametrize("method", [TopK(0.1), Quantize(4), RandomK(0.2)], ids=str)
def test_what_arrives_is_the_compressors_result(method):
    """A link adds a header and nothing else; the message is as small as the compressor says."""
    x = torch.randn(SHAPE)
    link = link_of(method)
    message = link.encode(x, step_of(), 0)
    assert message.numel() - HEADER_BYTES <= method.wire_bytes(TensorMeta.of(x)) + 7
    y = link.decode(message, TensorMeta.of(x), step_of(), 0)
    assert not torch.equal(y, x)
    if not isinstance(method, RandomK):
        assert same_bits(y, round_trip(method, x))


def test_draws_depend_on_seed_replica_boundary_direction_step_and_microbatch():
    """Law 4: engines may visit in any order, and no two messages share their choice."""
    x = torch.randn(1, 2000)

    def kept(link, index=0, train=True, microbatch=0):
        return (carry(link, x, Step(index, train), microbatch) != 0).nonzero().tolist()

    method = RandomK(0.1)
    first = kept(link_of(method))
    assert kept(link_of(method)) == first
    others = [
        kept(link_of(method, seed=1)),
        kept(link_of(method, replica=1)),
        kept(Link(method, boundary=1, direction="act")),
        kept(link_of(method, "grad")),
        kept(link_of(method), index=1),
        kept(link_of(method), microbatch=1),
        kept(link_of(method), train=False),
    ]
    assert all(other != first for other in others)


@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_warm_up_goes_dense_and_evaluation_does_not(method):
    """Uncompressed steps cost dense bytes and arrive whole; evaluation compresses at once."""
    x = torch.randn(SHAPE)
    link = link_of(method, warmup_steps=2)
    for index in range(2):
        message = link.encode(x, step_of(index), 0)
        assert message.numel() == HEADER_BYTES + x.numel() * 4
        assert Header.of(message).kind == DENSE
        assert same_bits(link.decode(message, TensorMeta.of(x), step_of(index), 0), x)
        link.commit()
    inner = method.inner if isinstance(method, Feedback) else method
    raw = getattr(method, "eval", "") == "raw" or inner.wire_bytes(TensorMeta.of(x)) >= 4 * 480
    evaluated = link.encode(x, step_of(0, train=False), 0)
    assert (Header.of(evaluated).kind == DENSE) == raw
    after = link.encode(x, step_of(2), 0)
    dense = not isinstance(method, Feedback) and raw
    assert (Header.of(after).kind == DENSE) == dense
    assert dense or after.numel() < HEADER_BYTES + x.numel() * 4


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("direction", ["act", "grad"])
def test_each_direction_has_its_own_switch(direction, on):
    step = Step(0, True, compress_act=on, compress_grad=not on)
    message = link_of(TopK(0.1), direction).encode(torch.randn(SHAPE), step, 0)
    compressed = on if direction == "act" else not on
    assert Header.of(message).kind == (COMPRESSED if compressed else DENSE)


@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_evaluation_reads_and_writes_no_state(method):
    """Law 6: evaluation sends C(x), or x itself, whatever has been learnt."""
    link = link_of(method)
    for index in range(3):
        carry(link, torch.randn(SHAPE), step_of(index))
        link.commit()
    before = state_of(link)
    x = torch.randn(SHAPE)
    evaluation = Step(3, train=False)  # no sample ids are needed
    y = carry(link, x, evaluation)
    fresh = carry(link_of(method), x, evaluation)
    assert same_bits(y, fresh)
    if method.eval == "raw":
        assert same_bits(y, x)
    elif str(method.evaluation) in ("topk:0.1", "quant:4", "sign", "step:0.2"):  # no drawing
        assert same_bits(y, round_trip(method.evaluation, x))
    assert_same(state_of(link), before)
    assert not any(end.open_slots for end in link.endpoint.ends.values())
    # A link that has only evaluated has no ends.
    lazy = link_of(method)
    carry(lazy, x, evaluation)
    assert not lazy.endpoint.ends and not lazy.endpoint.state_dict()


@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_state_is_stored_at_the_commit_alone(method):
    link = link_of(method)
    xs = torch.randn(3, *SHAPE)
    carry(link, xs[0], step_of(0))
    link.commit()
    before = state_of(link)
    carry(link, xs[1], step_of(1))
    assert_same(state_of(link), before)
    link.discard()
    link.commit()
    assert_same(state_of(link), before)
    carry(link, xs[2], step_of(2))
    link.commit()
    after = state_of(link)
    assert any(
        isinstance(after[key], torch.Tensor) and not same_bits(after[key], before[key])
        for key in after
    )


@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_state_goes_to_a_fresh_link_and_on_bit_for_bit(method):
    """Law 7 for one link."""
    link = link_of(method)
    xs = torch.randn(5, 2, *SHAPE)

    def train(one, index):
        arrived = [carry(one, xs[index, m], step_of(index), m) for m in range(2)]
        one.commit()
        return torch.stack(arrived)

    for index in range(3):
        train(link, index)
    other = link_of(method)
    devices = dict.fromkeys(("sender", "receiver"), torch.device("cpu"))
    restored(other, state_of(link), devices)()
    assert_same(state_of(other), state_of(link))
    for index in range(3, 5):
        assert same_bits(train(other, index), train(link, index))
    assert_same(state_of(other), state_of(link))


@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_another_shape_per_sample_starts_anew(method):
    """State belongs to a sample's shape; EF21 then begins with a raw send."""
    link = link_of(method)
    for index in range(2):
        carry(link, torch.randn(SHAPE), step_of(index))
        link.commit()
    x = torch.randn(4, 90)
    y = carry(link, x, step_of(2))
    fresh = carry(link_of(method), x, step_of(2))
    assert same_bits(y, fresh)
    if link.endpoint.ends["sender"].estimate is not None and method.first is None:
        assert same_bits(y, x)
    link.commit()
    assert link.endpoint.state_dict()["sample"]["shape"] == [1, 90]


@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_a_skipped_step_of_another_shape_loses_nothing(method):
    """Law 6: what a step would have begun anew is as it was when the step is discarded."""
    link = link_of(method)
    for index in range(2):
        carry(link, torch.randn(SHAPE), step_of(index))
        link.commit()
    before = state_of(link)
    carry(link, torch.randn(4, 90), step_of(2))
    carry(link, torch.randn(4, 70), step_of(2), 1)
    link.discard()
    assert_same(state_of(link), before)
    x = torch.randn(SHAPE)
    twin = link_of(method)
    restored(twin, before, dict.fromkeys(("sender", "receiver"), torch.device("cpu")))()
    assert same_bits(carry(link, x, step_of(3)), carry(twin, x, step_of(3)))


def test_the_same_numbers_in_another_memory_order_start_anew():
    """Rows are kept in memory order, so channels-last rows are other rows."""
    link = link_of(EF21(TopK(0.1)))
    x = torch.randn(4, 3, 8, 8)
    carry(link, x, step_of(0))
    link.commit()
    y = x.contiguous(memory_format=torch.channels_last)
    assert same_bits(carry(link, y, step_of(1)), y)  # raw


# -- the two ends disagree ------------------------------------------------------------------------


def test_an_end_that_is_not_where_the_other_is_says_so():
    x = torch.randn(SHAPE)
    meta = TensorMeta.of(x)
    here, there = link_of(TopK(0.1)), link_of(TopK(0.1))
    message = here.encode(x, step_of(5), 0)
    with pytest.raises(RuntimeError, match=r"boundary 0 act, step 6, microbatch 0.*disagree"):
        there.decode(message, meta, step_of(6), 0)
    warm = link_of(TopK(1.0), warmup_steps=9)
    with pytest.raises(RuntimeError, match=r"disagree|bytes where"):
        warm.decode(message, meta, step_of(5), 0)


@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("method", [Identity(), TopK(0.1), EF21(TopK(0.1)), ECSQ(0.3)], ids=str)
def test_a_notice_of_no_tensor_is_no_activation(method, train, checked):
    """Whatever stands behind it; what was sent can be decoded as ever."""
    x = torch.randn(SHAPE)
    here, there = (link_of(method, checked=checked) for _ in range(2))
    for step in (step_of(0, train), step_of(1, train)):
        message = here.encode(x, step, 0)
        notice = message.clone()
        notice[:HEADER_BYTES] = no_tensor()
        for damaged in (notice, no_tensor(message.numel()), no_tensor()):
            with pytest.raises(RuntimeError, match="boundary 0 act, .*microbatch 0, from stage 0"):
                there.decode(damaged, TensorMeta.of(x), step, 0)
        arrived = there.decode(message, TensorMeta.of(x), step, 0)
        assert same_bits(arrived, here.arrived(message, step, 0))
        here.commit()
        there.commit()


def test_lost_state_at_one_end_is_noticed_not_decoded():
    """Same length, other slots: the header's check tells."""
    method = AQSGD(Quantize(4))
    here, there = link_of(method), link_of(method)
    x = torch.randn(SHAPE)
    meta = TensorMeta.of(x)
    for rows in (range(4), range(4, 8)):
        step = Step(0, True, sample_ids=(tuple((i,) for i in rows),))
        there.decode(here.encode(x, step, 0), meta, step, 0)
        here.commit()
        there.commit()
    known = Step(1, True, sample_ids=(tuple((i,) for i in (0, 1, 2, 3)),))
    other = Step(1, True, sample_ids=(tuple((i,) for i in (0, 1, 2, 7)),))
    message = here.encode(x, known, 0)
    with pytest.raises(RuntimeError, match="disagree"):
        there.decode(message, meta, other, 0)


# -- what cannot cross a cut ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("method", [Identity(), TopK(0.1)], ids=str)
def test_tensors_that_are_not_floating_point_are_refused(dtype, method):
    with pytest.raises(
        TypeError, match=rf"boundary 0 act: a {dtype} tensor cannot cross.*cut where"
    ):
        link_of(method).encode(torch.ones(3, 4).to(dtype), step_of(), 0)


@pytest.mark.parametrize("method", [Identity(), TopK(0.1), EF21(TopK(0.1))], ids=str)
def test_empty_tensors_are_refused(method):
    with pytest.raises(ValueError, match=r"empty activation of shape \[3, 0\] cannot cross"):
        link_of(method).encode(torch.ones(3, 0), step_of(), 0)


@pytest.mark.each_once
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_a_nonfinite_activation_is_an_error_with_or_without_a_scaler(method, bad):
    """It names boundary, direction and step; nothing is learnt, the meter counts it."""
    x = torch.randn(SHAPE)
    x[2, 60] = bad
    for step in (step_of(7), step_of(7, scaled=True), step_of(7, train=False)):
        link = link_of(method)
        with pytest.raises(FloatingPointError, match=r"NaN or Inf at boundary 0 act, step 7: "):
            link.encode(x, step, 0)
        link.commit()
        assert not link.endpoint.state_dict()
        traffic = link.meter.of(step.train)
        assert traffic.nonfinite == 1 and traffic.messages == 0


@pytest.mark.each_once
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_a_nonfinite_gradient_is_an_error_or_with_a_scaler_a_flag(method, bad):
    """Compression must not hide an overflow: all NaN arrives, and the step is known to be bad."""
    x = torch.randn(SHAPE)
    x[2, 60] = bad
    link = link_of(method, "grad")
    with pytest.raises(FloatingPointError, match=r"at boundary 0 grad.*scaler=torch.amp"):
        link.encode(x, step_of(), 0)
    assert not link.nonfinite.found()
    scaled = step_of(scaled=True, loss_scale=2.0)
    message = link.encode(x, scaled, 0)
    assert Header.of(message).status == 1
    y = link.decode(message, TensorMeta.of(x), scaled, 0)
    assert y.isnan().all()
    assert link.nonfinite.found() and not link.nonfinite.found()
    assert link.meter.train.nonfinite == 2
    link.discard()
    good = carry(link, torch.randn(SHAPE), scaled, 0)
    assert good.isfinite().all() and not link.nonfinite.found()


def test_values_at_the_edge_of_the_dtype_are_finite():
    x = torch.full(SHAPE, torch.finfo(torch.float16).max, dtype=torch.float16)
    assert carry(link_of(Identity()), x, step_of()).isfinite().all()


# -- units ----------------------------------------------------------------------------------------


def test_lr_scaled_residuals_follow_the_rate():
    """Stored in units of η g: halving η doubles the residual in units of the gradient."""
    inner = TopK(0.1)
    link = link_of(ErrorFeedback(inner, lr_scaled=True), "grad")
    x = torch.randn(2, *SHAPE)
    one = carry(link, x[0], step_of(0, lr=0.5))
    link.commit()
    residual = x[0] - one
    stored = link.endpoint.state_dict()["sender.rows0"]
    assert same_bits(stored, residual * 0.5)
    assert same_bits(carry(link, x[1], step_of(1, lr=0.25)), round_trip(inner, x[1] + 2 * residual))


@pytest.mark.parametrize("lr", [None, 0.0])
def test_lr_scaled_needs_the_rate(lr):
    link = link_of(ErrorFeedback(TopK(0.1), lr_scaled=True), "grad")
    with pytest.raises(ValueError, match=rf"lr={lr}.*call pipe.follow\(optimizer\)"):
        link.encode(torch.randn(SHAPE), step_of(lr=lr), 0)
    assert carry(link, torch.randn(SHAPE), step_of(train=False)).isfinite().all()


def test_the_loss_scale_is_no_matter_of_activations():
    link = link_of(ErrorFeedback(TopK(0.1)))
    x = torch.randn(SHAPE)
    y = carry(link, x, step_of(loss_scale=1024.0))
    link.commit()
    assert torch.equal(link.endpoint.state_dict()["sender.rows0"], x - y)


def test_what_would_not_shrink_is_marked_dense():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        message = link_of(TopK(1.0)).encode(torch.randn(SHAPE), step_of(), 0)
    assert Header.of(message).kind == DENSE
    assert message.numel() == HEADER_BYTES + 480 * 4


@pytest.mark.parametrize("method", ["bf16", "quant:8", "ef21+fp16"])
def test_only_tensors_that_are_sent_are_said_to_be_sent_dense(method):
    """The ranks' comparison of formats looks at tensors of its own, of which nobody has to hear."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = pipeline(
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)),
            1,
            split=2,
            act_comp=method,
            grad_comp=method,
            loss_fn=torch.nn.functional.mse_loss,
        )
        pipe.forward_backward(torch.randn(4, 64), torch.randn(4, 64))


def test_steps_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        step_of().index = 3


def test_every_call_of_a_pass_draws_anew():
    """Generation makes a call for each token: the same positions each time would starve others."""
    link, x = link_of(RandomK(0.1)), torch.randn(SHAPE)
    steps = [Step(0, False, call=call) for call in (0, 1, 2, 1)]
    kept = [carry(link, x, step) != 0 for step in steps]
    assert torch.equal(kept[1], kept[3])
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])


# -- damaged messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_one_flipped_bit_of_a_checked_message_is_an_error_that_names_it(method):
    """Without a check EF21's ends, or AQ-SGD's, would be apart for ever."""
    here, there = (link_of(method, checked=True) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    for index in range(3):
        x = torch.randn(SHAPE, generator=generator)
        step = step_of(index)
        size = there.message_bytes(TensorMeta.of(x), step, 0, x.device)
        message = here.encode(x, step, 0)
        assert message.numel() <= size and (message.numel() == size or varies(method))
        place, bit = (int(torch.randint(n, (), generator=generator)) for n in (size, 8))
        damaged = message.clone()
        damaged[place % message.numel()] ^= 1 << bit
        with pytest.raises(
            RuntimeError, match=f"boundary 0 act, step {index}, microbatch 0, from stage 0: message"
        ):
            there.decode(damaged, TensorMeta.of(x), step, 0)
        there.discard()
        there.message_bytes(TensorMeta.of(x), step, 0, x.device)
        assert same_bits(
            there.decode(message, TensorMeta.of(x), step, 0), here.arrived(message, step, 0)
        )
        for link in (here, there):
            link.commit()
    assert here.meter.train.wire_bytes >= 3 * 32


def test_a_message_of_another_layout_is_named_although_it_is_as_long():
    """Half precision of two kinds: the same bytes, and other numbers."""
    x = torch.randn(SHAPE)
    here, there = link_of(Cast("fp16")), link_of(Cast("bf16"))
    message = here.encode(x, step_of(), 0)
    assert message.numel() == there.message_bytes(TensorMeta.of(x), step_of(), 0, x.device)
    with pytest.raises(RuntimeError, match="microbatch 0, from stage 0: the two ends disagree"):
        there.decode(message, TensorMeta.of(x), step_of(), 0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("train", [True, False])
def test_a_message_that_says_nan_is_flagged_where_it_arrives(value, train):
    """Its sender saw none, and the status says so."""
    x = torch.randn(SHAPE)
    here, there = link_of(Identity()), link_of(Identity())
    step = step_of(train=train)
    message = here.encode(x, step, 0)
    message[HEADER_BYTES + 40 : HEADER_BYTES + 44] = torch.tensor([value]).view(torch.uint8)
    assert not there.decode(message, TensorMeta.of(x), step, 0).isfinite().all()
    assert not there.nonfinite.found(not train) and there.nonfinite.found(train)
    assert not there.nonfinite.found(train) and not here.nonfinite.found(train)


@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_the_format_tells_code_of_two_dates_apart(method, monkeypatch):
    """Ranks compare it before they connect: a method of one name may have had another layout."""
    found = format_of(link_of(method))
    assert found == format_of(link_of(method)) and all(0 <= number < 1 << 32 for number in found)
    monkeypatch.setattr("mpcomp.links.build.layout_check", lambda layout: len(repr(layout)) + 1)
    other = format_of(link_of(method))
    assert len(other) == len(found) and (other != found) == (len(found) > len(FORMAT))


def test_formats_differ_where_messages_do():
    methods = [Cast("fp16"), Cast("bf16"), TopK(0.1), TopK(0.2), Quantize(4), EF21(TopK(0.1))]
    assert len({tuple(format_of(link_of(method))) for method in methods}) == 6
