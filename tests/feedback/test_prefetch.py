"""Reading ahead: AQ-SGD's rows come sooner, and no number changes."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import MLP_SPLIT, assert_same_state, assert_same_training, links_state, mlp, rows, sgd

import mpcomp
from mpcomp import AQSGD, EF21, ErrorFeedback, Quantize, TensorMeta
from mpcomp.core.context import Step
from mpcomp.feedback import store as stores
from mpcomp.feedback.store import FileTable, SlotStore, StoragePlan

CPU = torch.device("cpu")
SAMPLES = 26


def keys(*numbers: int) -> list[tuple[int, ...]]:
    return [(n,) for n in numbers]


@pytest.fixture
def reads(monkeypatch) -> dict[str, int]:
    """Rows read from files, by kind of thread."""
    counts = {"caller": 0, "worker": 0}
    read = FileTable.read

    def counted(self, slots, **kwargs):
        worker = threading.current_thread().name.startswith("mpcomp-prefetch")
        counts["worker" if worker else "caller"] += len(slots)
        return read(self, slots, **kwargs)

    monkeypatch.setattr(FileTable, "read", counted)
    return counts


@pytest.fixture
def held_back(monkeypatch):
    """Lets the thread read only when the event is set."""
    go = threading.Event()
    read = stores._read

    def waiting(*args):
        if threading.current_thread().name.startswith("mpcomp-prefetch"):
            assert go.wait(120)
        return read(*args)

    monkeypatch.setattr(stores, "_read", waiting)
    yield go
    go.set()


def store_of(folder, storage="fp32") -> SlotStore:
    """Ten rows in a file; row i is all i."""
    store = SlotStore(5, StoragePlan(storage, str(folder)), CPU)
    store.write(keys(*range(10)), torch.arange(10.0)[:, None].expand(10, 5))
    return store


# -- the law -------------------------------------------------------------------------------------


def batches_of(key: str, epochs: int = 3, size: int = 6):
    """Shuffled epochs that drop their last batch; by chance an id is in two batches in a row."""
    x, y = rows(SAMPLES)
    generator = torch.Generator().manual_seed(3)
    for epoch in range(epochs):
        order = torch.randperm(SAMPLES, generator=generator)
        for number in range(SAMPLES // size):
            at = order[number * size : (number + 1) * size]
            if key == "batch":
                at = torch.arange(number * size, (number + 1) * size)
            ids = {
                "sample": at,
                "augmented": torch.stack([at, at % 2 + (epoch == 2)], 1),
                "batch": number,
            }[key]
            yield x[at], y[at], ids


def trained(method, key, *, ahead: int, skipped=(), checkpoint=None):
    """Losses and the pipeline, with prefetch calls ``ahead`` batches ahead (0: none)."""
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(
        mlp(), 3, split=MLP_SPLIT, act_comp=method, grad_comp="quant:8", loss_fn=F.cross_entropy
    )
    optimizer = sgd(pipe)
    batches = list(batches_of(key))
    losses = []
    for i, (x, y, ids) in enumerate(batches):
        if ahead and i + ahead < len(batches):
            pipe.prefetch(batches[i + ahead][2])
        if i in skipped:  # a step that fails and is discarded
            with pytest.raises(FloatingPointError):
                pipe.forward_backward(x * torch.nan, y, sample_ids=ids)
            optimizer.zero_grad()
        if checkpoint and i == 7:
            pipe.save(checkpoint, optimizer=optimizer)
            pipe.load(checkpoint, optimizer=optimizer)
        losses.append(pipe.forward_backward(x, y, sample_ids=ids))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), pipe


@pytest.mark.each_once
@pytest.mark.parametrize("key", ["sample", "augmented", "batch"])
@pytest.mark.parametrize("storage", ["fp32", 4])
def test_numbers_are_the_same_with_and_without(key, storage, tmp_path, reads):
    """In files and in memory; ids in both batches, ids never seen, a step that fails."""
    expected, plain = trained(AQSGD(Quantize(4), storage=storage, key=key), key, ahead=0)
    for location, ahead in (*((str(tmp_path), ahead) for ahead in (0, 1, 2)), ("cpu", 1)):
        method = AQSGD(Quantize(4), storage=storage, key=key, location=location)
        losses, pipe = trained(method, key, ahead=ahead, skipped=(6,))
        assert same_bits(losses, expected)
        assert_same_training(pipe, plain)
        assert_same_state(links_state(pipe), links_state(plain))
        assert (reads["worker"] > 0) == (location != "cpu" and ahead > 0)
        reads.update(caller=0, worker=0)


def test_a_checkpoint_in_between_and_caps(tmp_path):
    """Law 7 with files: loading forgets what was read ahead; beyond the cap rows go raw."""
    for cap in (None, 19 * 4 * 9):
        method = AQSGD(Quantize(4), location=str(tmp_path / "slots"), cap_bytes=cap)
        expected, plain = trained(method, "sample", ahead=0)
        for ahead in (0, 1):
            losses, pipe = trained(method, "sample", ahead=ahead, checkpoint=tmp_path / "run")
            assert same_bits(losses, expected)
            assert_same_state(links_state(pipe), links_state(plain))


def test_steps_find_their_rows_in_memory(tmp_path, reads):
    """What was asked for and not stored anew since is read by the thread alone."""
    method = AQSGD(Quantize(4), location=str(tmp_path))
    pipe = mpcomp.pipeline(
        *(mlp(), 2),
        split=MLP_SPLIT,
        act_comp=method,
        loss_fn=F.cross_entropy,
        checks="none",  # which read as well
    )
    x, y = rows(8)
    for ids in (range(8), range(8, 16)):
        pipe.forward_backward(x, y, sample_ids=list(ids))
    assert reads == {"caller": 0, "worker": 0}
    pipe.prefetch(list(range(8)))
    pipe.prefetch(list(range(8, 16)))
    for ids in (range(8), range(8, 16)):
        pipe.forward_backward(x, y, sample_ids=list(ids))
    assert reads == {"caller": 0, "worker": 2 * 4 * 8}  # batches, ends, rows
    pipe.prefetch([0, 1, 2, 20])  # other microbatches than those that come, and an id never seen
    pipe.forward_backward(x, y, sample_ids=[5, 2, 20, 1, 30, 0, 9, 31])
    assert reads == {"caller": 4 * 2, "worker": 2 * 4 * 8 + 4 * 3}


# -- one store -----------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["fp32", "bf16", 8])
def test_rows_stored_since_are_seen(storage, tmp_path, held_back):
    store = store_of(tmp_path, storage)
    store.prefetch([keys(0, 1), keys(2, 77, 3)])
    store.write(keys(1, 77), torch.full((2, 5), 50.0))
    held_back.set()
    assert store.read(keys(0, 1))[:, 0].tolist() == [0, 50]
    store.write(keys(3), torch.full((1, 5), 60.0))
    assert store.read(keys(3, 77, 8, 2))[:, 0].tolist() == [60, 50, 8, 2]


def test_rows_wait_for_two_batches_and_no_longer(tmp_path, reads):
    store = store_of(tmp_path)
    for batch in ([keys(0, 1)], [keys(2, 3)], [keys(4)]):
        store.prefetch(batch)
    assert store.read(keys(2, 3, 4))[:, 0].tolist() == [2, 3, 4]
    assert reads["caller"] == 0
    assert store.read(keys(0, 1))[:, 0].tolist() == [0, 1]
    assert reads["caller"] == 2
    assert not store._ahead  # what was taken takes no memory


def test_growth_and_loading_while_the_thread_reads(tmp_path, held_back):
    store = store_of(tmp_path)
    state = {key: value.clone() for key, value in store.state_dict().items()}
    store.prefetch([keys(0, 1)])
    store.write(keys(*range(10, 500)), torch.ones(490, 5))
    store.prefetch([keys(2)])
    state["rows0"] += 100
    store.load_state_dict(state)
    held_back.set()
    assert store.read(keys(0, 1, 2, 11))[:, 0].tolist() == [100, 101, 102, 0]
    store.prefetch([keys(0, 1)])
    stores._worker().submit(lambda: None).result()  # it has been read
    state["rows0"] += 100
    store.load_state_dict(state)
    assert store.read(keys(0, 1))[:, 0].tolist() == [200, 201]


@pytest.mark.filterwarnings("ignore:.*pad all batches")
@pytest.mark.parametrize("kept", [True, False], ids=["committed", "discarded"])
def test_another_sample_shape(kept, tmp_path):
    """It starts anew; a discarded step brings the rows back, and what was read ahead of them."""
    link = mpcomp.Link(AQSGD(Quantize(4), location=str(tmp_path)), boundary=0, direction="act")

    def step(index, width, ids):
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(index))
        at = Step(index, True, sample_ids=(tuple(keys(*ids)),))
        return link.decode(link.encode(x, at, 0), TensorMeta.of(x), at, 0)

    step(0, 40, (1, 2))
    link.commit()
    link.endpoint.prefetch((tuple(keys(1, 2)),))
    step(1, 30, (1, 2))
    link.endpoint.prefetch((tuple(keys(1, 2)),))  # nothing is stored of the new shape
    if kept:
        link.commit()
        link.endpoint.prefetch((tuple(keys(1, 2)),))
        step(2, 30, (2, 1))
    else:
        link.discard()
        step(2, 40, (2, 1))
    link.commit()
    stores = [field.store for end in link.endpoint.ends.values() for field in end.fields.values()]
    assert [len(store) for store in stores] == [2, 2]
    assert same_bits(*(store.read(keys(1, 2)) for store in stores))
    assert stores[0].row_numel == (30 if kept else 40)


def test_what_is_read_ahead_is_a_copy(tmp_path):
    store = store_of(tmp_path)
    store.prefetch([keys(0, 1)])
    store.read(keys(0, 1)).fill_(7)
    assert store.read(keys(0, 1))[:, 0].tolist() == [0, 1]


def test_rows_come_in_the_order_asked_for(tmp_path):
    store = store_of(tmp_path, 8)
    store.prefetch([keys(0, 1, 2), keys(3, 4)])
    assert store.read(keys(2, 0, 1))[:, 0].tolist() == [2, 0, 1]
    assert store.read(keys(4, 77, 3))[:, 0].tolist() == [4, 0, 3]


def test_a_store_may_go_while_the_thread_reads(tmp_path, held_back):
    store = store_of(tmp_path)
    store.prefetch([keys(0, 1)])
    del store
    held_back.set()
    stores._worker().submit(lambda: None).result()
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_thread_surfaces_and_the_next_read_reads_anew(tmp_path, monkeypatch):
    store = store_of(tmp_path)
    read = FileTable.read

    def broken(*args, **kwargs):
        raise OSError("the disk is gone")

    monkeypatch.setattr(FileTable, "read", broken)
    store.prefetch([keys(0, 1)])
    stores._worker().submit(lambda: None).result()  # until the worker is there
    monkeypatch.setattr(FileTable, "read", read)
    with pytest.raises(OSError, match="the disk is gone"):
        store.read(keys(5))  # also of other rows
    assert store.read(keys(0, 5))[:, 0].tolist() == [0, 5]


# -- who listens ---------------------------------------------------------------------------------


def test_prefetch_before_any_state_and_for_other_methods_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_worker", lambda: pytest.fail("no thread is needed"))
    for method in (
        EF21(Quantize(4), location=str(tmp_path)),
        ErrorFeedback(Quantize(4), location=str(tmp_path)),
        AQSGD(Quantize(4)),
        AQSGD(Quantize(4), location=str(tmp_path)),  # no row yet
        Quantize(4),
    ):
        pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, act_comp=method, loss_fn=F.cross_entropy)
        pipe.prefetch([3, 4, 5])
        pipe.prefetch(None)
        pipe.prefetch(7)
        pipe.forward_backward(*rows(4), sample_ids=[1, 2, 3, 4])
        pipe.prefetch([8, 9])
        pipe.forward_backward(*rows(4), sample_ids=[1, 2, 3, 4])


def test_bad_ids():
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    with pytest.raises(ValueError, match="sample id 3 occurs twice"):
        pipe.prefetch([3, 1, 3])
    with pytest.raises(TypeError, match="expected whole numbers"):
        pipe.prefetch(torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "files"])
def test_rows_for_a_gpu_come_through_page_locked_memory(where, tmp_path):
    place = str(tmp_path) if where == "files" else "cpu"
    device = torch.device("cuda:0")
    store = SlotStore(5, StoragePlan(location=place), device)
    store.write(keys(*range(10)), torch.arange(10.0, device=device)[:, None].expand(10, 5))
    store.prefetch([keys(4, 2, 9)])
    (part,) = store._ahead._running
    assert part.rows.result()[0].is_pinned()
    store.write(keys(2), torch.full((1, 5), 50.0, device=device))
    got = store.read(keys(4, 2, 9))
    assert got.device == device and got[:, 0].tolist() == [4, 50, 9]
