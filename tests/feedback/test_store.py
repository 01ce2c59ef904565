"""The table of rows: found by key, rounded as planned, grown, capped, mapped, saved."""

import errno
import gc
import os
import signal

import pytest
import torch
from methods import round_trip, same_bits

from mpcomp import Cast, Quantize, TensorMeta
from mpcomp.feedback import store as stores
from mpcomp.feedback.store import FileTable, MemoryTable, SlotStore, StoragePlan

CPU = torch.device("cpu")
STORAGES = {
    "fp32": None,
    "fp16": Cast("fp16"),
    "bf16": Cast("bf16"),
    1: Quantize(1, scale="sample"),
    4: Quantize(4, scale="sample"),
    8: Quantize(8, scale="sample"),
}


def keys(*numbers: int) -> list[tuple[int, ...]]:
    return [(n,) for n in numbers]


@pytest.mark.parametrize("location", ["device", "cpu", "files", "blocks"])
@pytest.mark.parametrize("storage", STORAGES)
def test_rows_come_back_by_key_as_stored(storage, location, tmp_path, monkeypatch):
    """Any order, overwritten, grown beyond its capacity; rounded once, each row with its scale."""
    place = {"files": str(tmp_path), "blocks": "cpu"}.get(location, location)
    if location == "blocks":  # of four rows, or more where they are stored in bits
        monkeypatch.setattr(stores, "_BLOCK_BYTES", 4 * 28)
    store = SlotStore(7, StoragePlan(storage, place), CPU)
    expected = {}
    for step in range(6):
        chosen = torch.randperm(40)[: 5 + step].tolist()
        rows = torch.randn(len(chosen), 7) * 10.0**step
        before = rows.clone()
        store.write(keys(*chosen), rows)
        assert same_bits(rows, before)
        coder = STORAGES[storage]
        coded = rows if coder is None else round_trip(coder, rows)
        expected.update(zip(chosen, coded, strict=True))
    for _ in range(3):
        asked = torch.randperm(40)[:20].tolist()
        got = store.read(keys(*asked))
        assert got.dtype == torch.float32 and got.shape == (20, 7)
        assert store.known(keys(*asked)) == [key in expected for key in asked]
        for key, row in zip(asked, got, strict=True):
            assert same_bits(row, expected.get(key, torch.zeros(7)))
    assert len(store) == len(expected)
    again = SlotStore(7, StoragePlan(storage, place), CPU)
    again.load_state_dict(store.state_dict())
    assert same_bits(again.read(keys(*range(40))), store.read(keys(*range(40))))


@pytest.mark.parametrize(
    "storage, row_bytes", [("fp32", 40), ("fp16", 20), ("bf16", 20), (8, 14), (4, 9)]
)
def test_bytes_are_what_the_storage_says(storage, row_bytes):
    store = SlotStore(10, StoragePlan(storage), CPU)
    assert store.row_bytes == row_bytes and store.num_bytes == 0
    store.write(keys(1, 2, 3), torch.randn(3, 10))
    assert store.num_bytes == 3 * row_bytes


def test_what_is_read_is_a_copy():
    for storage in ("fp32", 4):
        store = SlotStore(5, StoragePlan(storage), CPU)
        store.write(keys(0, 1), torch.ones(2, 5))
        for asked in (keys(0, 1), keys(1, 0), keys(0, 9)):
            store.read(asked).fill_(7)
        assert torch.equal(store.read(keys(0, 1)), torch.ones(2, 5))


def test_a_cap_admits_the_first_and_updates_them():
    store = SlotStore(5, StoragePlan(cap_bytes=2 * 20 + 19), CPU)
    store.write(keys(3, 1, 2), torch.full((3, 5), 1.0))
    assert store.known(keys(3, 1, 2)) == [True, True, False]
    store.write(keys(2, 1), torch.full((2, 5), 2.0))
    assert store.read(keys(3, 1, 2))[:, 0].tolist() == [1, 2, 0]
    assert len(store) == 2


@pytest.mark.parametrize("storage", STORAGES)
def test_state_goes_through_a_checkpoint(storage):
    store = SlotStore(7, StoragePlan(storage), CPU)
    store.write([(0, 5), (2, 1), (1, 1)], torch.randn(3, 7))
    again = SlotStore(7, StoragePlan(storage), CPU)
    again.load_state_dict(store.state_dict())
    asked = [(1, 1), (0, 5), (9, 9), (2, 1)]
    assert again.known(asked) == store.known(asked)
    assert same_bits(again.read(asked), store.read(asked))
    for one in (store, again):
        one.write([(9, 9), (0, 5)], torch.arange(14.0).reshape(2, 7))
    assert same_bits(again.read(asked), store.read(asked))
    empty = SlotStore(7, StoragePlan(storage), CPU)
    empty.load_state_dict(SlotStore(7, StoragePlan(storage), CPU).state_dict())
    assert len(empty) == 0


def test_files_go_with_their_table(tmp_path):
    store = SlotStore(7, StoragePlan(4, str(tmp_path / "new")), CPU)
    store.write(keys(*range(100)), torch.randn(100, 7))
    files = [table._file for table in store._tables]
    found = [os.fstat(file) for file in files]
    assert len(set(files)) == 3 and sum(one.st_size for one in found) >= store.num_bytes
    assert {one.st_dev for one in found} == {(tmp_path / "new").stat().st_dev}
    del store
    gc.collect()
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_files_have_no_name_that_could_outlive_a_process(tmp_path):
    """Whatever ends it: the system frees what is open and not linked."""
    store = SlotStore(7, StoragePlan(location=str(tmp_path)), CPU)
    store.write(keys(1, 2), torch.ones(2, 7))
    assert not list(tmp_path.iterdir())
    assert [os.fstat(table._file).st_nlink for table in store._tables] == [0]
    child = os.fork()
    if child == 0:
        try:
            again = SlotStore(7, StoragePlan(location=str(tmp_path)), CPU)
            again.write(keys(1, 2), torch.ones(2, 7))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_first_rows_of_a_file_are_mapped_and_nobody_else_s(tmp_path):
    """A checkpoint looks at them without reading all, after the table has gone on, or is gone."""
    table = FileTable(TensorMeta((1, 7), torch.bfloat16), str(tmp_path))
    rows = torch.randn(5, 7).bfloat16()
    table.write(range(5), rows, 5)
    first = table.first(3)
    assert same_bits(first, rows[:3]) and table.first(0).shape == (0, 7)
    first.fill_(9)
    assert same_bits(table.read(range(5)), rows)
    del table
    gc.collect()
    assert same_bits(first, torch.full((3, 7), 9.0).bfloat16())


def test_large_tables_in_memory_are_not_copied_to_grow(monkeypatch):
    monkeypatch.setattr(stores, "_BLOCK_BYTES", 4 * 20)
    table = MemoryTable(TensorMeta((1, 5)), CPU)
    for count in range(1, 30):
        table.write([count - 1], torch.full((1, 5), float(count)), count)
        reserved = sum(block.shape[0] for block in table._blocks)
        assert reserved < min(2 * count + 1, count + 4)
        if count == 4:
            first = table._blocks[0]
    assert table._blocks[0] is first and len(table._blocks) == 8
    assert table.first(29)[:, 0].tolist() == list(range(1, 30))


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    store = SlotStore(7, StoragePlan(location=str(tmp_path / "full-disk")), CPU)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left.*cap_bytes.*last checkpoint.*full-disk"):
        store.write(keys(1), torch.ones(1, 7))


def test_a_file_that_lost_its_end_is_noticed(tmp_path):
    store = SlotStore(7, StoragePlan(location=str(tmp_path)), CPU)
    store.write(keys(1, 2), torch.ones(2, 7))
    os.ftruncate(store._tables[0]._file, 40)
    with pytest.raises(OSError, match=r"a file of rows in \S+ ends at byte 40"):
        store.read(keys(2, 1))


def test_files_are_read_and_written_in_parts_where_the_system_says_so(tmp_path, monkeypatch):
    """A call may move fewer bytes than it was asked to."""
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda f, parts, at: preadv(f, [parts[0][:11]], at))
    monkeypatch.setattr(os, "pwrite", lambda f, part, at: pwrite(f, part[:9], at))
    store = SlotStore(7, StoragePlan(location=str(tmp_path)), CPU)
    rows = torch.randn(4, 7)
    store.write(keys(3, 1, 2, 0), rows)
    assert same_bits(store.read(keys(1, 2, 0, 3)), rows[[1, 2, 3, 0]])


def test_bad_plans():
    with pytest.raises(ValueError, match="storage='int8'.*fp32, fp16, bf16 or in 1 to 8 bits"):
        StoragePlan("int8")
    with pytest.raises(ValueError, match="cap_bytes=-1: a cap is a positive number"):
        StoragePlan(cap_bytes=-1)
    with pytest.raises(
        ValueError, match=r"one sample's state takes 28 bytes \(7 elements as fp32\)"
    ):
        SlotStore(7, StoragePlan(cap_bytes=27), CPU)
