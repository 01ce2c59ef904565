"""The sender's side of a link: it meters what arrives elsewhere, and knows lengths beforehand.

`Link.compare_sent`, which all engines use, decodes at the sender what the receiver will. So two
links stand for two ranks here, and the receiver's decoding is the reference.
"""

import itertools
import math

import pytest
import torch
from everyday import slow_but_one_a_class
from methods import COMPRESSORS, FEEDBACK, same_bits, varies
from models import store_of

from mpcomp import EF21, Identity, Link, Quantize, SameIndices, TensorMeta, TopK
from mpcomp.comm.channels import LocalChannel
from mpcomp.core.context import Step
from mpcomp.core.spec import SpecValue
from mpcomp.core.traffic import Traffic
from mpcomp.core.wire import HEADER_BYTES, LONG_HEADER_BYTES, Header
from mpcomp.links.boundary import Boundary, Crossing

METHODS = [*COMPRESSORS, *FEEDBACK]
SHAPE = (4, 120)
CPU = torch.device("cpu")
NUM_MICROBATCHES = 2
pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


def link_of(method, direction="act", **kwargs):
    return Link(method, boundary=0, direction=direction, **kwargs)


def step_of(index, train=True, **kwargs):
    """With 8 of 11 samples, others in each step: AQ-SGD's first visits come at several steps."""
    ids = [tuple(((4 * m + i + index) % 11,) for i in range(4)) for m in range(NUM_MICROBATCHES)]
    return Step(index, train, sample_ids=tuple(ids) if train else (), **kwargs)


def steps():
    """Training with a warm-up before and a dense step within, and evaluation between."""
    for index in range(5):
        off = {"compress_act": False, "compress_grad": False} if index == 3 else {}
        yield step_of(index, **off)
        yield step_of(index, train=False, **off)


def drawn(step, microbatch, dtype=torch.float32):
    seed = 100 * step.index + 10 * microbatch + step.train
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def num_stored(link):
    """Rows of state at both ends."""
    return sum(
        len(store_of(end)) for end in link.endpoint.ends.values() if store_of(end) is not None
    )


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["act", "grad"])
@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_the_sender_meters_what_the_receiver_decodes(method, direction, dtype):
    here, there = (link_of(method, direction, warmup_steps=1) for _ in range(2))
    both = link_of(method, direction, warmup_steps=1)  # in one process, as the local engine
    reference = {True: Traffic(), False: Traffic()}
    for step in steps():
        for m in range(NUM_MICROBATCHES):
            x = drawn(step, m, dtype)
            meta = TensorMeta.of(x)
            message = here.encode(x, step, m)
            here.compare_sent(x, message, step, m)
            arrived = there.decode(message, meta, step, m)
            message = both.encode(x, step, m)
            y = both.decode(message, meta, step, m)
            both.compare_sent(x, message, step, m)
            assert same_bits(y, arrived)
            on = step.compress_act and not (step.train and step.index < 1)
            if on and not isinstance(method, Identity):
                reference[step.train].compare(x, arrived)
        for link in (here, there, both):
            link.commit()
    for train, expected in reference.items():
        energies = expected.to_state()["energies"]
        assert here.meter.of(train).to_state()["energies"] == energies
        assert both.meter.of(train).to_state()["energies"] == energies
        assert (energies is None) == isinstance(method, Identity)
    # The receiver has nothing to compare with, and counts no message twice.
    for traffic in there.meter.phases.values():
        assert traffic.messages == 0 and traffic.to_state()["energies"] is None


@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_metering_at_the_sender_changes_nothing(method):
    """It reads what is pending; the next messages are the same bits."""
    plain, metered = link_of(method), link_of(method)
    for step in steps():
        for m in range(NUM_MICROBATCHES):
            x = drawn(step, m)
            messages = [link.encode(x, step, m) for link in (plain, metered)]
            metered.compare_sent(x, messages[1], step, m)
            assert same_bits(*messages)
        plain.commit()
        metered.commit()


@pytest.mark.each_once
@pytest.mark.parametrize("method", FEEDBACK, ids=str)
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_under_a_loss_scale(method, scale):
    """State is kept without it. A power of two is exact; another is so up to rounding."""
    here, there = link_of(method, "grad"), link_of(method, "grad")
    expected = Traffic()
    for index in range(4):
        step = step_of(index, scaled=True, loss_scale=scale)
        x = drawn(step, 0) * scale
        message = here.encode(x, step, 0)
        here.compare_sent(x, message, step, 0)
        expected.compare(x, there.decode(message, TensorMeta.of(x), step, 0))
        here.commit()
        there.commit()
    found, energies = (t.to_state()["energies"] for t in (here.meter.train, expected))
    assert found == energies if scale == 1024 else found == pytest.approx(energies, rel=1e-5)


@pytest.mark.each_once
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_microbatches_in_any_order(method, order):
    """A sender with several microbatches under way meters the one that it has just sent."""
    here, there = link_of(method), link_of(method)
    expected = Traffic()
    for index in range(3):
        ids = tuple(tuple((4 * m + i,) for i in range(4)) for m in range(3))
        step = Step(index, True, sample_ids=ids)
        for m in order:
            x = drawn(step, m)
            message = here.encode(x, step, m)
            here.compare_sent(x, message, step, m)
            expected.compare(x, there.decode(message, TensorMeta.of(x), step, m))
        here.commit()
        there.commit()
    assert here.meter.train.to_state()["energies"] == expected.to_state()["energies"]


def test_channels_last_is_metered_in_memory_order():
    here, there = link_of(TopK(0.1)), link_of(TopK(0.1))
    x = torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    step = step_of(0)
    message = here.encode(x, step, 0)
    here.compare_sent(x, message, step, 0)
    expected, meta = Traffic(), TensorMeta.of(x)
    expected.compare(meta.flatten(x), meta.flatten(there.decode(message, meta, step, 0)))
    assert here.meter.train.to_state()["energies"] == expected.to_state()["energies"]


def test_one_microbatch_a_step_is_metered_when_its_message_is_handed_over():
    link, expected = link_of(TopK(0.1)), Traffic()
    crossing = Crossing(link, LocalChannel(CPU))
    for index in range(3):
        step = step_of(index, num_microbatches=NUM_MICROBATCHES)
        for m in range(NUM_MICROBATCHES):
            x = drawn(step, m)
            meta = TensorMeta.of(x)
            crossing.send(x, meta, step, m)
            arrived, _ = crossing.receive(meta, step, m)
            if m == index % NUM_MICROBATCHES:
                expected.compare(x, arrived)
    assert link.meter.train.to_state()["energies"] == expected.to_state()["energies"]


# -- the same choice of elements both ways --------------------------------------------------------


def boundary_of(act, grad=None):
    return Boundary(link_of(act), link_of(grad or SameIndices(), "grad"))


@pytest.mark.parametrize("act", ["topk", "ef21"])
def test_same_indices_at_two_ranks(act):
    """Lengths and fidelity of both directions, where the mask is known from the activation."""
    method = TopK(0.1) if act == "topk" else EF21(TopK(0.1))
    earlier, later = boundary_of(method), boundary_of(method)
    expected_act, expected_grad = Traffic(), Traffic()
    lengths = []
    for index in range(4):
        step = step_of(index)
        for m in range(NUM_MICROBATCHES):
            x, g = drawn(step, m), drawn(step, m + 5)
            meta = TensorMeta.of(x)
            size = later.act.message_bytes(meta, step, m, CPU)
            message = earlier.act.encode(x, step, m)
            assert message.numel() == size
            earlier.act.compare_sent(x, message, step, m)
            expected_act.compare(x, later.act.decode(message, meta, step, m))
            size = earlier.grad.message_bytes(meta, step, m, CPU)
            message = later.grad.encode(g, step, m)
            assert message.numel() == size
            lengths.append(size)
            later.grad.compare_sent(g, message, step, m)
            expected_grad.compare(g, earlier.grad.decode(message, meta, step, m))
        earlier.finish_step(finite=True)
        later.finish_step(finite=True)
    dense = HEADER_BYTES + 4 * 480
    assert (max(lengths) == dense) == (act == "ef21")  # whose first rows go whole
    assert min(lengths) < dense / 5
    assert earlier.act.meter.train.to_state()["energies"] == expected_act.to_state()["energies"]
    assert later.grad.meter.train.to_state()["energies"] == expected_grad.to_state()["energies"]


def assert_expected(message: torch.Tensor, expected: int, method: SpecValue) -> None:
    """A message of the length that its receiver has planned, or at most that, where it varies."""
    if varies(method):
        assert LONG_HEADER_BYTES <= message.numel() <= expected
    else:
        assert message.numel() == expected


# -- lengths, before there is any state -----------------------------------------------------------


@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_a_receiver_knows_the_length_of_the_first_message(method):
    """Receives are posted at a step's beginning, on a rank that has never seen the link."""
    here, there = (link_of(method, warmup_steps=1) for _ in range(2))
    lengths = set()
    for step in steps():
        for m in range(NUM_MICROBATCHES):
            x = drawn(step, m)
            meta = TensorMeta.of(x)
            expected = there.message_bytes(meta, step, m, CPU)
            message = here.encode(x, step, m)
            assert_expected(message, expected, method)
            lengths.add(expected)
            there.decode(message, meta, step, m)
        here.commit()
        there.commit()
    dense = HEADER_BYTES + 4 * 480
    assert dense in lengths  # in the warm-up
    shrinks = len(lengths) > 1
    assert shrinks == (not isinstance(method, Identity) and method not in NEVER_SHRINK)


NEVER_SHRINK = [m for m in COMPRESSORS if m.wire_bytes(TensorMeta(SHAPE)) >= 4 * 480]


@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_all_lengths_of_a_step_are_known_at_its_beginning(method):
    """Microbatches of other sizes included, before any message of the step has come."""
    here, there = link_of(method), link_of(method)
    sizes = (4, 3)
    for index in range(3):
        ids = (tuple((i + index,) for i in range(4)), tuple((10 + i + index,) for i in range(3)))
        step = Step(index, True, sample_ids=ids)
        metas = [TensorMeta((size, 120)) for size in sizes]
        expected = [there.message_bytes(meta, step, m, CPU) for m, meta in enumerate(metas)]
        for m, meta in enumerate(metas):
            message = here.encode(torch.randn(meta.shape), step, m)
            assert_expected(message, expected[m], method)
            there.decode(message, meta, step, m)
        here.commit()
        there.commit()


@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_asking_for_a_length_leaves_no_state(method):
    link = link_of(method)
    link.message_bytes(TensorMeta(SHAPE), step_of(0), 0, CPU)
    assert all(not end.open_slots for end in link.endpoint.ends.values())
    link.commit()
    assert num_stored(link) == 0


# -- a cut within a rank --------------------------------------------------------------------------


@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_what_does_not_leave_the_rank_is_coded_and_not_counted(method):
    """So that placement changes no number of the training, and no byte is counted in vain."""
    inside, outside = link_of(method), link_of(method)
    inside.on_wire = False
    for step in steps():
        x = drawn(step, 0)
        messages = [link.encode(x, step, 0) for link in (inside, outside)]
        assert same_bits(*messages)
        for link, message in zip((inside, outside), messages, strict=True):
            link.compare_sent(x, message, step, 0)
            link.decode(message, TensorMeta.of(x), step, 0)
            link.commit()
    for phase, traffic in inside.meter.phases.items():
        other = outside.meter.phases[phase]
        assert (traffic.messages, traffic.wire_bytes, traffic.dense_bytes) == (0, 0, 0)
        assert traffic.to_state()["energies"] == other.to_state()["energies"]
        assert (other.messages > 0) and traffic.seconds > 0
        assert math.isnan(traffic.ratio)


# -- NaN and Inf that all ranks must hear of ------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("direction", ["act", "grad"])
@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_an_error_can_wait_for_the_end_of_the_step(method, direction, bad):
    """The message goes, flagged; NaN arrives; `found_nonfinite` tells at the end, once."""
    here, there = link_of(method, direction), link_of(method, direction)
    here.defers_nonfinite = True
    for step in (step_of(0), step_of(1, train=False)):
        x = drawn(step, 0)
        x[1, 7] = bad
        meta = TensorMeta.of(x)
        expected = there.message_bytes(meta, step, 0, CPU)
        message = here.encode(x, step, 0)
        assert_expected(message, expected, method)
        assert Header.of(message).status == 1
        here.compare_sent(x, message, step, 0)
        assert there.decode(message, meta, step, 0).isnan().all()
        assert not here.nonfinite.found(train=not step.train)
        assert here.nonfinite.found(step.train) and not here.nonfinite.found(step.train)
        assert here.meter.of(step.train).nonfinite == 1
        assert there.nonfinite.found(step.train), "who receives it need not trust the status"
        assert there.meter.of(step.train).nonfinite == 0, "it is counted where it was made"
        here.discard()
        there.discard()
        assert num_stored(here) == num_stored(there) == 0
    assert here.meter.train.relative_error == 0  # figures of the run are not spoilt


def test_phases_tell_nonfinite_values_apart():
    """An evaluation between two training steps neither takes nor leaves a note of theirs."""
    link = link_of(Quantize(4))
    link.defers_nonfinite = True
    link.encode(torch.full(SHAPE, torch.nan), step_of(0), 0)
    link.encode(torch.full(SHAPE, torch.nan), step_of(0, train=False), 0)
    link.encode(torch.randn(SHAPE), step_of(0), 1)
    assert link.nonfinite.found(train=False)
    assert link.nonfinite.found(train=True)
    assert (link.meter.train.nonfinite, link.meter.eval.nonfinite) == (1, 1)


# -- figures of several ranks ---------------------------------------------------------------------


def traffic_of(*pairs, nonfinite=0, seconds=0.0):
    traffic = Traffic(seconds=seconds, nonfinite=nonfinite)
    for x, y in pairs:
        traffic.count(10, 4 * x.numel(), x.numel())
        traffic.compare(x, y)
    return traffic


def test_merged_traffic_is_that_of_one_meter():
    pairs = [tuple(torch.randn(2, 50)) for _ in range(5)]
    parts = [
        traffic_of(*pairs[:2], nonfinite=1, seconds=0.5),
        Traffic(),
        traffic_of(*pairs[2:], seconds=0.25),
    ]
    whole = traffic_of(*pairs, nonfinite=1, seconds=0.75)
    merged = Traffic.merged(part.to_state() for part in parts)
    found, expected = merged.to_dict(), whole.to_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (value and pytest.approx(value, rel=1e-12)), name


@pytest.mark.parametrize("how_many", [0, 1, 3])
def test_merging_nothing_is_nothing(how_many):
    merged = Traffic.merged(Traffic().to_state() for _ in range(how_many))
    assert merged.to_state() == Traffic().to_state()


def test_merging_changes_none_of_the_parts():
    state = traffic_of((torch.ones(3), torch.zeros(3))).to_state()
    before = {**state, "energies": list(state["energies"])}
    merged = Traffic.merged([state, state])
    merged.compare(torch.ones(3), torch.ones(3))
    assert state == before
    assert merged.messages == 2 and merged.wire_bytes == 20
