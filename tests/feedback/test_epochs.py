"""AQ-SGD over shuffled epochs of a data set: warm-up, samples left out, caps, a resumed run."""

import pytest
import torch
import torch.nn.functional as F
from ends import Wire, context
from methods import same_bits
from models import (
    MLP_SPLIT,
    assert_same_state,
    assert_same_training,
    links_state,
    mlp,
    num_stored_rows,
    rows,
    sgd,
    store_of,
)

import mpcomp
from mpcomp import AQSGD, Quantize, TensorMeta
from mpcomp.core.context import Step
from mpcomp.core.wire import HEADER_BYTES

SAMPLES, BATCH, WIDTH = 22, 4, 60


def shuffled(epoch: int) -> list[list[int]]:
    """An epoch's batches, the last and shorter one dropped: two samples are left out."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [order[i : i + BATCH] for i in range(0, SAMPLES - BATCH + 1, BATCH)]


def left_out(epoch: int) -> set[int]:
    return set(range(SAMPLES)) - {i for ids in shuffled(epoch) for i in ids}


def named(ids) -> tuple[tuple[int, ...], ...]:
    return tuple((i,) for i in ids)


def pipe_of(method, seed: int = 0):
    torch.manual_seed(seed)
    return mpcomp.pipeline(
        mlp(), 2, split=MLP_SPLIT, act_comp=method, grad_comp="quant:8", loss_fn=F.cross_entropy
    )


def train_epoch(pipe, optimizer, epoch: int, *, ahead: bool = False) -> list[float]:
    x, y = rows(SAMPLES)
    losses = []
    batches = shuffled(epoch)
    for ids, following in zip(batches, [*batches[1:], None], strict=True):
        if ahead:
            pipe.prefetch(following)
        losses.append(pipe.forward_backward(x[ids], y[ids], sample_ids=ids).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("location", ["device", "files"])
def test_an_uncompressed_epoch_fills_the_buffers_exactly(location, tmp_path):
    """Both ends of every cut hold, bit for bit, what the stage made of each sample."""
    place = str(tmp_path) if location == "files" else location
    pipe = pipe_of(AQSGD(Quantize(4), location=place))
    made: list[dict[int, torch.Tensor]] = [{}, {}]
    ids_of_call: list[list[int]] = []
    for number, stage in enumerate(pipe.cut_stages[:-1]):

        def note(module, args, output, number=number):
            ids = ids_of_call[number].pop(0)
            made[number].update(zip(ids, output.detach().clone(), strict=True))

        stage.register_forward_hook(note)
    x, y = rows(SAMPLES)
    optimizer = sgd(pipe)
    with pipe.uncompressed():
        for ids in shuffled(0):
            ids_of_call[:] = [[ids[:2], ids[2:]], [ids[:2], ids[2:]]]
            pipe.forward_backward(x[ids], y[ids], sample_ids=ids)
            optimizer.step()
            optimizer.zero_grad()
    assert pipe.wire_bytes == pipe.dense_bytes + 5 * 2 * 4 * HEADER_BYTES  # it was uncompressed
    for number, boundary in enumerate(pipe.boundaries):
        assert made[number].keys() == set(range(SAMPLES)) - left_out(0)
        for end in boundary.act.endpoint.ends.values():
            held = store_of(end).read(named(made[number]))
            assert same_bits(held, torch.stack(list(made[number].values())))
            assert store_of(end).known(named(left_out(0))) == [False, False]


@pytest.mark.parametrize("dense_first", [True, False])
def test_samples_left_out_at_first_go_raw_when_they_come(dense_first):
    """Not as a code against zero: they arrive exactly, among rows that are differences."""
    wire = Wire(AQSGD(Quantize(2)), TensorMeta((BATCH, WIDTH)))
    data = torch.randn(SAMPLES, WIDTH)
    late = left_out(0)
    assert len(late) == 2 and late != left_out(1)
    seen: set[int] = set()
    mixed = 0
    for epoch in range(4):
        for number, ids in enumerate(shuffled(epoch)):
            x = data[ids] + 0.1 * torch.randn(BATCH, WIDTH)
            at = context(10 * epoch + number, ids=named(ids))
            if epoch == 0 and dense_first:
                wire.send_dense(x, at)
                wire.commit()
                seen.update(ids)
                continue
            first = [i for i, name in enumerate(ids) if name not in seen]
            arrived = wire.step(x, at)
            later = [i for i in range(BATCH) if i not in first]
            assert same_bits(arrived[first], x[first])
            assert not later or not torch.equal(arrived[later], x[later])
            mixed += bool(first) and bool(later)
            seen.update(ids)
        wire.assert_ends_agree()
    assert seen == set(range(SAMPLES)) and mixed > 0


def test_shuffled_order_finds_each_sample_its_own_row():
    """With data that stays, estimates come closer in every epoch, whatever the order."""
    wire = Wire(AQSGD(Quantize(4), first=Quantize(1)), TensorMeta((BATCH, WIDTH)))
    data = torch.randn(SAMPLES, WIDTH) * torch.arange(1, SAMPLES + 1)[:, None]
    errors = torch.full((6, SAMPLES), torch.nan)
    for epoch in range(6):
        for number, ids in enumerate(shuffled(epoch)):
            arrived = wire.step(data[ids], context(10 * epoch + number, ids=named(ids)))
            errors[epoch, ids] = (arrived - data[ids]).norm(dim=1) / data[ids].norm(dim=1)
    for sample in range(SAMPLES):
        of_one = errors[:, sample][~errors[:, sample].isnan()]
        assert of_one[-1] < 0.1 * of_one[0] and of_one[-1] < 0.02


@pytest.mark.parametrize("location", ["device", "files"])
def test_rows_beyond_a_cap_go_raw_for_ever_and_the_meter_shows_it(location, tmp_path):
    """Both ends admit the same samples, the first to come, and the message says as much."""
    place = str(tmp_path) if location == "files" else location
    fit = 9
    cap = {0: 4 * 19 * fit, 1: 4 * 17 * fit}
    pipe = pipe_of([AQSGD(Quantize(4), location=place, cap_bytes=cap[i]) for i in range(2)])
    optimizer = sgd(pipe)
    first_come = [i for ids in shuffled(0) for i in ids][:fit]
    for epoch in range(3):
        before = [boundary.act.meter.train.wire_bytes for boundary in pipe.boundaries]
        train_epoch(pipe, optimizer, epoch)
        for number, boundary in enumerate(pipe.boundaries):
            stores = [store_of(end) for end in boundary.act.endpoint.ends.values()]
            for store in stores:
                assert len(store) == fit and store.num_bytes == cap[number]
                assert all(store.known(named(first_come)))
            states = [store.state_dict() for store in stores]
            assert all(same_bits(states[0][key], states[1][key]) for key in states[0])
            width = (19, 17)[number]
            expected = 0
            for ids in shuffled(epoch):
                for part in (ids[:2], ids[2:]):
                    raw = sum(i not in first_come for i in part) if epoch else len(part)
                    expected += HEADER_BYTES + raw * 4 * width
                    if raw < len(part):
                        inner = Quantize(4).layout(TensorMeta((len(part) - raw, width)))
                        expected += sum(wire.dense_bytes for wire in inner)
            assert boundary.act.meter.train.wire_bytes - before[number] == expected, epoch


def test_batches_of_several_lengths_are_warned_about():
    """Every change of length drops all rows: that must not look like AQ-SGD at work."""
    link = mpcomp.Link(AQSGD(Quantize(4)), boundary=0, direction="act")
    link.encode(torch.randn(2, 5, 8), Step(0, True, sample_ids=(named((1, 2)),)), 0)
    link.commit()
    with pytest.warns(UserWarning, match=r"shape \[4, 8\] come after those of \[5, 8\].*pad all"):
        link.encode(torch.randn(2, 4, 8), Step(1, True, sample_ids=(named((1, 2)),)), 0)


@pytest.mark.parametrize("storage", ["fp32", "fp16", 4])
def test_a_resumed_run_with_files_goes_on_bit_for_bit(storage, tmp_path):
    """Law 7; the resumed run has files of its own, and reads ahead."""
    method = AQSGD(Quantize(4), storage=storage, location=str(tmp_path / "slots"))
    straight = pipe_of(method)
    optimizer = sgd(straight)
    for epoch in range(2):
        train_epoch(straight, optimizer, epoch)
    straight.save(tmp_path / "run", optimizer=optimizer)
    resumed = pipe_of(method, seed=7)
    other = sgd(resumed)
    resumed.load(tmp_path / "run", optimizer=other)
    assert num_stored_rows(resumed) == num_stored_rows(straight) > 0
    for epoch in (2, 3):
        expected = train_epoch(straight, optimizer, epoch)
        assert train_epoch(resumed, other, epoch, ahead=True) == expected
    assert_same_training(resumed, straight)
    assert_same_state(links_state(resumed), links_state(straight))
