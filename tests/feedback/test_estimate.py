"""EF21 and AQ-SGD: both ends keep the same estimate for ever, and it approaches the tensor."""

import pytest
import torch
from ends import Wire, context
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import round_trip, same_bits
from models import store_of

from mpcomp import AQSGD, EF21, Identity, Quantize, RandomK, Sign, TensorMeta, TopK

WIDTH = 60
META = TensorMeta((4, WIDTH))
INNERS = [
    TopK(0.1),
    TopK(0.3, values=Quantize(8)),
    RandomK(0.2),
    Quantize(4),
    Quantize(2, rounding="stochastic"),
    Quantize(4, scale="sample"),
    Sign("sample"),
]
STORAGES = ["fp32", "fp16", "bf16", 4, 8]


@pytest.mark.each_once
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("inner", INNERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_ends_agree_after_many_steps_of_ef21(inner, storage, dtype):
    """Law 5, with microbatches of several lengths; only the payload passes between the ends."""
    wire = Wire(EF21(inner, storage=storage), META)
    for step in range(12):
        for microbatch in range(2):
            rows = (step * 3 + microbatch) % 4 + 1
            wire.send((torch.randn(rows, WIDTH) + step).to(dtype), context(step, microbatch))
        wire.commit()
        wire.assert_ends_agree()
    assert len(store_of(wire.sender)) == 8


@pytest.mark.each_once
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("inner", INNERS, ids=str)
def test_both_ends_agree_after_many_epochs_of_aqsgd(inner, storage):
    """Shuffled epochs over more samples than a batch; every microbatch finds its own."""
    wire = Wire(AQSGD(inner, storage=storage), META)
    data = torch.randn(10, WIDTH)
    for epoch in range(4):
        order = torch.randperm(10).tolist()
        for start in range(0, 10, 4):
            ids = order[start : start + 4]
            x = data[ids] + 0.1 * torch.randn(len(ids), WIDTH)
            wire.step(x, context(10 * epoch + start, ids=tuple((i,) for i in ids)))
        wire.assert_ends_agree()
    assert len(store_of(wire.sender)) == 10


@settings(max_examples=60)
@given(data=st.data())
def test_both_ends_agree_whatever_visits_come(data):
    """Mixed first and later visits, dense sends, discards, caps, storages, first compressors."""
    draw = data.draw
    method = AQSGD(
        draw(st.sampled_from(INNERS)),
        first=draw(st.sampled_from([None, Quantize(8), Quantize(8, scale="sample")])),
        storage=draw(st.sampled_from(STORAGES)),
        cap_bytes=draw(st.sampled_from([None, WIDTH * 4, WIDTH * 4 * 3])),
    )
    wire = Wire(method, META)
    for step in range(draw(st.integers(1, 6))):
        at = []
        pool = draw(st.permutations(range(8)))
        for microbatch in range(draw(st.integers(1, 3))):
            count = draw(st.integers(1, 4)) if microbatch == 0 else 2
            ids, pool = pool[:count], pool[count:]
            if ids:
                at.append(context(step, microbatch, tuple((i,) for i in ids)))
        for one in at:
            x = torch.randn(len(one.sample_ids), WIDTH)
            if draw(st.booleans()):
                wire.send(x, one)
            else:
                wire.send_dense(x, one)
        if draw(st.integers(0, 4)):
            wire.commit()
        else:
            wire.sender.discard()
            wire.receiver.discard()
        wire.assert_ends_agree()
    if method.cap_bytes is not None:
        assert store_of(wire.sender).num_bytes <= method.cap_bytes


@pytest.mark.parametrize("location", ["device", "cpu", "mapped"])
@pytest.mark.parametrize("storage", ["fp32", "bf16", 4])
def test_where_state_is_kept_changes_nothing(location, storage, tmp_path):
    """In memory, on the host or in mapped files: the same messages, bit for bit."""
    place = str(tmp_path / "slots") if location == "mapped" else location
    wires = [
        Wire(AQSGD(Quantize(4), storage=storage, location=where), META)
        for where in ("device", place)
    ]
    for step in range(8):
        ids = tuple((i,) for i in torch.randperm(30)[:4].tolist())
        x = torch.randn(4, WIDTH)
        assert same_bits(*(wire.step(x, context(step, ids=ids)) for wire in wires))
    wires[1].assert_ends_agree()
    if location == "mapped":
        assert list((tmp_path / "slots").iterdir()) == []  # of files without names


@pytest.mark.parametrize("cls", [EF21, AQSGD])
def test_first_visits_go_raw_and_later_ones_correct_the_estimate(cls):
    """d = C(x − h), h ← h + d, the receiver works with h: bit for bit, first visits exact."""
    inner = TopK(0.2)
    wire = Wire(cls(inner), META)
    ids = tuple((i,) for i in range(4)) if cls is AQSGD else None
    estimate = None
    for step in range(6):
        x = torch.randn(4, WIDTH)
        estimate = x if estimate is None else estimate + round_trip(inner, x - estimate)
        assert same_bits(wire.step(x, context(step, ids=ids)), estimate)


def test_first_visit_bytes():
    """The layout follows from flags alone: raw, or the milder compressor, or a mixture."""
    wire = Wire(AQSGD(Quantize(4)), META)
    dense, coded = 4 * WIDTH * 4, 4 + 4 + 4 * WIDTH // 2
    ids = tuple((i,) for i in range(4))
    assert weight(wire, ids) == dense
    wire.step(torch.randn(4, WIDTH), context(0, ids=ids))
    assert weight(wire, ids) == coded
    half = 2 * WIDTH * 4 + 4 + 4 + 2 * WIDTH // 2
    assert weight(wire, ((0,), (9,), (1,), (8,))) == half
    milder = Wire(AQSGD(Quantize(4), first=Quantize(8)), META)
    assert weight(milder, ids) == 4 + 4 + 4 * WIDTH


def weight(wire: Wire, ids) -> int:
    _, receiver = wire.plans(META.with_rows(len(ids)), context(1, ids=ids))
    return sum(part.dense_bytes for part in receiver.layout)


def test_mixed_microbatches_code_first_and_later_rows_apart():
    """Rows stay in their places, first ones exact, later ones corrected."""
    wire = Wire(AQSGD(TopK(0.2)), META)
    known = torch.randn(2, WIDTH)
    wire.step(known, context(0, ids=((5,), (7,))))
    x = torch.randn(4, WIDTH)
    y = wire.step(x, context(1, ids=((1,), (7,), (2,), (5,))))
    assert same_bits(y[[0, 2]], x[[0, 2]])
    order = known[[1, 0]]  # 7 before 5, as in the microbatch
    assert torch.equal(y[[1, 3]], order + round_trip(TopK(0.2), x[[1, 3]] - order))
    wire.assert_ends_agree()


def test_minus_zeros_of_a_raw_row_survive():
    """Law 1's bits: zeros + row would turn −0.0 into 0.0."""
    x = -torch.zeros(4, WIDTH)
    assert same_bits(Wire(EF21(TopK(0.2)), META).step(x, context(0)), x)


@pytest.mark.parametrize("keep", [0.1, 0.3])
def test_ef21_converges_geometrically_to_a_fixed_input(keep):
    """‖x − h_t‖² ≤ (1 − k/n)^t ‖x‖² from h = 0: reference §2.4, §13.6."""
    x = torch.randn(4, WIDTH)
    wire = Wire(EF21(TopK(keep), first=TopK(keep)), META)
    errors = [1.0]
    for step in range(25):
        y = wire.step(x, context(step))
        errors.append(float((x - y).norm() / x.norm()))
    assert errors[1] > 0.3  # it did not start from the answer
    for step, error in enumerate(errors):
        assert error <= (1 - keep) ** (step / 2) + 1e-6
    assert store_of(wire.sender).read([(0, 0)]).shape == (1, WIDTH)


def test_plain_compression_does_not_converge():
    x = torch.randn(4, WIDTH)
    assert (round_trip(TopK(0.1), x) - x).norm() > 0.5 * x.norm()


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16"])
def test_aqsgd_approaches_activations_that_settle(storage):
    """As the model converges a − m shrinks, and so does the error of b bits of it."""
    data = torch.randn(4, WIDTH)
    wire = Wire(AQSGD(Quantize(2), storage=storage), META)
    ids = tuple((i,) for i in range(4))
    direct, corrected = [], []
    for step in range(12):
        x = data + torch.randn(4, WIDTH) * 0.5**step
        corrected.append(float((wire.step(x, context(step, ids=ids)) - x).norm()))
        direct.append(float((round_trip(Quantize(2), x) - x).norm()))
    assert corrected[-1] < 0.05 * direct[-1]


def test_caps_admit_in_order_of_arrival_and_send_the_rest_as_first_visits():
    """Both ends apply the cap alike, without a word on the wire."""
    wire = Wire(AQSGD(Quantize(4), cap_bytes=3 * WIDTH * 4 + 5), META)
    ids = ((4,), (3,), (2,), (1,))
    for step in range(3):
        x = torch.randn(4, WIDTH)
        y = wire.step(x, context(step, ids=ids))
        assert same_bits(y[3], x[3])  # always raw
        assert step == 0 or not torch.equal(y[0], x[0])
    assert store_of(wire.sender).known(ids) == [True, True, True, False]
    wire.assert_ends_agree()


def test_a_cap_below_one_row_is_an_error():
    with pytest.raises(
        ValueError, match=r"cap_bytes=100: one sample's state takes 240 bytes.*raise"
    ):
        Wire(AQSGD(Quantize(4), cap_bytes=100), META)
    with pytest.raises(ValueError, match="cap_bytes=0"):
        AQSGD(Quantize(4), cap_bytes=0)


def test_keys_of_aqsgd():
    """By sample; by (sample, augmentation seed); by place in a batch of fixed composition."""
    by_pair = Wire(AQSGD(TopK(0.2), key="augmented"), META)
    x = torch.randn(2, WIDTH)
    by_pair.step(x, context(0, ids=((0, 11), (1, 11))))
    assert store_of(by_pair.sender).known([(0, 11), (1, 11), (0, 12)]) == [True, True, False]
    assert same_bits(by_pair.step(x + 1, context(1, ids=((0, 12), (1, 12)))), x + 1)

    by_batch = Wire(AQSGD(TopK(0.2), key="batch"), META)
    by_batch.step(x, context(0, microbatch=1, ids=7))
    assert store_of(by_batch.sender).known([(7, 1, 0), (7, 1, 1), (7, 0, 0)]) == [True, True, False]


@pytest.mark.parametrize(
    "key, ids, wrong",
    [
        ("sample", None, "none"),
        ("sample", 3, "3"),
        ("sample", ((1, 2), (3, 4)), "ids of 2 numbers each"),
        ("augmented", ((1,), (2,)), "ids of 1 numbers each"),
        ("batch", ((1,), (2,)), "ids of 1 numbers each"),
    ],
)
def test_sample_ids_of_another_form_are_refused(key, ids, wrong):
    wire = Wire(AQSGD(TopK(0.2), key=key), META)
    with pytest.raises(ValueError, match=rf"AQSGD\(key='{key}'\) needs sample_ids.*got {wrong}"):
        wire.send(torch.randn(2, WIDTH), context(0, ids=ids))


def test_a_sample_that_was_never_seen_is_a_first_visit_not_a_zero():
    """Reference §3.4: flags, not zeros. A zero buffer would be corrected by a few bits."""
    wire = Wire(AQSGD(Quantize(1)), META)
    wire.step(torch.randn(2, WIDTH), context(0, ids=((0,), (1,))))
    x = torch.randn(1, WIDTH)
    assert same_bits(wire.step(x, context(1, ids=((2,),))), x)


def test_positions_only_where_every_row_was_selected():
    """SameIndices: dense where a row went whole, the selection where all were corrected."""
    wire = Wire(AQSGD(TopK(0.2)), META)
    x = torch.randn(2, WIDTH)
    meta = META.with_rows(2)
    for step, ids, selected in [(0, (0, 1), False), (1, (0, 1), True), (2, (0, 2), False)]:
        at = context(step, ids=tuple((i,) for i in ids))
        sender, receiver = wire.plans(meta, at)
        payload = sender.encode(x + step)
        positions = receiver.positions(payload)
        assert (positions is not None) == selected
        if positions is not None:
            assert positions.numel() == 2 * 12
        receiver.decode(payload)
        wire.commit()


def test_ends_that_disagree_differ_in_their_check():
    """A receiver that lacks a slot (a lost checkpoint) is found out, not decoded wrongly."""
    wire = Wire(AQSGD(Quantize(4)), META)
    at = context(0, ids=((0,), (1,)))
    wire.step(torch.randn(2, WIDTH), at)
    fresh = Wire(AQSGD(Quantize(4)), META)
    meta = META.with_rows(2)
    sent, lost = wire.plans(meta, at)[0].check, fresh.plans(meta, at)[1].check
    assert lost != sent
    other = context(0, ids=((0,), (2,)))
    assert wire.plans(meta, other)[1].check != sent


def test_bad_settings():
    with pytest.raises(TypeError, match="first='quant:8'.*a compressor, or None"):
        EF21(TopK(0.1), first="quant:8")
    with pytest.raises(ValueError, match="key='id'.*sample, augmented, batch"):
        AQSGD(TopK(0.1), key="id")
    assert EF21(Identity()).inner == Identity()
