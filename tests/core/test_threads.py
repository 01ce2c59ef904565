"""Slices of large arrays, and threads that take them."""

import gc
import os
import signal
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, ProcessGroupGloo

from mpcomp.core import threads
from mpcomp.core.randomness import uniform

CPU = torch.device("cpu")


@given(blocks=st.integers(0, 50), columns=st.integers(0, 3_000_000), together=st.integers(1, 40))
def test_slices_are_all_rows_in_order_and_blocks_stay_whole(blocks, columns, together):
    rows = blocks * together
    slices = threads.slices_of(rows, columns, together)
    assert [row for some in slices for row in range(some.start, some.stop)] == list(range(rows))
    assert all(some.start % together == 0 and some.stop % together == 0 for some in slices)
    if len(slices) > 1:
        smallest = min(some.stop - some.start for some in slices)
        assert smallest * columns > threads._ELEMENTS / 2 or smallest == together


def test_results_are_in_order_on_as_many_threads_as_torch_may_use(monkeypatch):
    here = threading.current_thread()
    assert threads.each(lambda i: (i, threading.current_thread()), [0, 1]) == [(0, here), (1, here)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    meeting = threading.Barrier(2, timeout=60)  # passed by two at once, or not at all

    def meet(i):
        meeting.wait()
        return i * i

    assert threads.each(meet, [3, 1, 2, 5]) == [9, 1, 4, 25]
    with pytest.raises(ZeroDivisionError):
        threads.each(lambda i: 1 // i, [1, 0, 2])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert threads.each(abs, [-1, -2]) == [1, 2]
    child = os.fork()
    if not child:
        os._exit(0 if threads.each(abs, [-1, -2]) == [1, 2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_frees_nothing_that_waits_for_its_parents_threads():
    """A pipeline that was dropped before a loader's workers began: its groups are garbage there."""
    gc.collect()
    gc.disable()
    try:
        dropped: list[object] = [ProcessGroupGloo(HashStore(), 0, 1)]
        dropped.append(dropped)
        del dropped
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends one that hangs
            gc.collect()
            os._exit(7)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_random_numbers_are_the_same_in_slices(monkeypatch):
    numel = (1 << 15) + 7

    def draw():
        return uniform(torch.Generator().manual_seed(9), numel, CPU)

    whole = draw()
    monkeypatch.setattr(threads, "_ELEMENTS", 1000)
    assert len(threads.slices_of(numel, 1)) > 30 and torch.equal(draw(), whole)


#: Environment, threads of torch, cores, whether it computes on a GPU; threads of the coder.
MACHINES = {
    "a CPU": ({}, 3, 16, False, 3),
    "a CPU under torchrun": ({"LOCAL_WORLD_SIZE": "4"}, 1, 16, False, 1),
    "a GPU": ({}, 1, 16, True, 16),
    "a GPU each, torchrun": ({"LOCAL_WORLD_SIZE": "4"}, 1, 16, True, 4),
    "a GPU each, mpirun": ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 1, 16, True, 5),
    "more ranks than cores": ({"LOCAL_WORLD_SIZE": "8"}, 1, 2, True, 1),
    "as somebody says": ({"LOCAL_WORLD_SIZE": "8", "MPCOMP_THREADS": "6"}, 1, 2, True, 6),
    "as somebody says, a CPU": ({"MPCOMP_THREADS": "2"}, 8, 8, False, 2),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_coder_has_threads_of_its_own(monkeypatch, machine):
    environment, of_torch, cores, on_gpu, expected = MACHINES[machine]
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPCOMP_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(threads, "num_cores", lambda: cores)
    assert threads.num_threads() == expected
    seen = threads.each(lambda _: threading.current_thread().name, list(range(4 * expected)))
    assert len(set(seen)) <= expected
    assert (seen[0] == threading.current_thread().name) == (expected == 1)


#: Environment, threads of torch, cores, device, ranks; whether messages are coded beside stages.
SPARE = {
    "a core each": ({}, 1, 2, "cpu", 2, False),
    "two cores each": ({}, 1, 4, "cpu", 2, True),
    "one more than torch has": ({}, 3, 8, "cpu", 2, True),
    "as many as torch has": ({}, 4, 8, "cpu", 2, False),
    "machines of their own": ({"LOCAL_WORLD_SIZE": "1"}, 1, 2, "cpu", 8, True),
    "all on a machine": ({"LOCAL_WORLD_SIZE": "8"}, 1, 8, "cpu", 8, False),
    "more ranks than cores": ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1, 2, "cpu", 4, False),
    "a GPU": ({"LOCAL_WORLD_SIZE": "1"}, 1, 16, "cuda", 2, False),
    "a GPU, as somebody says": ({"MPCOMP_BACKGROUND": "1"}, 1, 16, "cuda", 2, True),
    "as somebody says": ({"MPCOMP_BACKGROUND": "1"}, 8, 1, "cpu", 2, True),
    "not, as somebody says": ({"MPCOMP_BACKGROUND": "0"}, 1, 64, "cpu", 2, False),
}


@pytest.mark.parametrize("machine", SPARE)
def test_messages_are_coded_beside_stages_where_a_core_is_to_spare(monkeypatch, machine):
    environment, of_torch, cores, device, num_ranks, expected = SPARE[machine]
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPCOMP_BACKGROUND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    monkeypatch.setattr(threads, "num_cores", lambda: cores)
    assert threads.codes_beside(torch.device(device), num_ranks) is expected


@pytest.mark.parametrize("text", ["", "2", "-1", "yes", "true", "01"])
def test_neither_in_the_background_nor_in_turn(monkeypatch, text):
    monkeypatch.setenv("MPCOMP_BACKGROUND", text)
    with pytest.raises(ValueError, match=f"MPCOMP_BACKGROUND='{text}': expected 1, to code"):
        threads.codes_beside(torch.device("cpu"), 2)


@pytest.mark.parametrize("text", ["0", "", "-1", "two", "1.5", "²"])
def test_a_number_of_threads_that_is_none(monkeypatch, text):
    monkeypatch.setenv("MPCOMP_THREADS", text)
    with pytest.raises(ValueError, match=f"MPCOMP_THREADS='{text}': expected a whole number"):
        threads.each(abs, [-1, -2])
